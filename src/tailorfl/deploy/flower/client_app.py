"""The Flower app of a client: hands each message to the client's own process and brings its answer back.

With `socket` in the node's configuration that is the process of `tailorfl client`, which has the samples in memory.
Without it this process is the client for one message: `data`, `name` and `state` then say what that command is told.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tailorfl.deploy.flower.frames import connect, get, put
from tailorfl.deploy.flower.messages import body_of, content

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Returns the client's answer."""
    asked = body_of(message)
    path = context.node_config.get("socket")
    return Message(
        content(_here(asked, context) if path is None else _there(asked, str(path))), reply_to=message
    )


def _there(asked: bytes, path: str) -> bytes:
    connection = connect(path)
    try:
        put(connection, {}, asked)
        return get(connection)[1]
    finally:
        connection.close()


def _here(asked: bytes, context: Context) -> bytes:
    from tailorfl.deploy.joining import member_of

    given = {key: str(value) for key, value in context.node_config.items()}
    member = member_of(
        state=given["state"], data=given.get("data"), name=given.get("name"), imports=given.get("import")
    )
    try:
        return member.answer(asked)
    finally:
        member.close()
