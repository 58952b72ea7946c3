"""Flower as the post: its link state and Fleet API in the server's process, its Fleet client in the client's.

Only here is Flower known, by parts of it that are not its public interface: `pyproject.toml` says which versions are
meant, and `tests/deploy/test_flower.py` holds them to what is needed. What Flower could do beside (its Control and
Runtime API, apps that are sent and run, the installation of packages) is not served, not called and not imported.

A node is one process of a client. It makes a key that lasts as long as it does, registers with it, and asks for
messages; whose it is, is said by the certificate of its connection. Times are measured by clocks that do not jump.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailorfl.deploy.codec import LARGEST
from tailorfl.deploy.keys import Tls
from tailorfl.deploy.transport import Arrival, Letter
from tailorfl.errors import MissingExtraError, RunError

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI
    from flwr.app import Message, RecordDict
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

RECORD, NAME = "packet", "bytes"
FOREVER = 10 * 365 * 86400.0
"""What Flower is told of how long a message holds: it compares wall clocks, and ours are not needed for it."""
HEARTBEAT_SECONDS = 4.0
"""A client is heard of at least so often, also while it computes."""
GONE_SECONDS, LEFT_SECONDS = 20.0, 6.0
"""A node that was not heard of for so long is gone; the second, where it has no connection open any more."""
TICK_SECONDS = 0.25
CALL_SECONDS = 30.0
"""How long one request may take."""
BESIDE = 2**20
"""Bytes of a message beside its packet."""
LARGEST_REQUEST = 2**24
"""Bytes of one request: Flower sends arrays in pieces of 5 MiB."""
DOORS = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "register-node",
        "activate-node",
        "deactivate-node",
        "unregister-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
"""The calls that a client needs; there are no others."""
COUNTED = ("messages_total", "answers_total", "bytes_down_total", "bytes_up_total")
"""What both sides count: packets of the server, those of clients, and their bytes."""
Admitted = Callable[[str, str], str]
"""Says why the holder of a certificate (its name, its serial number) is not let in; "" where he is."""


def quiet() -> None:
    """Turn off Flower's telemetry, its search for updates, and what it prints of every call.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("flwr", "deploy") from error
    for name in ("flwr", "uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def content(body: bytes) -> RecordDict:
    """Return bytes as the content of a message: one array in one record."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({RECORD: ArrayRecord({NAME: Array(np.frombuffer(body, dtype=np.uint8))})})


def body_of(message: Message) -> bytes:
    """Return the bytes of a message. Raises ValueError where there are none."""
    import numpy as np

    record = message.content.array_records.get(RECORD) if message.has_content() else None
    if record is None or list(record) != [NAME]:
        raise ValueError("a message holds no packet")
    return record[NAME].numpy().astype(np.uint8).tobytes()


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- the server's side --------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A node that has registered: whose it is, when it was heard of, and how much it has sent for its letter.

    `connections` are those over which it was heard of and that are still open.
    """

    name: str
    seen: float
    connections: set[int]
    sent: int = 0

    def gone(self, now: float) -> bool:
        """Whether it was not heard of for too long."""
        return now - self.seen > (GONE_SECONDS if self.connections else LEFT_SECONDS)


@dataclass
class _Letter:
    """A letter under way: to which node, and until when its answer is waited for."""

    node: int
    until: float


class Link:
    """Serves clients at an address, in a thread, and is the server's post.

    Args:
        host, port: where to listen.
        tls: what secures it; None: anybody who reaches it may join.
        admitted: whether a certificate of the federation's authority is still let in.
        largest: bytes of an answer that are taken.

    Raises:
        RunError: the port is taken, or nobody may listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: Tls | None,
        admitted: Admitted = lambda name, serial: "",
        largest: int = LARGEST,
    ) -> None:
        quiet()
        import uvicorn
        from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
        from flwr.superlink.config_loader import (
            get_federation_manager,
            get_objectstore_linkstate_factories,
        )

        self._admitted, self._largest, self._secured = admitted, largest, tls is not None
        self._lock = threading.RLock()
        self._owners: dict[bytes, str] = {}  # public key -> name of the certificate it was registered with
        self._nodes: dict[int, _Node] = {}
        self._letters: dict[str, _Letter] = {}
        self._over, self._awake = threading.Event(), 0.0
        self.numbers: dict[str, float] = dict.fromkeys(("clients", *COUNTED), 0.0)
        """For those who watch over it."""
        _, self._factory = get_objectstore_linkstate_factories(
            FLWR_IN_MEMORY_DB_NAME, get_federation_manager()
        )
        self._state: Any = self._factory.state()
        self._run = self._begun()
        listening = _listening(host, port)
        config = uvicorn.Config(
            _gate(self._application(), self._turned_away),
            http=_protocol(self._closed),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=2,
            ssl_context_factory=None if tls is None else lambda config, default: tls.for_server(),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="fleet", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._tick, name="awake", daemon=True).start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RunError(f"Flower's Fleet API has not come up at {host}:{port}")
            time.sleep(0.01)

    # -- the post -------------------------------------------------------------------------------------------

    def nodes(self) -> dict[int, str]:
        """Return the nodes that were heard of lately, with the names of their certificates."""
        with self._lock:
            for node in [node for node, about in self._nodes.items() if about.gone(self._awake)]:
                self._forget(node)
            overdue = time.monotonic() - GONE_SECONDS
            for ticket in [ticket for ticket, letter in self._letters.items() if letter.until < overdue]:
                self._drop(ticket)
            self.numbers["clients"] = len(self._nodes)
            return {node: about.name for node, about in self._nodes.items()}

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Put letters where their nodes find them."""
        there = self.nodes()
        return [self._sent(letter, seconds) if letter.node in there else "" for letter in letters]

    def _sent(self, letter: Letter, seconds: float) -> str:
        from flwr.app import Message
        from flwr.app.message.message import remove_content_from_message
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

        message = Message(
            content(letter.body), letter.node, letter.kind, ttl=FOREVER, group_id=secrets.token_hex(8)
        )
        ticket = message.object_id
        message.metadata.__dict__["_message_id"] = ticket
        session = self._state.start_session(self._run)
        parts = get_all_nested_objects(message)
        with self._lock:
            for part in self._state.preregister_object_tree(get_object_tree(message), session):
                self._state.store_object(self._run, session, part, parts[part].deflate())
            if self._state.store_message_ins(remove_content_from_message(message)) is None:
                return ""
            self._letters[ticket] = _Letter(letter.node, time.monotonic() + seconds)
            self._nodes[letter.node].sent = 0
            self.numbers["messages_total"] += 1
            self.numbers["bytes_down_total"] += len(letter.body)
        return ticket

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Return what has arrived, and for which letters nothing will."""
        there = self.nodes()
        found = [self._arrival(ticket, there) for ticket in tickets]
        return [arrival for arrival in found if arrival is not None]

    def _arrival(self, ticket: str, there: dict[int, str]) -> Arrival | None:
        with self._lock:
            letter = self._letters.get(ticket)
            if letter is None:
                return Arrival(ticket, None, "nobody waits for this answer any more")
            # Flower's own look for a reply asks the wall clock whether the node is there, and drops what it said before
            # it left.
            reply = self._state.message_ins_id_to_message_res_id.get(ticket)
            arrived = None if reply is None else self._read(ticket, reply)
            if arrived is None and letter.node not in there:
                arrived = Arrival(ticket, None, "the node is gone")
            elif arrived is None and self._nodes[letter.node].sent > self._largest + BESIDE:
                arrived = Arrival(ticket, None, f"its answer has more than {self._largest} bytes")
            elif arrived is None and time.monotonic() > letter.until:
                arrived = Arrival(ticket, None, "the node did not answer in time")
            if arrived is not None:
                self._drop(ticket)
                if arrived.body is not None:
                    self.numbers["answers_total"] += 1
                    self.numbers["bytes_up_total"] += len(arrived.body)
            return arrived

    def _read(self, ticket: str, reply: str) -> Arrival | None:
        """Return an answer, None where some of it is still on its way."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        store = self._state.object_store
        try:
            names = [part.object_id for part in iterate_object_tree(store.get_object_tree(reply))]
            parts = {name: store.get(name) for name in names}
            if not all(parts.values()):
                return None
            return Arrival(ticket, body_of(inflate_object_from_contents(reply, parts)))  # type: ignore[arg-type]
        except Exception as error:  # whatever a client has made of it
            log.warning("an answer cannot be read: %s", type(error).__name__)
            return Arrival(ticket, None, "its answer cannot be read")

    def _drop(self, ticket: str) -> None:
        del self._letters[ticket]
        reply = self._state.message_ins_id_to_message_res_id.get(ticket, "")
        self._state.delete_messages({ticket})
        for whole in (ticket, reply):
            self._state.object_store.delete(whole)

    def close(self) -> None:
        """Stop listening; connections that are open get two seconds."""
        self._over.set()
        self._server.should_exit = True
        self._thread.join(5.0)

    def _tick(self) -> None:
        """Count the seconds that this process runs: while it sleeps, as its machine may, it hears of nobody."""
        while not self._over.wait(TICK_SECONDS):
            self._awake += TICK_SECONDS

    # -- what Flower's link state needs ---------------------------------------------------------------------

    def _begun(self) -> int:
        """Return the number of a run that has no app, and that no silence ends."""
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
        from flwr.supercore.task_identity import TaskIdentity

        run: int = self._state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
        )
        task = self._state.get_run_info(run_ids=[run])[0].primary_task_id
        self._state.claim_task(task)
        self._state.activate_task(task)
        self._state.task_token_store.clear()  # by its token a task would have to be kept alive
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, SUPERLINK_NODE_ID
        return run

    def _forget(self, node: int) -> None:
        if self._nodes.pop(node, None) is not None:
            for key in [k for k in self._owners if self._state.get_node_id_by_public_key(k) == node]:
                del self._owners[key]

    def _application(self) -> FastAPI:
        from fastapi import FastAPI
        from flwr.common.constant import TRANSPORT_TYPE_GRPC_RERE
        from flwr.supercore.error import http_error_translator
        from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
        from flwr.superlink.routers.fleet.router import router
        from starlette.middleware import Middleware
        from starlette.middleware.base import BaseHTTPMiddleware

        app = FastAPI(
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            middleware=[
                Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
                Middleware(ProtobufTranslationMiddleware),
                Middleware(_Checked, check=self._check, heard=self._heard),
            ],
        )
        app.state.linkstate_factory, app.state.fleet_api_type = self._factory, TRANSPORT_TYPE_GRPC_RERE
        app.state.enable_supernode_auth = False
        app.state.fleet_event_log_plugin = app.state.artifact_provider = None
        app.include_router(router)
        return app

    # -- who may do what ------------------------------------------------------------------------------------

    def _turned_away(self, name: str, serial: str) -> str:
        if not self._secured:
            return ""
        return self._admitted(name, serial) if name else "there is no certificate, or no name in it"

    def _closed(self, connection: int) -> None:
        """Note that a connection is over."""
        with self._lock:
            for node in self._nodes.values():
                node.connections.discard(connection)

    def _check(self, request: Any, name: str, connection: int) -> tuple[int, str]:
        """Return (status, reason) of a call that is refused, (0, "") where it is not."""
        with self._lock:
            key = getattr(request, "public_key", b"")
            if key:
                if self._owners.setdefault(key, name) != name:
                    return 403, "this key was registered with another certificate"
                return 0, ""
            number = _node_of(request)
            node = self._nodes.get(number)
            if node is None:
                return 404, "this node is not registered"
            if node.name != name or any(m.metadata.src_node_id != number for m in _messages(request)):
                return 403, "this node is of another certificate"
            node.sent += len(getattr(request, "object_content", b""))
            if node.sent > self._largest + BESIDE:
                return 413, f"an answer may have {self._largest} bytes"
            node.seen = self._awake
            node.connections.add(connection)
            return 0, ""

    def _heard(self, request: Any, name: str, connection: int) -> None:
        """Note after a call that a node has come, or has gone."""
        with self._lock:
            match type(request).__name__:
                case "ActivateNodeRequest":
                    number = self._state.get_node_id_by_public_key(request.public_key)
                    if number is not None:
                        self._nodes[number] = _Node(name, self._awake, {connection})
                case "DeactivateNodeRequest" | "UnregisterNodeFleetRequest":
                    self._forget(request.node_id)


