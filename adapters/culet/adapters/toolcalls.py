"""The tool calls of one step: run side by side, each result said as it comes.

A result is said once. A call that an earlier attempt began and did not finish is joined
when it is a run; of any other the ledger tells, and its tool's policy says what is done:
again, a check, a question to a person, or an error that says that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import trio

from culet.adapters.messages import approval_id
from culet.adapters.model import ToolCall, ToolSpec
from culet.adapters.tooling import (
    Tool,
    ToolContext,
    ToolFailure,
    failure_of,
    plain,
    tool,
)
from culet.adapters.toolledger import UNCERTAIN, CallLedger, Plan
from culet.kernel import Done, Turn
from culet.kernel.calls import stored_json
from culet.kernel.core.effects import Status, after_check
from culet.kernel.core.limits import ERROR_CHARS
from culet.kernel.core.run import as_told, model_value
from culet.kernel.effectrows import Row
from culet.kernel.errors import EffectUncertain, FacetAborted, Fenced, UsageError
from culet.kernel.node import ambient
from culet.kernel.tools import AgentTool
from culet.kernel.tracing import NO_SPAN

if TYPE_CHECKING:
    from culet.adapters.think import Think

AnyTool: TypeAlias = Tool | AgentTool
DOUBT: Final = "data-effect"  # a part that says why a person is asked


def as_tools(given: Mapping[str, Any]) -> dict[str, AnyTool]:
    """Return what `get_tools` gave as tools; a plain function becomes one."""
    out: dict[str, AnyTool] = {}
    for name, value in given.items():
        if not name:
            raise UsageError("a tool needs a name")
        out[name] = value if isinstance(value, Tool | AgentTool) else tool(value)
    return out


def specs(
    tools: Mapping[str, AnyTool], client_tools: Sequence[Mapping[str, Any]]
) -> tuple[ToolSpec, ...]:
    """Return what the model is told of the tools, the client's own last."""
    out: list[ToolSpec] = []
    for name, one in tools.items():
        if isinstance(one, Tool):
            out.append(one.spec(name))
        else:
            spec = ToolSpec(
                name=name, description=one.description, parameters=one.parameters
            )
            out.append(spec)
    for offered in client_tools:
        own = offered.get("name")
        if isinstance(own, str) and own not in tools:
            parameters = offered.get("parameters")
            spec = ToolSpec(
                name=own,
                description=str(offered.get("description") or ""),
                parameters=parameters if isinstance(parameters, dict) else {},
            )
            out.append(spec)
    return tuple(out)


