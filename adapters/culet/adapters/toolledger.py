"""The tool calls of one turn in the ledger of effects: which may be done, and again.

A call's intent is durable before its tool runs, its outcome is one step with the chunk
that says it. So after a crash a call without an intent has provably not begun, and one
with an intent and no outcome is a doubt, which the tool's policy is asked about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import msgspec

from culet.adapters.model import ToolCall, tool_name
from culet.adapters.tooling import Tool, ToolFailure
from culet.kernel import Chunk, Turn
from culet.kernel.core.effects import Act, next_step
from culet.kernel.core.run import (
    derive_run_id,
    input_digest,
    model_value,
    shape_preview,
)
from culet.kernel.effectrows import Row, Wanted
from culet.kernel.errors import CapacityError
from culet.kernel.sql import end_stale

if TYPE_CHECKING:
    from culet.adapters.aichat import AIChatAgent

UNCERTAIN = (
    "the process ended while this tool ran: nobody knows whether it was carried out"
)
LEFT = "nobody knows whether this was carried out; a person chose not to repeat it"


_MASKED = re.compile(r"the (?:tool|run) \w[\w ]* \(error \w+\)")


class Plan(NamedTuple):
    """What is done about one call now. `row` is its entry, `before` the one before it."""

    act: Act
    row: Row
    before: Row | None = None


def call_key(message_id: str, call_id: str) -> str:
    """Return the key of a tool call in the ledger of its agent."""
    return f"{message_id}:{call_id}"


def asked_about(
    agent: AIChatAgent, name: str, message_id: str, call: str
) -> Row | None:
    """Return the entry of a call of which a person is asked whether to repeat it."""
    wanted = Wanted("tool", name, call_key(message_id, call), "", "ask")
    row = agent._node.tree.effects.rows.find(agent._node.slot, wanted)
    return row if row is not None and row.status == "asked" else None


def told_to_model(
    agent: AIChatAgent, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages with the errors of calls as the model reads them.

    Clients have an error id in their place. What was raised is in the ledger or in the
    row of the run, as long as those are kept; then the model reads the id as well.
    """
    return [
        {
            **message,
            "parts": [_whole(agent, message, part) for part in message["parts"]],
        }
        if message.get("role") == "assistant"
        else message
        for message in messages
    ]


def _whole(agent: AIChatAgent, message: Mapping[str, Any], part: Any) -> Any:
    tree, slot, state = agent._node.tree, agent._node.slot, part.get("state")
    call, name, output = part.get("toolCallId"), tool_name(part), part.get("output")
    if name is None or not isinstance(call, str):
        return part
    if state == "output-error" and _MASKED.fullmatch(str(part.get("errorText"))):
        key = call_key(message["id"], call)
        row = tree.effects.rows.find(slot, Wanted("tool", name, key, "", "ask"))
        if row is not None and row.error is not None:
            return {**part, "errorText": row.error}
    error = output.get("error") if isinstance(output, dict) else None
    if state == "output-available" and _MASKED.fullmatch(str(error)):
        run = tree.runs.get(slot, derive_run_id(message["id"], call))
        if run is not None and run.error_id is not None:
            return {**part, "output": model_value(run)}
    return part


@final
class CallLedger:
    """The entries of one turn's calls."""

    def __init__(self, agent: AIChatAgent, turn: Turn) -> None:
        self.node, self.turn = agent._node, turn
        self.effects = agent._node.tree.effects

    def shown(self, call: ToolCall, failure: ToolFailure) -> str:
        """Return what clients read of a failure: an error id where a tool has raised."""
        if failure.cause is None:
            return failure.text
        kernel = self.node.tree.kernel
        error_id = kernel.report("tool", self.node, failure.cause, name=call.name)
        return f"the tool failed (error {error_id})"

    def plan(self, call: ToolCall, one: Tool, *, resumed: bool) -> Plan | str:
        """Say what is done about a call; where it is to run its intent is written.

        `resumed`: an earlier attempt of the turn may have begun it. A text: it is
        refused, and why.
        """
        wanted = self._wanted(call, one)
        row = self.effects.rows.find(self.node.slot, wanted)
        try:
            if row is None and resumed and not self._complete:
                row = self.effects.begin(self.node, wanted, None)  # as good as begun
            standing = None
            if row is not None:
                standing = row.standing(row.born in self.effects.live)
            most = self.node.tree.kernel.limits.effect_attempts
            step = next_step(standing, one.on_uncertain, most=most)
            if step.act == "run":
                return self.begin(call, one, row)
        except CapacityError as error:
            return f"not done: {error}"
        assert row is not None
        return Plan(step.act, row)

    def begin(self, call: ToolCall, one: Tool, before: Row | None) -> Plan:
        """Write the intent of the next attempt."""
        row = self.effects.begin(self.node, self._wanted(call, one), before)
        return Plan("run", row, before)

    async def durable(self, plans: list[Plan]) -> None:
        """Wait until all that led here is durable; then what is planned may begin."""
        begun = [(plan.row, plan.before) for plan in plans if plan.act == "run"]
        await self.effects.durable(self.node, begun)

    def say(self, chunk: Chunk) -> None:
        """Put a chunk into the turn's stream now, in the step of its entry."""
        end_stale(self.node)
        self.turn.say(chunk)
        self.turn._stream.flush()

    @property
    def _complete(self) -> bool:
        """Whether this turn was owed when there was a ledger already."""
        return self.turn._taken.row.id > self.effects.since

    def _wanted(self, call: ToolCall, one: Tool) -> Wanted:
        text = msgspec.json.encode(call.input)
        most = self.node.tree.kernel.limits.preview_bytes
        return Wanted(
            "tool", call.name, call_key(self.turn.message_id, call.id),
            input_digest(text), one.on_uncertain, self.turn.request_id, call.id,
            shape_preview(msgspec.json.decode(text), most),
        )  # fmt: skip