def _node_of(request: Any) -> int:
    return int(request.node.node_id if hasattr(request, "node") else getattr(request, "node_id", 0))


def _messages(request: Any) -> Sequence[Any]:
    return getattr(request, "messages_list", ())


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise RunError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another port (--listen HOST:PORT)"
        ) from error


def _protocol(closed: Callable[[int], None]) -> type:
    """Return uvicorn's protocol, whose requests say by which certificate and connection they came."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Certified(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        app_state: dict[str, Any]

        def connection_made(self, transport: Any) -> None:
            secured = transport.get_extra_info("ssl_object")
            held = (None if secured is None else secured.getpeercert()) or {}
            names = [value for part in held.get("subject", ()) for key, value in part if key == "commonName"]
            self.app_state = {
                **self.app_state,
                "holder": names[0] if names else "",
                "serial": held.get("serialNumber", ""),
                "connection": id(self),
            }
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            closed(id(self))
            super().connection_lost(exc)

    return Certified


def _gate(app: ASGIApp, turned_away: Admitted) -> ASGIApp:
    """Return an application that hands on the calls of clients that are let in, and read nothing of others."""
    from starlette.responses import JSONResponse

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        held = scope["state"]
        reason = turned_away(held["holder"], held["serial"])
        size = dict(scope["headers"]).get(b"content-length", b"")
        if reason:
            status, said = 403, reason
        elif scope["path"] not in DOORS or scope["method"] != "POST":
            status, said = 404, "Not Found"
        elif not size.isdigit() or int(size) > LARGEST_REQUEST:
            status, said = 413, f"a request may have {LARGEST_REQUEST} bytes"
        else:
            await app(scope, receive, send)
            return
        await JSONResponse({"detail": said}, status)(scope, receive, send)

    return gate


class _Checked:
    """Asks before a call whether the certificate's holder may make it, and says afterwards that he has."""

    def __init__(
        self,
        app: ASGIApp,
        check: Callable[[Any, str, int], tuple[int, str]],
        heard: Callable[[Any, str, int], None],
    ) -> None:
        self._app, self._check, self._heard = app, check, heard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import JSONResponse

        held = scope["state"]
        asked = held["protobuf_request"], held["holder"], held["connection"]
        status, said = self._check(*asked)
        if status:
            await JSONResponse({"detail": said}, status)(scope, receive, send)
            return
        await self._app(scope, receive, send)
        self._heard(*asked)


