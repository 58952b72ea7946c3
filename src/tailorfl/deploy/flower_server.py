"""The server's side of Flower: its link state and Fleet API, served in a thread to admitted clients."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tailorfl.deploy.flower_client import (
    BESIDE,
    COUNTED,
    KEY,
    LARGEST_REQUEST,
    SALT,
    body_of,
    content,
    in_parts,
)
from tailorfl.deploy.keys import Tls
from tailorfl.deploy.messages import LARGEST, Arrival, Letter
from tailorfl.errors import RunError, needs_extra

with needs_extra("flwr", "deploy"):
    import uvicorn
    from fastapi import FastAPI
    from flwr.app import Message
    from flwr.common.constant import SUPERLINK_NODE_ID, TRANSPORT_TYPE_GRPC_RERE
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.error import http_error_translator
    from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree
    from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
    from flwr.superlink.routers.fleet.router import router
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

FOREVER = 10 * 365 * 86400.0
"""Lifetime of a message for Flower, which compares wall clocks; limits here use monotonic clocks."""
GONE_SECONDS, LEFT_SECONDS = 20.0, 6.0
"""Silence after which a node is gone; the second if it has no open connection any more."""
TICK_SECONDS = 0.25
DOORS = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        *("register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat"),
        *("pull-messages", "push-messages", "push-object", "pull-object", "confirm-message-received"),
    )
)
"""The calls that a client needs; all others are refused."""
Admitted = Callable[[str, str], str]
"""Returns why the holder of a certificate (name, serial number) is not admitted, "" if admitted."""


@dataclass
class _Node:
    """A registered node: its client's name, its last sign of life, and the open connections over which it called."""

    name: str
    heard_at: float
    connections: set[int]

    def gone(self, now: float) -> bool:
        """Return whether the node has been silent for too long."""
        return now - self.heard_at > (GONE_SECONDS if self.connections else LEFT_SECONDS)


@dataclass
class _Letter:
    """A letter under way: its node, and the time until which the server waits for an answer."""

    node: int
    until: float


