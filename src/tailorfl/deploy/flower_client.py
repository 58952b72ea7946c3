"""Flower as the transport, and its client side: a connection that fetches letters and sends their answers.

Flower's link state and Fleet API run in the server's process (`flower_server`), its Fleet client in the client's. Only
these two modules use Flower, and parts of it that are not its public interface: `pyproject.toml` names the supported
versions, and `tests/deploy/test_flower.py` tests the needed parts. Flower's other abilities (its Control and Runtime
API, apps that are sent and run, the installation of packages) are not served, called or imported.

A node is one process of a client. It makes a key for its lifetime, registers with it, and asks for messages. The
certificate of its connection tells whose node it is. Times are measured by monotonic clocks.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailorfl.deploy.keys import Tls
from tailorfl.deploy.messages import LARGEST
from tailorfl.errors import RunError, needs_extra

with needs_extra("flwr", "deploy"):
    import httpx
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.app.message.message import remove_content_from_message
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
        PushMessagesRequest,
        RegisterNodeFleetRequest,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_body,
        get_object_head_values_from_object_content,
        get_object_tree,
        iterate_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_pull_object_fn_protobuf,
        make_push_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPullError,
        ObjectPushError,
        ObjectUnavailableError,
        inflate_object_from_contents,
    )
    from flwr.supernode.fleet_http_client import FleetHttpClient

for _name in ("flwr", "uvicorn", "httpx"):  # they log every call
    logging.getLogger(_name).setLevel(logging.CRITICAL)

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 4.0
"""Longest time between two signs of life of a client, also while it computes."""
CALL_SECONDS = 30.0
"""Time limit of one request."""
RECORD, NAME = "packet", "bytes"
BESIDE = 2**20
"""Largest number of bytes of a message in addition to its packet."""
LARGEST_REQUEST = 2**24
"""Largest number of bytes of one request: Flower sends arrays in pieces of 5 MiB."""
KEY = 32
"""Number of bytes of a node's key."""
SALT = 16
"""Number of random bytes before an answer. Flower keeps the structure of a part that was announced first, so nobody
else may know a part before it is announced."""
COUNTED = ("messages_total", "answers_total", "bytes_down_total", "bytes_up_total")
"""Counters on both sides: packets of the server, packets of clients, and their bytes."""


def content(body: bytes) -> RecordDict:
    """Return bytes as the content of a message: one array in one record."""
    return RecordDict({RECORD: ArrayRecord({NAME: Array(np.frombuffer(body, dtype=np.uint8))})})


def in_parts(message: Message) -> tuple[Message, Any, Mapping[str, Any]]:
    """Return a message as Flower sends it: the message without content, its tree of objects, and these by name."""
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = get_all_nested_objects(message)
    return remove_content_from_message(message), get_object_tree(message), parts


def body_of(message_id: str, parts: dict[str, bytes], largest: int) -> bytes:
    """Return the packet's bytes, at most `largest`, from the parts of a message. Raises ValueError if it holds none."""
    try:
        if sum(_lengths(parts)) > largest + BESIDE:
            raise ValueError(f"its arrays have more than {largest} bytes")
        message: Any = inflate_object_from_contents(message_id, parts)
        (array,) = message.content.array_records[RECORD].values()
        body: bytes = array.numpy().astype(np.uint8).tobytes()
    except Exception as error:  # the other side can send anything
        raise ValueError(f"a message contains no packet: {type(error).__name__}") from error
    return body


def _lengths(parts: Mapping[str, bytes]) -> Iterator[int]:
    """Yield the length of each chunk of each array, as often as the array lists it: a few bytes may stand for many."""
    for part in parts.values():
        kind, chunks, _ = get_object_head_values_from_object_content(part)
        if kind == Array.__qualname__:
            for number in json.loads(get_object_body(part, Array))["arraychunk_ids"]:
                yield len(parts[chunks[number]])


class UnreachableError(Exception):
    """The server cannot be reached now, or has failed; the call is repeated."""


class ForgottenError(Exception):
    """The server does not (or no longer) know this node."""


@dataclass(frozen=True)
class ServerMessage:
    """A letter of the server.

    Attributes:
        body: its bytes.
        message: Flower's message, to which an answer refers.
        problem: why there are no bytes.
    """

    body: bytes
    message: Message
    problem: str = ""


