"""Packets as Flower's messages: one array of bytes in one record, and nothing else."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

RECORD, NAME = "packet", "bytes"


def content(body: bytes) -> RecordDict:
    """Returns bytes as the content of a message."""
    return RecordDict({RECORD: ArrayRecord({NAME: Array(np.frombuffer(body, dtype=np.uint8))})})


def body_of(message: Message) -> bytes:
    """Returns the bytes of a message. Raises ValueError where there are none."""
    record = message.content.array_records.get(RECORD) if message.has_content() else None
    if record is None or list(record) != [NAME]:
        raise ValueError("a message holds no packet")
    return record[NAME].numpy().astype(np.uint8).tobytes()