class Link:
    """Serves clients at an address, in a thread; the server's transport.

    Args:
        host, port: where to listen.
        tls: the keys and certificates; None: anybody who reaches it may join.
        admitted: tells whether a certificate of the federation's authority is still valid here.
        largest: largest number of bytes of an answer.

    Raises:
        RunError: the port is taken or may not be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        tls: Tls | None,
        admitted: Admitted = lambda name, serial: "",
        largest: int = LARGEST,
    ) -> None:
        self._admitted, self._largest, self._secured = admitted, largest, tls is not None
        self._owners: dict[bytes, str] = {}  # public key -> name of the certificate it was registered with
        self._nodes: dict[int, _Node] = {}
        self._letters: dict[str, _Letter] = {}
        self._pushed: dict[int, int] = {}  # node -> bytes of its answer; kept when it leaves and comes back
        self._over, self._awake = threading.Event(), 0.0
        self.numbers: dict[str, float] = dict.fromkeys(("clients", *COUNTED), 0.0)
        """Counters for monitoring."""
        _, self._factory = get_objectstore_linkstate_factories(
            FLWR_IN_MEMORY_DB_NAME, get_federation_manager()
        )
        self._state = cast(Any, self._factory.state())
        # Flower's lock: it stores an answer and announces its parts under it, so neither is seen without the other.
        self._lock = self._state.lock
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

    # -- transport ------------------------------------------------------------------------------------------

    def nodes(self) -> dict[int, str]:
        """Return the nodes that are not gone, with the names in their certificates."""
        with self._lock:
            for node in [node for node, about in self._nodes.items() if about.gone(self._awake)]:
                self._forget(node)
            overdue = time.monotonic() - GONE_SECONDS
            for ticket in [ticket for ticket, letter in self._letters.items() if letter.until < overdue]:
                self._drop(ticket)
            self.numbers["clients"] = len(self._nodes)
            return {node: about.name for node, about in self._nodes.items()}

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Store letters for their nodes to fetch."""
        nodes = self.nodes()
        return [self._sent(letter, seconds) if letter.node in nodes else "" for letter in letters]

    def _sent(self, letter: Letter, seconds: float) -> str:
        message = Message(
            content(letter.body), letter.node, letter.kind, ttl=FOREVER, group_id=secrets.token_hex(8)
        )
        ticket = message.object_id
        header, tree, parts = in_parts(message)
        session = self._state.start_session(self._run)
        with self._lock:
            if letter.node not in self._nodes:  # it has left since
                return ""
            for part in self._announced(tree, session):
                self._state.store_object(self._run, session, part, parts[part].deflate())
            if self._state.store_message_ins(header) is None:
                return ""
            self._letters[ticket] = _Letter(letter.node, time.monotonic() + seconds)
            self._pushed[letter.node] = 0
            self.numbers["messages_total"] += 1
            self.numbers["bytes_down_total"] += len(letter.body)
        return ticket

    def _announced(self, tree: Any, session: str) -> list[str]:
        """Announce the parts of a letter, and return the names of those that are not there.

        Flower keeps the structure that was announced first, which may be a client's lie: it can know a part before it
        is sent.
        """
        lacking: list[str] = self._state.preregister_object_tree(tree, session)
        store = self._state.object_store
        for part in iterate_object_tree(tree):
            entry, former = store.store[part.object_id], store.store[part.object_id].child_object_ids
            if former != (names := _children(part)):
                entry.child_object_ids = names
                for name in names:
                    store.store[name].ref_count += 1
                for name in former:
                    store.store[name].ref_count -= 1
                    store.delete(name)
        return lacking

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Return the answers that have arrived, and a failure for each letter that will get none."""
        self.nodes()  # forgets those that are gone
        arrivals = [self._arrival(ticket) for ticket in tickets]
        return [arrival for arrival in arrivals if arrival is not None]

    def _arrival(self, ticket: str) -> Arrival | None:
        with self._lock:
            letter = self._letters.get(ticket)
            if letter is None:
                return Arrival(ticket, None, "the server no longer waits for this answer")
            # Flower's own query for a reply uses the wall clock to decide whether the node is there, and drops its
            # answers from before it left.
            reply = self._state.message_ins_id_to_message_res_id.get(ticket)
            arrived = None if reply is None else self._read(ticket, reply)
            if arrived is None and (problem := self._problem(letter)):
                arrived = Arrival(ticket, None, problem)
            if arrived is not None:
                self._drop(ticket)
                if arrived.body is not None:
                    self.numbers["answers_total"] += 1
                    self.numbers["bytes_up_total"] += len(arrived.body)
            return arrived

    def _problem(self, letter: _Letter) -> str:
        """Return why no answer to a letter can come any more, "" if one can."""
        if letter.node not in self._nodes:
            return "the node is gone"
        if self._pushed[letter.node] > self._largest + BESIDE:
            return f"its answer has more than {self._largest} bytes"
        return "the node did not answer in time" if time.monotonic() > letter.until else ""

    def _read(self, ticket: str, reply: str) -> Arrival | None:
        """Return an answer, or None if a part of it is still under way."""
        store = self._state.object_store
        try:
            names = [part.object_id for part in iterate_object_tree(store.get_object_tree(reply))]
            parts = {name: store.get(name) for name in names}
            if not all(parts.values()):
                return None
            return Arrival(ticket, body_of(reply, parts, self._largest)[SALT:])
        except Exception as error:  # a client can send anything
            log.warning("an answer cannot be read: %s", type(error).__name__)
            return Arrival(ticket, None, "its answer cannot be read")

    def _drop(self, ticket: str) -> None:
        del self._letters[ticket]
        reply = self._state.message_ins_id_to_message_res_id.get(ticket, "")
        self._state.delete_messages({ticket})
        for name in (ticket, reply):
            self._state.object_store.delete(name)

    def close(self) -> None:
        """Stop listening; open connections get two seconds."""
        self._over.set()
        self._server.should_exit = True
        self._thread.join(5.0)

    def _tick(self) -> None:
        """Count the seconds that this process runs, without those in which its machine sleeps and no node can call."""
        while not self._over.wait(TICK_SECONDS):
            self._awake += TICK_SECONDS

    # -- what Flower's link state needs ---------------------------------------------------------------------

    def _begun(self) -> int:
        """Return the number of a run that has no app and never times out."""
        run: int = self._state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
        )
        task = self._state.get_run_info(run_ids=[run])[0].primary_task_id
        self._state.claim_task(task)
        self._state.activate_task(task)
        self._state.task_token_store.clear()  # a task with a token would have to send heartbeats
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task, run, SUPERLINK_NODE_ID
        return run

    def _forget(self, node: int) -> None:
        if self._nodes.pop(node, None) is not None:
            for key in [k for k in self._owners if self._state.get_node_id_by_public_key(k) == node]:
                del self._owners[key]

    def _application(self) -> FastAPI:
        app = FastAPI(
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            middleware=[
                Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
                Middleware(ProtobufTranslationMiddleware),
                Middleware(_checked, check=self._check, heard=self._heard),
            ],
        )
        app.state.linkstate_factory, app.state.fleet_api_type = self._factory, TRANSPORT_TYPE_GRPC_RERE
        app.state.enable_supernode_auth = False
        app.state.fleet_event_log_plugin = app.state.artifact_provider = None
        app.include_router(router)
        return app

    # -- permissions ----------------------------------------------------------------------------------------

    def _turned_away(self, name: str, serial: str) -> str:
        if not self._secured:
            return ""
        return self._admitted(name, serial) if name else "the certificate is missing, or has no name"

    def _closed(self, connection: int) -> None:
        """Note that a connection is closed."""
        with self._lock:
            for node in self._nodes.values():
                node.connections.discard(connection)

    def _check(self, request: Any, name: str, connection: int) -> tuple[int, str]:
        """Return (status, reason) of a refused call, (0, "") of an accepted one."""
        with self._lock:
            key = getattr(request, "public_key", b"")
            if key:
                if len(key) != KEY:
                    return 400, f"a key has {KEY} bytes"
                if self._owners.setdefault(key, name) != name:
                    return 403, "this key was registered with another certificate"
                return 0, ""
            number = _node_of(request)
            node = self._nodes.get(number)
            if node is None:
                return 404, "this node is not registered"
            if node.name != name or any(m.metadata.src_node_id != number for m in _messages(request)):
                return 403, "this node was registered with another certificate"
            if isinstance(request, PushMessagesRequest) and not self._is_answer(request):
                return 400, "an answer is one message, with each of its parts as it was announced first"
            pushed = self._pushed.get(number, 0) + len(getattr(request, "object_content", b""))
            self._pushed[number] = pushed
            if pushed > self._largest + BESIDE:
                return 413, f"an answer may have at most {self._largest} bytes"
            node.heard_at = self._awake
            node.connections.add(connection)
            return 0, ""

    def _is_answer(self, request: PushMessagesRequest) -> bool:
        """Return whether a request announces one message, and each part in one way and by a name that Flower accepts.

        Otherwise, few parts that contain each other could stand for any number of parts, and Flower would keep the
        parts before a bad name for good.
        """
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            return False
        known, announced = self._state.object_store.store, dict[str, list[str]]()
        for part in iterate_object_tree(request.message_object_trees[0]):
            name, names = part.object_id, _children(part)
            before = known[name].child_object_ids if name in known else announced.setdefault(name, names)
            if before != names or not is_valid_sha256_hash(name):
                return False
        return bool(name == request.messages_list[0].metadata.message_id)

    def _heard(self, request: Any, name: str, connection: int) -> None:
        """Note after a call that a node has come or gone."""
        with self._lock:
            match type(request).__name__:
                case "ActivateNodeRequest":
                    number = self._state.get_node_id_by_public_key(request.public_key)
                    if number is not None:
                        self._nodes[number] = _Node(name, self._awake, {connection})
                case "DeactivateNodeRequest" | "UnregisterNodeFleetRequest":
                    self._forget(request.node_id)


def _children(part: Any) -> list[str]:
    return [child.object_id for child in part.children]


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
    """Return uvicorn's protocol with the certificate and connection of each request in its state.

    It is the one of h11, which reads at most 64 KiB of a request's head; that of httptools keeps any number of bytes.
    """

    class Certified(H11Protocol):
        app_state: dict[str, Any]

        def connection_made(self, transport: Any) -> None:
            secured = transport.get_extra_info("ssl_object")
            certificate = (None if secured is None else secured.getpeercert()) or {}
            names = [
                value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"
            ]
            self.app_state = {
                **self.app_state,
                "holder": names[0] if names else "",
                "serial": certificate.get("serialNumber", ""),
                "connection": id(self),
            }
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            closed(id(self))
            super().connection_lost(exc)

    return Certified


def _gate(app: ASGIApp, turned_away: Admitted) -> ASGIApp:
    """Return an application that passes on the calls of admitted clients, and reads nothing of others."""

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, problem = 0, ""
        headers = dict(scope["headers"])
        size = b"" if b"transfer-encoding" in headers else headers.get(b"content-length", b"")
        if reason := turned_away(scope["state"]["holder"], scope["state"]["serial"]):
            status, problem = 403, reason
        elif scope["path"] not in DOORS or scope["method"] != "POST":
            status, problem = 404, "Not Found"
        elif not size.isdigit() or int(size) > LARGEST_REQUEST:
            status, problem = 413, f"a request may have at most {LARGEST_REQUEST} bytes"
        answer = JSONResponse({"detail": problem}, status) if status else app
        await answer(scope, receive, send)

    return gate


def _checked(
    app: ASGIApp, check: Callable[[Any, str, int], tuple[int, str]], heard: Callable[[Any, str, int], None]
) -> ASGIApp:
    """Return an application that checks before a call whether the certificate's holder may make it, and notes calls."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        call = state["protobuf_request"], state["holder"], state["connection"]
        status, problem = check(*call)
        if status:
            await JSONResponse({"detail": problem}, status)(scope, receive, send)
            return

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                heard(*call)  # before the client knows: its next call may come at once
            await send(message)

        await app(scope, receive, noted)

    return checked
