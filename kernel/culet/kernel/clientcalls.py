"""What a message of a client starts: `on_message`, or a call and its answer."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from .calls import Final as RpcFinal
from .calls import Method, iterate
from .core import clientframes as client
from .core import frames
from .errors import FacetAborted, Refused, StorageFull, UsageError, UserError, is_told
from .node import Ambient, Node, is_stop
from .tracing import NO_SPAN

if TYPE_CHECKING:
    from .sockets import Connection

_encode = msgspec.json.Encoder().encode


async def on_message(
    node: Node, ctx: Ambient, conn: Connection, message: str | bytes
) -> None:
    """Give the agent one message that is no frame of ours; what fails ends the socket."""
    try:
        await node.enter(ctx, node.agent.on_message, conn, message)
    except FacetAborted:
        pass
    except Exception as error:
        try:
            await node.enter(ctx, _on_error, node, error, conn)
        except Exception as unhandled:
            error_id = node.tree.kernel.report(
                "message", node, unhandled, name=conn.place
            )
            shown = isinstance(unhandled, Refused | UserError)
            conn.close(1011, str(unhandled) if shown else f"error {error_id}")


async def _on_error(node: Node, error: Exception, conn: Connection) -> None:
    await node.agent.on_error(error, connection=conn)


async def answer(node: Node, ctx: Ambient, conn: Connection, frame: client.Rpc) -> None:
    """Run one client call and push its answer; nobody gets it when the client is gone."""
    method = node.kind.rpc.get(frame.method)
    streams = method is not None and method.streams
    about: dict[str, Any] = {"method": frame.method, "streaming": streams}
    try:
        if method is None:
            raise UsageError(_not_callable(node, frame.method))
        args = method.from_json(frame.args)
        tracer = node.tree.kernel.tracer
        with NO_SPAN if tracer is None else tracer.span(
            "rpc", f"{node.kind.name}.{frame.method}",
            {"agent": node.path_text(), "connection_id": conn.id}, parent=None,
        ):  # fmt: skip
            if method.streams:
                text = await node.enter(
                    ctx, _stream, node, conn, frame.id, method, args
                )
            else:
                value = await node.enter(ctx, method.fn, node.agent, *args)
                text = None if value is None else _encode(value).decode()
        conn.reply(frames.rpc_result(frame.id, text))
        node.tree.emit("rpc", node.slot, about)
    except BaseException as error:
        conn.say(frames.rpc_error(frame.id, _told(node, frame.method, error)))
        node.tree.emit("rpc:error", node.slot, {**about, "error": error})
        if is_stop(error):
            raise


def _not_callable(node: Node, name: str) -> str:
    known = callable(getattr(node.kind.cls, name, None))
    return f"Method {name} {'is not callable' if known else 'does not exist'}"


def _told(node: Node, method: str, error: BaseException) -> str:
    """Return what a client is told of a failed call; what it must not read is logged."""
    if is_stop(error):
        return "the agent was stopped"
    if is_told(error):
        return str(error)
    where = f"{node.kind.name}.{method}"
    error_id = node.tree.kernel.report("rpc", node, error, name=where)
    full = isinstance(error, StorageFull)
    what = "the storage is full" if full else "the call failed"
    return f"{what} (error {error_id})"


async def _stream(
    node: Node, conn: Connection, call_id: str, method: Method, args: Any
) -> str | None:
    """Send what an async generator yields; it is closed when its client is gone."""
    final: Any = None
    async with aclosing(iterate(method.fn(node.agent, *args))) as values:
        async for value in values:
            if isinstance(value, RpcFinal):
                final = value.value
                break
            conn.say(frames.rpc_chunk(call_id, _encode(value).decode()))
            await trio.lowlevel.checkpoint()
            if conn.gone:
                break
    return None if final is None else _encode(final).decode()