@final
class ToolCalls:
    """Runs the tool calls of one turn of one agent."""

    def __init__(
        self,
        agent: Think,
        turn: Turn,
        tools: Mapping[str, AnyTool],
        note: Callable[[Mapping[str, Any]], object],
    ) -> None:
        self.agent, self.turn, self.tools, self._note = agent, turn, tools, note
        self.ledger = CallLedger(agent, turn)
        self._asked_about = {
            str(part.get("id"))
            for message in turn.messages
            for part in message["parts"]
            if message["id"] == turn.message_id and part.get("type") == DOUBT
        }
        self._client = {
            t.get("name") for t in turn.client_tools if t.get("name") not in tools
        }

    def client_runs(self, name: str) -> bool:
        """Whether the client carries out that tool."""
        one = self.tools.get(name)
        return one.client if isinstance(one, Tool) else name in self._client

    def requests(self, call: ToolCall) -> list[dict[str, Any]]:
        """Return the chunks that ask for a call."""
        asked = {
            "type": "tool-input-available",
            "toolCallId": call.id,
            "toolName": call.name,
            "input": call.input,
        }
        one = self.tools.get(call.name)
        if not (isinstance(one, Tool) and one.asks(call.input)):
            return [asked]
        approval = {
            "type": "tool-approval-request",
            "approvalId": approval_id(call.id),
            "toolCallId": call.id,
        }
        return [asked, approval]

    async def run(
        self, calls: Sequence[ToolCall], done: Collection[str], begun: Collection[str]
    ) -> None:
        """Run those of `calls` that are not `done`, all at once; say each result.

        `begun`: those that an earlier attempt may have carried out. All that led here is
        durable before any of them begins.
        """
        todo = [(n, call) for n, call in enumerate(calls) if call.id not in done]
        plans = {call.id: self._plan(call, call.id in begun) for _, call in todo}
        await self.ledger.durable([p for p in plans.values() if isinstance(p, Plan)])
        try:
            async with trio.open_nursery() as nursery:
                for order, call in todo:
                    nursery.start_soon(self._one, call, order, plans[call.id])
                    # trio starts tasks of one pass in any order; runs are
                    # dispatched in the order in which they were asked for
                    await trio.lowlevel.checkpoint()
        except BaseExceptionGroup as group:
            raise _cause(group) from None

    def _plan(self, call: ToolCall, begun: bool) -> Plan | str | None:
        """Return what is done about a call; None: the ledger has no part in it."""
        one = self.tools.get(call.name)
        if not isinstance(one, Tool):
            return None if one else f"there is no tool {call.name!r}"
        given = one.decode(call.input)
        if isinstance(given, ToolFailure):
            return given.text
        return self.ledger.plan(call, one, resumed=begun)

    async def _one(self, call: ToolCall, order: int, plan: Plan | str | None) -> None:
        one = self.tools.get(call.name)
        try:
            if isinstance(one, AgentTool):
                await self._agent(call, one, order)
                return
            while isinstance(plan, Plan) and isinstance(one, Tool):
                plan = await self._follow(call, one, plan)
            if plan is not None:
                await self._fail(call, str(plan))
        except (FacetAborted, Fenced):
            raise
        except Exception as error:
            await self._fail(call, self.ledger.shown(call, failure_of(error)))

    async def _follow(self, call: ToolCall, one: Tool, plan: Plan) -> Plan | str | None:
        """Do what is planned; return what follows from it, None when the call is over."""
        row, effects = plan.row, self.ledger.effects
        match plan.act:
            case "run":
                if await self._function(call, one, row):
                    return None
            case "join":  # code that did not stop when its turn did
                if row.born in effects.live:
                    await effects.live[row.born].wait()
            case "check":
                return await self._checked(call, one, row)
            case "fail":
                self._conclude(call, row, "unknown", errorText=UNCERTAIN)
                return None
            case "replay":  # somebody has decided
                if row.status == "error":
                    return row.error or UNCERTAIN
                await self._say(
                    call, "tool-output-available", output=stored_json(row.result)
                )
                return None
            case _:
                self._ask(call, row)
                return None
        return await self._ready(self.ledger.plan(call, one, resumed=True))

    async def _ready(self, plan: Plan | str) -> Plan | str:
        if isinstance(plan, Plan):
            await self.ledger.durable([plan])
        return plan

    async def _checked(self, call: ToolCall, one: Tool, row: Row) -> Plan | str | None:
        """Ask the author's check what became of a call."""
        context = self._context(call, row)
        found = await self.ledger.effects.inquire(
            self.agent._node, row, lambda: one.ask_check(call.input, context)
        )
        if isinstance(found, Done):
            limit = self.agent._node.tree.kernel.limits.tool_output_bytes
            result = plain(found.result, limit)
            if isinstance(result, ToolFailure):
                self._failed(call, row, result)
            else:
                self._conclude(call, row, "completed", output=result.value)
            return None
        step = after_check(row.standing(live=False), found)
        if step.act == "run":
            return await self._ready(self.ledger.begin(call, one, row))
        return Plan(step.act, row)

    def _ask(self, call: ToolCall, row: Row) -> None:
        """Make the call a question to a person, in one step: do it again?"""
        self.ledger.effects.ask(row)
        waiting = self.agent._chat.waiting
        asked = {
            "type": "tool-approval-request",
            "approvalId": approval_id(call.id),
            "toolCallId": call.id,
        }
        for chunk in (self._doubt(call, row, "uncertain"), asked):
            self.ledger.say(chunk)
            self._note(chunk)
        waiting.ask_again(self.turn, call.id)

    def _doubt(self, call: ToolCall, row: Row, state: str) -> dict[str, Any]:
        """Return the chunk that tells people why they are asked."""
        told = {
            "toolCallId": call.id,
            "toolName": call.name,
            "attempt": row.attempt,
            "effectId": str(row.born),
            "state": state,
        }
        return {"type": DOUBT, "id": call.id, "data": told}

    async def _agent(self, call: ToolCall, one: AgentTool, order: int) -> None:
        here = ambient.get()
        assert here is not None
        token = ambient.set(here._replace(tool_call=(self.turn.message_id, call.id)))
        try:
            run = await self.agent.run_agent_tool(
                one, call.input, parent_tool_call_id=call.id, display_order=order
            )
        finally:
            ambient.reset(token)
        await self._say(call, "tool-output-available", output=model_value(as_told(run)))

    def _context(self, call: ToolCall, row: Row) -> ToolContext:
        return ToolContext(
            agent=self.agent, run_id=self.turn.run_id, tool_call_id=call.id,
            attempt=row.attempt, idempotency_key=row.token,
            cancel=self.turn.cancel, identity=self.turn.identity,
            report=self._report,
        )  # fmt: skip

    async def _function(self, call: ToolCall, one: Tool, row: Row) -> bool:
        """Call the tool; False: it says itself that nobody knows what became of it."""
        limit = self.agent._node.tree.kernel.limits.tool_output_bytes
        mark: dict[str, Any] = {}
        if row.attempt > 1 and call.id in self._asked_about:
            chunk = self._doubt(call, row, "again")
            self.turn.say(chunk)
            self._note(chunk)
        node = self.agent._node
        tracer = node.tree.kernel.tracer
        span = NO_SPAN if tracer is None else tracer.span(
            "tool", call.name,
            {
                "agent": node.path_text(), "run_id": self.turn.run_id or self.turn.request_id,
                "tool_call_id": call.id, "attempt": row.attempt,
            },
        )  # fmt: skip
        with span, self.ledger.effects.work(row):
            context = self._context(call, row)
            results = one.run(call.input, context, output_bytes=limit)
            try:
                async with aclosing(results):
                    async for result in results:
                        if isinstance(result, ToolFailure):
                            self._failed(call, row, result)
                        elif result.preliminary:
                            mark = {"preliminary": False}  # the final one takes it back
                            kind = "tool-output-available"
                            await self._say(
                                call, kind, output=result.value, preliminary=True
                            )
                        else:
                            self._conclude(
                                call, row, "completed", output=result.value, **mark
                            )
            except EffectUncertain:
                return False
        await self.turn.room()
        return True

    def _failed(self, call: ToolCall, row: Row, failure: ToolFailure) -> None:
        """Conclude a call that came to nothing: all of why is in its entry alone."""
        shown = self.ledger.shown(call, failure)
        self._conclude(call, row, "error", kept=failure.text, errorText=shown)

    def _conclude(
        self,
        call: ToolCall,
        row: Row,
        status: Status,
        *,
        kept: str | None = None,
        **more: Any,
    ) -> None:
        """Say the outcome and write it down, in the step in which the tool returned.

        `kept`: what its entry has of an error, where that is more than what is said.
        """
        kind = "tool-output-available" if "output" in more else "tool-output-error"
        if "errorText" in more:
            more["errorText"] = more["errorText"][:ERROR_CHARS]
        chunk = {"type": kind, "toolCallId": call.id, **more}
        self.agent._node.check()
        self.ledger.effects.settle(row, status, error=kept or more.get("errorText"))
        self.ledger.say(chunk)
        self._note(chunk)

    async def _report(self, told: Mapping[str, Any]) -> None:
        await self.agent.report_progress(**told)

    async def _fail(self, call: ToolCall, text: str) -> None:
        await self._say(call, "tool-output-error", errorText=text[:ERROR_CHARS])

    async def _say(self, call: ToolCall, kind: str, **more: Any) -> None:
        """Stage one chunk from this task; wait while too much is staged."""
        chunk = {"type": kind, "toolCallId": call.id, **more}
        self.turn.say(chunk)
        self._note(chunk)
        await self.turn.room()


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one error that ended the calls: a nursery gives them all in a group."""
    _cancelled, rest = group.split(trio.Cancelled)
    error: BaseException = group if rest is None else rest
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