# -- the client's side --------------------------------------------------------------------------------------


class UnreachableError(Exception):
    """The server cannot be reached now, or has failed; it is tried again."""


class ForgottenError(Exception):
    """The server does not know this node (any more)."""


@dataclass(frozen=True)
class ServerMessage:
    """A letter of the server.

    Attributes:
        body: its bytes.
        message: what an answer has to say of it.
        problem: why there are no bytes.
    """

    body: bytes
    message: Message
    problem: str = ""


class Connection:
    """A client's connection to a server: one node, which is registered when it is first needed.

    Args:
        server: HOST:PORT.
        tls: what secures it; None: nothing does.
        largest: bytes of a letter that are taken.

    Every method may raise `UnreachableError`, and RunError where the server turns this client away.
    """

    def __init__(self, server: str, tls: Tls | None, largest: int = LARGEST) -> None:
        quiet()
        from flwr.supernode.fleet_http_client import FleetHttpClient

        scheme, verify = ("http", False) if tls is None else ("https", tls.for_client())
        self._server, self._largest = server, largest
        self._calls = FleetHttpClient(f"{scheme}://{server}", verify=verify, timeout=CALL_SECONDS)
        self._calls._client.event_hooks = {"response": [self._bounded]}
        self._node: Any = None
        self._heard = 0.0
        self._over = threading.Event()
        self.numbers: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
        """For those who watch over it."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def receive(self) -> ServerMessage | None:
        """Return the next letter, None where there is none now."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        with self._called():
            if self._node is None:
                self._register()
            found = self._calls.PullMessages(PullMessagesRequest(node=self._node))
            if not found.messages_list:
                return None
            try:
                message = message_from_proto(found.messages_list[0])
                body = self._pulled(message, found.message_object_trees[0])
                problem = (
                    "" if body is not None else f"a message of the server has more than {self._largest} bytes"
                )
                self.numbers["messages_total"] += 1
                self.numbers["bytes_down_total"] += len(body or b"")
                return ServerMessage(body or b"", message, problem)
            except Exception:
                # It counts as delivered and would not come again: as another node this client is asked again.
                self._leave()
                raise

    def _pulled(self, message: Message, tree: Any) -> bytes | None:
        """Return the bytes of a letter, None where they are too many."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        run, whole = message.metadata.run_id, message.metadata.message_id
        pull = make_pull_object_fn_protobuf(self._calls.PullObject, self._node, run)
        parts: dict[str, bytes] = {}
        for part in iterate_object_tree(tree):
            if part.object_id not in parts:
                parts[part.object_id] = pull(part.object_id)
            if sum(map(len, parts.values())) > self._largest + BESIDE:
                return None
        confirm = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=whole)
        self._calls.ConfirmMessageReceived(confirm)
        return body_of(inflate_object_from_contents(whole, parts))  # type: ignore[arg-type]

    def send(self, question: ServerMessage, body: bytes) -> None:
        """Send the answer to a letter. Raises ForgottenError where the server does not wait for it any more."""
        from flwr.app import Message
        from flwr.app.message.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf

        asked = question.message.metadata
        message = Message(content(body), reply_to=question.message)
        message.metadata.created_at, message.metadata.ttl = (
            asked.created_at,
            asked.ttl,
        )  # by the server's clock
        message.metadata.__dict__["_message_id"] = message.object_id
        parts = get_all_nested_objects(message)
        request = PushMessagesRequest(
            node=self._node,
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
            clientapp_runtime_list=[0.0],
        )
        with self._called():
            begun = self._calls.PushMessages(request)
            push = make_push_object_fn_protobuf(
                self._calls.PushObject, self._node, asked.run_id, begun.session_id
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
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node

        key = secrets.token_bytes(32)  # Flower's name for it; what proves who this is, is the certificate
        self._calls.RegisterNode(RegisterNodeFleetRequest(public_key=key))
        node = self._calls.ActivateNode(ActivateNodeRequest(public_key=key, heartbeat_interval=30.0))
        self._node = Node(node_id=node.node_id)

    def _leave(self) -> None:
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        node, self._node = self._node, None
        if node is None:
            return
        self._calls._client.timeout = 2.0
        try:
            self._calls.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
        except Exception as error:  # the server notices by itself
            log.debug("no goodbye: %s", error)
        finally:
            self._calls._client.timeout = CALL_SECONDS

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Raise what a failed call means."""
        import httpx
        from flwr.supercore.inflatable.inflatable_utils import (
            ObjectPullError,
            ObjectPushError,
            ObjectUnavailableError,
        )

        try:
            yield
            self._heard = time.monotonic()
        except httpx.HTTPStatusError as error:
            status, said = error.response.status_code, _detail(error.response)
            if status == 403:
                raise RunError(f"the server at {self._server} turns this client away: {said}") from error
            if status == 404:
                self._node = None
                raise ForgottenError(said) from error
            if status == 413:
                raise ForgottenError(said) from error
            raise UnreachableError(f"it answers with status {status}: {said}") from error
        except (ObjectPullError, ObjectPushError, ObjectUnavailableError) as error:
            raise ForgottenError(str(error)) from error
        except (httpx.HTTPError, ValueError) as error:
            raise UnreachableError(str(error) or type(error).__name__) from error

    def _beat(self) -> None:
        """Let the server hear of this client also while it computes."""
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        while not self._over.wait(HEARTBEAT_SECONDS / 2):
            node = self._node
            if node is None or time.monotonic() - self._heard < HEARTBEAT_SECONDS / 2:
                continue
            try:
                self._calls.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=node, heartbeat_interval=30.0))
            except Exception as error:  # the next call says what is wrong
                log.debug("no heartbeat: %s", error)

    def _bounded(self, response: httpx.Response) -> None:
        """Refuse an answer of the server that is larger than any may be, before it is read."""
        size = response.headers.get("content-length", "")
        if not size.isdigit() or int(size) > LARGEST_REQUEST:
            response.close()
            raise RunError(f"the server at {self._server} sends more than {LARGEST_REQUEST} bytes at once")


def _detail(response: httpx.Response) -> str:
    try:
        said = response.json()
    except ValueError:
        return response.reason_phrase
    return str(said.get("detail", said) if isinstance(said, dict) else said)[:500]
