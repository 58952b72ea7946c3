"""Flower as the post: its link state and Fleet API in the server's process, its Fleet client in the client's.

Only here, in `flower_server` and in `flower_client` is Flower known, by parts of it that are not its public interface:
`pyproject.toml` says which versions are meant, and `tests/deploy/test_flower.py` holds them to what is needed. Flower's
other abilities (its Control and Runtime API, apps that are sent and run, the installation of packages) are not served,
not called and not imported.

A node is one process of a client. It makes a key that lasts as long as it does, registers with it, and asks for
messages; whose it is, is said by the certificate of its connection. Times are measured by clocks that do not jump.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from tailorfl.errors import MissingExtraError

try:
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.app.message.message import remove_content_from_message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
except ImportError as error:
    raise MissingExtraError("flwr", "deploy") from error

for _name in ("flwr", "uvicorn", "httpx"):  # they print every call
    logging.getLogger(_name).setLevel(logging.CRITICAL)

RECORD, NAME = "packet", "bytes"
BESIDE = 2**20
"""Bytes of a message beside its packet."""
LARGEST_REQUEST = 2**24
"""Bytes of one request: Flower sends arrays in pieces of 5 MiB."""
COUNTED = ("messages_total", "answers_total", "bytes_down_total", "bytes_up_total")
"""Numbers that both sides count: packets of the server, those of clients, and their bytes."""


def content(body: bytes) -> RecordDict:
    """Return bytes as the content of a message: one array in one record."""
    return RecordDict({RECORD: ArrayRecord({NAME: Array(np.frombuffer(body, dtype=np.uint8))})})


def in_parts(message: Message) -> tuple[Message, Any, Mapping[str, Any]]:
    """Return a message as Flower sends it: without its content, the tree of what belongs to it, and that by name."""
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = get_all_nested_objects(message)
    return remove_content_from_message(message), get_object_tree(message), parts


def body_of(message_id: str, parts: dict[str, bytes]) -> bytes:
    """Return the bytes in the parts of a message. Raises ValueError where there are none."""
    message: Any = inflate_object_from_contents(message_id, parts)
    record = message.content.array_records.get(RECORD) if message.has_content() else None
    if record is None or list(record) != [NAME]:
        raise ValueError("a message holds no packet")
    body: bytes = record[NAME].numpy().astype(np.uint8).tobytes()
    return body
