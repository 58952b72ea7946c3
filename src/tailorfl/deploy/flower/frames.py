"""Frames on a socket of one machine: some JSON and some bytes, between a Flower app and the process that it serves.

A frame is 4 bytes with the length of the JSON, 8 with that of the bytes, and both. The socket lies in a folder that
only its owner may enter. Nothing here imports torch: an app's process lives for one message.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct(">IQ")
LARGEST_JSON = 2**20
LARGEST_BODY = 2**32


def put(connection: socket.socket, about: Any, body: bytes = b"") -> None:
    """Sends a frame. Raises OSError where the other side is gone."""
    text = json.dumps(about).encode()
    connection.sendall(_HEAD.pack(len(text), len(body)) + text)
    connection.sendall(body)


def get(connection: socket.socket) -> tuple[Any, bytes]:
    """Returns the next frame. Raises OSError where the other side is gone, or sends something else."""
    text, body = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if text > LARGEST_JSON or body > LARGEST_BODY:
        raise OSError(f"a frame of {text} and {body} bytes is too large")
    return json.loads(_exactly(connection, text)), _exactly(connection, body)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = connection.recv(min(left, 2**20))
        if not part:
            raise OSError("the other side has closed the connection")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def connect(path: str) -> socket.socket:
    """Returns a connection to a socket of this machine. Raises OSError where nobody listens there."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.connect(path)
    except OSError:
        found.close()
        raise
    return found
