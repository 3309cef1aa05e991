"""The state of an agent: one JSON value in its file, told to its clients.

A row is the sign that there is a state: null, 0 and "" are states like others. The
class's `initial_state` becomes one when somebody first reads it, an agent's code or a
client that connects; until then an agent that never wrote has no file.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .calls import UNENCODABLE
from .core import frames
from .errors import (
    CuletError,
    FacetAborted,
    Refused,
    StorageFull,
    UsageError,
    UserError,
)
from .node import Ambient, Node, State, ambient, is_stop
from .ports import Blob
from .sql import end_stale

if TYPE_CHECKING:
    from .core import clientframes as client
    from .sockets import Connection

_encode = msgspec.json.Encoder().encode
_KEY: Final = "state"
_GET: Final = "SELECT value FROM main.culet_value WHERE key = ?"
_PUT: Final = (
    "INSERT INTO main.culet_value (key, value) VALUES (?, ?)"
    " ON CONFLICT (key) DO UPDATE SET value = excluded.value"
)
_DROP: Final = "DELETE FROM main.culet_value WHERE key = ?"
Changes = deque[tuple[Ambient, Any, "Connection | None"]]
READONLY: Final = "Connection is readonly"


def load_state(node: Node) -> str | None:
    """Return the stored state, JSON text; None when there is none.

    A row that is no JSON (somebody has damaged the file) is reported and dropped: the
    agent begins with its initial state, and the next start does not meet it again.
    """
    if not node.db.exists:
        return None
    rows = node.db.execute(_GET, (_KEY,))
    if not rows:
        return None
    text = str(rows[0][0])
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, *UNENCODABLE) as error:
        node.tree.kernel.report("state", node, error, name="the stored state")
        node.db.execute(_DROP, (_KEY,))
        node.tree.touched()
        return None
    return text


def keep_state(node: Node, text: str) -> bool:
    """Store an initial state that is read for the first time; False: not now.

    Nobody is told, as nothing has changed. A full file must not make a read fail, and
    in a user's transaction it might be rolled back: then a later read stores it.
    """
    if node.fenced or node.state >= State.STOPPING or node.transaction is not None:
        return False
    try:
        node.db.execute(_PUT, (_KEY, text))
    except StorageFull:
        return False
    node.tree.touched()
    return True


def check_writer(node: Node) -> None:
    """Raise `Refused` in code that runs for a readonly client of this agent."""
    here = ambient.get()
    if here is None or here.node is not node:
        return
    asked = here.request if here.connection is None else here.connection
    if asked is not None and asked.readonly:
        raise Refused(READONLY)


def store_state(node: Node, value: Any, source: Connection | None) -> str:
    """Check, store and send out a new state; return it as JSON."""
    agent = node.agent
    try:
        text = _encode(value).decode()
    except UNENCODABLE as error:
        msg = f"the state cannot be encoded as JSON: {error}"
        raise UsageError(msg) from None
    agent.validate_state_change(msgspec.json.decode(text), source or "server")
    end_stale(node)
    node.db.execute(_PUT, (_KEY, text))
    node.tree.touched()
    node.tree.sockets.push_all(
        node.slot, Blob(frames.state(text)), without=(source,) if source else ()
    )
    node.tree.emit("state:update", node.slot, {})
    if node.kind.hears_state:
        _owe_hook(node, msgspec.json.decode(text), source)
    return text


def _owe_hook(node: Node, state: Any, source: Connection | None) -> None:
    """Start the hook. trio starts the tasks of a pass in any order, and who follows the
    state must not end with an old one: each task takes the change that is first by then.
    """
    here = ambient.get()
    if here is None or here.node is not node:
        here = Ambient(node)
    ctx = Ambient(node, here.connection, here.request, here.identity)
    if node.agent._changes is None:
        object.__setattr__(node.agent, "_changes", Changes())
    changes, running = node.agent._changes, node.hooks
    assert changes is not None
    changes.append((ctx, state, source))
    node.hook(ctx, on_state_changed, node)
    if node.hooks == running:  # too many run already: this one is not called
        changes.pop()


async def on_state_changed(node: Node) -> None:
    """Run the hook; what it raises goes to `on_error`. The state stands either way."""
    assert node.agent._changes is not None
    ctx, state, source = node.agent._changes.popleft()
    ambient.set(ctx)
    try:
        await node.agent.on_state_changed(state, source or "server")
    except FacetAborted:
        raise
    except Exception as error:
        await node.agent.on_error(error, connection=source)


def client_state(node: Node, conn: Connection, frame: client.State) -> None:
    """Take a client's state; where it is refused the client gets the true one back."""
    here = Ambient(node, conn, conn.context.request, conn.identity)
    token = ambient.set(here)
    try:
        if conn.readonly:
            raise Refused(READONLY)
        node.agent._take_state(msgspec.json.decode(frame.state), conn)
        current = node.agent._stored_state()
        if frame.echo and current is not None:
            # in its place among those of others: only so does a client end with the last
            conn.say(frames.state(current, echo=True))
    except BaseException as error:  # the check of a state is its author's code
        if is_stop(error):
            raise
        if not isinstance(error, CuletError):
            node.tree.kernel.report("state", node, error, name=conn.place)
        shown = isinstance(error, Refused | UserError)
        text = str(error) if shown else "State update rejected"
        conn.say(frames.state_error(text))
        current = node.agent._stored_state()
        if current is not None and conn.protocol:
            conn.say(frames.state(current))
    finally:
        ambient.reset(token)
