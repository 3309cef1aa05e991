"""The tool calls of one step: run side by side, each result said as it comes.

A result is said once. A call that an earlier attempt began and did not finish is joined
when it is a run, repeated when its tool allows that, and otherwise ends in an error that
says that nobody knows whether it was carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import trio

from culet.adapters.messages import approval_id
from culet.adapters.model import ToolCall, ToolSpec
from culet.adapters.tooling import ERROR_CHARS, Tool, ToolContext, ToolFailure, tool
from culet.kernel import Turn
from culet.kernel.core.run import model_value
from culet.kernel.errors import FacetAborted, Fenced, UsageError
from culet.kernel.node import ambient
from culet.kernel.tools import AgentTool

if TYPE_CHECKING:
    from culet.adapters.think import Think

AnyTool: TypeAlias = Tool | AgentTool
REATTACHED_S: Final = 120.0  # without progress, for a waiter that joins again
_UNCERTAIN: Final = (
    "the process ended while this tool ran: nobody knows whether it was carried out"
)


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

        `begun`: those that an earlier attempt may have carried out.
        """
        try:
            async with trio.open_nursery() as nursery:
                for order, call in enumerate(calls):
                    if call.id not in done:
                        again = call.id in begun
                        nursery.start_soon(self._one, call, order, again)
                        # trio starts tasks of one pass in any order; runs are
                        # dispatched in the order in which they were asked for
                        await trio.lowlevel.checkpoint()
        except BaseExceptionGroup as group:
            raise _cause(group) from None

    async def _one(self, call: ToolCall, order: int, begun: bool) -> None:
        one = self.tools.get(call.name)
        try:
            if one is None:
                await self._fail(call, f"there is no tool {call.name!r}")
            elif isinstance(one, AgentTool):
                await self._agent(call, one, order, begun)
            elif begun and one.on_uncertain != "repeat":
                await self._fail(call, _UNCERTAIN)
            else:
                await self._function(call, one)
        except (FacetAborted, Fenced):
            raise
        except Exception as error:
            await self._fail(call, f"{type(error).__name__}: {error}")

    async def _agent(
        self, call: ToolCall, one: AgentTool, order: int, begun: bool
    ) -> None:
        here = ambient.get()
        assert here is not None
        token = ambient.set(here._replace(tool_call=(self.turn.message_id, call.id)))
        try:
            run = await self.agent.run_agent_tool(
                one, call.input, parent_tool_call_id=call.id, display_order=order,
                no_progress_s=REATTACHED_S if begun else None,
            )  # fmt: skip
        finally:
            ambient.reset(token)
        await self._say(call, "tool-output-available", output=model_value(run))

    async def _function(self, call: ToolCall, one: Tool) -> None:
        slot = self.agent._node.slot  # others may have runs, and calls, of the same ids
        context = ToolContext(
            agent=self.agent, run_id=self.turn.run_id, tool_call_id=call.id,
            attempt=self.turn.attempt,
            idempotency_key=f"{slot}:{self.turn.message_id}:{call.id}",
            cancel=self.turn.cancel, identity=self.turn.identity,
            report=self._report,
        )  # fmt: skip
        limit = self.agent._node.tree.kernel.limits.tool_output_bytes
        results = one.run(call.input, context, output_bytes=limit)
        kind, mark = "tool-output-available", {}
        async with aclosing(results):
            async for result in results:
                if isinstance(result, ToolFailure):
                    await self._fail(call, result.text)
                elif result.preliminary:
                    mark = {"preliminary": False}  # the final one takes it back
                    await self._say(call, kind, output=result.value, preliminary=True)
                else:
                    await self._say(call, kind, output=result.value, **mark)

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
