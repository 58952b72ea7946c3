"""The Flower app of the server: does what the server's own process asks of Flower's grid, until that asks no more.

With `socket` in the run's configuration that is the process of `tailorfl server`. Without it this process is the
server: `experiment` and `out` then say what that command is told.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from tailorfl.deploy.flower.frames import connect, get, put
from tailorfl.deploy.flower.messages import body_of, content
from tailorfl.deploy.post import Arrival, Letter

_LOST = {
    2: "the client's own process is gone",
    3: "the node did not fetch the message in time",
    5: "the node is gone",
    8: "the node's app was ended",
}

ENDS_WITHIN = 10.0
"""Seconds that a call may still take once the server's process is gone."""

app = ServerApp()


class GridPost:
    """Flower's grid as a post."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> dict[int, str]:
        """Returns the nodes that are online, with the names of their keys."""
        return {int(node.node_id): str(node.name) for node in self._grid.get_nodes()}

    def send(self, letters: Sequence[Letter], seconds: float) -> list[str]:
        """Sends messages that expire after so long."""
        made = [
            Message(content(one.body), dst_node_id=one.node, message_type=one.kind, ttl=max(seconds, 1.0))
            for one in letters
        ]
        return [ticket or "" for ticket in self._grid.push_messages(made)]

    def receive(self, tickets: Sequence[str]) -> list[Arrival]:
        """Returns what has arrived."""
        return [self._arrival(message) for message in self._grid.pull_messages(list(tickets))]

    def _arrival(self, message: Message) -> Arrival:
        ticket = message.metadata.reply_to_message_id
        if message.has_error():
            # Its text may hold what a client wants to keep to itself, and is not passed on.
            code = message.error.code
            return Arrival(
                ticket, None, f"{_LOST.get(code, 'the node did not answer')} (Flower's code {code})"
            )
        try:
            return Arrival(ticket, body_of(message))
        except ValueError as error:
            return Arrival(ticket, None, str(error))


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Serves the server's process, or is it."""
    path = str(context.run_config.get("socket", ""))
    if path:
        serve(GridPost(grid), path)
        return
    from tailorfl.deploy.hosting import host

    host(GridPost(grid), str(context.run_config["experiment"]), str(context.run_config["out"]))


def serve(post: GridPost, path: str) -> None:
    """Does what comes through a socket, until the other side closes it."""
    connection, over = connect(path), threading.Event()
    threading.Thread(target=_ends_after, args=(connection, over), daemon=True).start()
    try:
        while True:
            try:
                asked, body = get(connection)
            except OSError:
                return
            match asked["do"]:
                case "nodes":
                    put(connection, sorted(post.nodes().items()))
                case "send":
                    start, letters = 0, []
                    for node, kind, size in asked["letters"]:
                        letters.append(Letter(node, kind, body[start : start + size]))
                        start += size
                    put(connection, post.send(letters, asked["seconds"]))
                case "receive":
                    found = post.receive(asked["tickets"])
                    about = [
                        [one.ticket, -1 if one.body is None else len(one.body), one.problem] for one in found
                    ]
                    put(connection, about, b"".join(one.body or b"" for one in found))
                case other:
                    raise ValueError(f"nothing is known of '{other}'")
    finally:
        over.set()
        connection.close()


def _ends_after(connection: socket.socket, over: threading.Event) -> None:
    """Ends this process where the other side of a connection is gone and `over` is not set soon after.

    A server that is killed takes Flower's SuperLink along; a call of the grid that is under way then tries for ever to
    reach it.
    """
    gone = select.poll()
    gone.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    gone.poll()
    if not over.wait(ENDS_WITHIN):
        os._exit(1)