class Connection:
    """A client's connection to a server: one node, which is registered when it is first needed.

    Args:
        server: HOST:PORT.
        tls: the keys and certificates; None: an open connection.
        largest: largest number of bytes of a letter.

    Every method may raise `UnreachableError`, and RunError if the server turns this client away.
    """

    def __init__(self, server: str, tls: Tls | None, largest: int = LARGEST) -> None:
        scheme, verify = ("http", False) if tls is None else ("https", tls.for_client())
        self._server, self._largest = server, largest
        self._calls = FleetHttpClient(f"{scheme}://{server}", verify=verify, timeout=CALL_SECONDS)
        self._calls._client.event_hooks = {"response": [self._bounded]}
        self._node: Any = None
        self._heard = 0.0
        self._over = threading.Event()
        self.numbers: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
        """Counters for monitoring."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def receive(self) -> ServerMessage | None:
        """Return the next letter, or None if there is none now."""
        with self._called():
            if self._node is None:
                self._register()
            reply = self._calls.PullMessages(PullMessagesRequest(node=self._node))
            if not reply.messages_list:
                return None
            try:
                message = message_from_proto(reply.messages_list[0])
                body = self._pulled(message, reply.message_object_trees[0])
                too_large = f"a message from the server has more than {self._largest} bytes"
                problem = too_large if body is None else ""
                self.numbers["messages_total"] += 1
                self.numbers["bytes_down_total"] += len(body or b"")
                return ServerMessage(body or b"", message, problem)
            except Exception:
                # It counts as delivered and would not come again; as a new node this client is asked again.
                self._leave()
                raise

    def _pulled(self, message: Message, tree: Any) -> bytes | None:
        """Return the bytes of a letter, or None if it is too large."""
        run, message_id = message.metadata.run_id, message.metadata.message_id
        pull = make_pull_object_fn_protobuf(self._calls.PullObject, self._node, run)
        parts: dict[str, bytes] = {}
        for part in iterate_object_tree(tree):
            if part.object_id not in parts:
                parts[part.object_id] = pull(part.object_id)
            if sum(map(len, parts.values())) > self._largest + BESIDE:
                return None
        confirm = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=message_id)
        self._calls.ConfirmMessageReceived(confirm)
        return body_of(message_id, parts, self._largest)

    def send(self, question: ServerMessage, body: bytes) -> None:
        """Send the answer to a letter. Raises ForgottenError if the server no longer waits for it."""
        about = question.message.metadata
        message = Message(content(secrets.token_bytes(SALT) + body), reply_to=question.message)
        # by the server's clock
        message.metadata.created_at, message.metadata.ttl = about.created_at, about.ttl
        header, tree, parts = in_parts(message)
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(header)],
            message_object_trees=[tree],
            clientapp_runtime_list=[0.0],
        )
        with self._called():
            begun = self._calls.PushMessages(request)
            push = make_push_object_fn_protobuf(
                self._calls.PushObject, self._node, about.run_id, begun.session_id
            )
            for part in begun.objects_to_push:
                push(part, parts[part].deflate())
        self.numbers["answers_total"] += 1
        self.numbers["bytes_up_total"] += len(body)

    def close(self) -> None:
        """Say goodbye, within seconds, and close the connection."""
        self._over.set()
        self._leave()
        self._calls.close()

    # -- calls ----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        key = secrets.token_bytes(KEY)  # Flower's name for the node; the certificate proves its identity
        self._calls.RegisterNode(RegisterNodeFleetRequest(public_key=key))
        node = self._calls.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0))
        self._node = Node(node_id=node.node_id)

    def _leave(self) -> None:
        node, self._node = self._node, None
        if node is None:
            return
        self._calls._client.timeout = 2.0
        try:
            self._calls.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        except Exception as error:  # the server notices anyway
            log.debug("no goodbye: %s", error)
        finally:
            self._calls._client.timeout = CALL_SECONDS

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Convert the error of a failed call."""
        try:
            yield
            self._heard = time.monotonic()
        except httpx.HTTPStatusError as error:
            status, detail = error.response.status_code, _detail(error.response)
            if status == 403:
                raise RunError(f"the server at {self._server} turns this client away: {detail}") from error
            if status == 404:
                self._node = None
            if status in (404, 413):
                raise ForgottenError(detail) from error
            raise UnreachableError(f"it answers with status {status}: {detail}") from error
        except (ObjectPullError, ObjectPushError, ObjectUnavailableError) as error:
            raise ForgottenError(str(error)) from error
        except (httpx.HTTPError, ValueError) as error:
            raise UnreachableError(str(error) or type(error).__name__) from error

    def _beat(self) -> None:
        """Send the server signs of life while this client computes."""
        while not self._over.wait(HEARTBEAT_SECONDS / 2):
            node = self._node
            if node is None or time.monotonic() - self._heard < HEARTBEAT_SECONDS / 2:
                continue
            try:
                self._calls.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=30.0))
            except Exception as error:  # the next call reports the problem
                log.debug("no heartbeat: %s", error)

    def _bounded(self, response: httpx.Response) -> None:
        """Refuse an answer of the server above the size limit before it is read, and one that would grow when read."""
        size, grows = response.headers.get("content-length", ""), {"content-encoding", "transfer-encoding"}
        if not size.isdigit() or int(size) > LARGEST_REQUEST or grows & set(response.headers):
            response.close()
            raise RunError(f"the server at {self._server} sends more than {LARGEST_REQUEST} bytes at once")


def _detail(response: httpx.Response) -> str:
    try:
        content = response.json()
    except ValueError:
        return response.reason_phrase
    return str(content.get("detail", content) if isinstance(content, dict) else content)[:500]
