"""A client of an agent answers a question of a run below it, through the same gates.

It may answer what it could have answered at the address of the facet that asks: every
gate on the way there is asked again, in the name of that client. A readonly client
answers nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core import frames
from .core.path import PathBelow, PathStep
from .errors import CuletError, NotFound, Refused, is_told
from .node import Ambient
from .state import READONLY
from .visits import pass_gates

if TYPE_CHECKING:
    from .node import Node
    from .questions import RunAnswer
    from .sockets import Connection


async def from_client(
    node: Node, _ctx: Ambient, connection: Connection, frame: RunAnswer
) -> None:
    """Take the answer and tell its client whether it was the first, or why it was none."""
    run_id, call_id = frame.run_id or "", frame.tool_call_id
    taken, error = False, None
    try:
        if connection.readonly:
            raise Refused(READONLY)
        taken = await _answered(node, connection, run_id, frame)
    except CuletError as wrong:
        error = str(wrong)
        if not is_told(wrong):
            error_id = node.tree.kernel.report(
                "frame", node, wrong, name=connection.place
            )
            error = f"the answer failed (error {error_id})"
    connection.reply(frames.run_answer(run_id, call_id, taken=taken, error=error))


async def _answered(
    node: Node, connection: Connection, run_id: str, frame: RunAnswer
) -> bool:
    questions, tree = node.tree.questions, node.tree
    child = questions.asks(node.slot, run_id, frame.tool_call_id)
    if child is None:
        return False
    hops: list[PathStep] = []
    slot: str | None = child
    while slot is not None and slot != node.slot:
        row = tree.node_row(slot)
        if row is None:
            msg = f"there is no run {run_id!r} below"
            raise NotFound(msg)
        hops.insert(0, PathStep(row.class_name, row.name))
        slot = row.parent
    await pass_gates(
        tree, node, PathBelow(tuple(hops), "/"), connection.context.request
    )
    return await questions.answer(node.slot, run_id, frame)
