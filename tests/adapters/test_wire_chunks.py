"""The chunks that a `Think` says: which types there are, and in which order they come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from adapters.peer import connected, user
from culet.adapters import ScriptedModel, Think, tool
from culet.adapters.model import (
    Finish,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    Usage,
)
from culet.adapters.scripted import step_number
from culet.adapters.tooling import ToolContext
from culet.kernel import agent_tool
from culet.kernel.errors import EffectUncertain
from culet.kernel.testing import open_test_kernel

ME = ("Speaker", "a")
PARTS: Final = {f"{kind}-{end}" for kind in ("text", "reasoning") for end in (
    "start", "delta", "end")}  # fmt: skip
CALLS: Final = {
    "tool-input-available", "tool-approval-request", "tool-output-available",
    "tool-output-error", "tool-output-denied",
}  # fmt: skip
FRAME: Final = {"start", "start-step", "message-metadata", "finish-step", "finish"}
REASONS: Final = {"stop", "length", "content-filter", "tool-calls", "error", "other"}
# what the chunk needs beside its type, or an AI SDK client ends the stream in an error
NEEDED: Final[Mapping[str, set[str]]] = {
    **{kind: {"id"} for kind in PARTS},
    "text-delta": {"id", "delta"},
    "reasoning-delta": {"id", "delta"},
    "tool-input-available": {"toolCallId", "toolName", "input"},
    "tool-approval-request": {"approvalId", "toolCallId"},
    "tool-output-available": {"toolCallId", "output"},
    "tool-output-error": {"toolCallId", "errorText"},
    "tool-output-denied": {"toolCallId"},
    "message-metadata": {"messageMetadata"},
}


def call(call_id: str, name: str) -> ToolCall:
    return ToolCall(id=call_id, name=name, input={})


class Aide(Think):
    model = ScriptedModel(lambda _request: ["fine"])


class Speaker(Think):
    """Plays `script`, a list of events for each step."""

    script: Any = []

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            return self.script[step_number(request)]

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        return {
            "count": tool(self.count),
            "fail": tool(self.fail),
            "doubt": tool(self.doubt),
            "pay": tool(self.fail, needs_approval=True),
            "look": tool(self.fail, client=True),
            "aide": agent_tool(Aide, description="helps"),
        }

    async def count(self) -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async def fail(self) -> None:
        raise ValueError("it is broken")

    async def doubt(self, ctx: ToolContext) -> None:
        raise EffectUncertain("who knows")


SCRIPT: Final = [
    [
        ReasoningDelta("hm"), TextDelta("So "), ReasoningDelta("wait"), TextDelta("I"),
        Usage(input_tokens=3, output_tokens=4), call("c1", "count"), call("c2", "fail"),
        call("c3", "aide"), call("c4", "nothing"),
    ],
    [TextDelta("and"), Usage(input_tokens=1, output_tokens=1), Finish("length")],
]  # fmt: skip
LAST: Final = [
    TextDelta("ask"),
    call("c5", "pay"),
    call("c6", "look"),
    call("c7", "doubt"),
]


async def chunks_of(script: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what a turn says of a script, and the message that it leaves."""
    Speaker.script = script
    async with (
        open_test_kernel(roots=[Speaker], facets=[Aide]) as test,
        connected(test.kernel, ME) as tab,
        connected(test.kernel, ME) as other,
    ):
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        await other.ended("r1")
        return tab.chunks("r1"), other.frames[-2]["messages"][-1]


def check_order(chunks: list[dict[str, Any]]) -> None:
    """Hold a turn against the rules that both reducers of the clients need."""
    assert [c["type"] for c in chunks].count("start") == 1
    assert (chunks[0]["type"], chunks[-1]["type"]) == ("start", "finish")
    in_step, is_open, used = False, None, set()
    asked: set[str] = set()
    for chunk in chunks[1:-1]:
        kind, base = chunk["type"], chunk["type"].rpartition("-")[0]
        assert not NEEDED.get(kind, set()) - chunk.keys(), chunk
        if kind in ("start-step", "finish-step"):
            assert in_step == (kind == "finish-step")
            assert is_open is None, "a step ends with its parts"
            in_step = not in_step
            continue
        if kind in PARTS:
            assert in_step
            part = base, chunk["id"]
            if kind.endswith("-start"):
                assert is_open is None, "one part at a time"
                assert part not in used, "an id is used once"
                is_open = part
                used.add(part)
            else:
                assert is_open == part
                is_open = None if kind.endswith("-end") else part
        elif kind == "tool-input-available":
            asked.add(chunk["toolCallId"])
        elif kind in CALLS:
            assert chunk["toolCallId"] in asked, "a call is asked for before its result"
    assert not in_step
    assert chunks[-1]["finishReason"] in REASONS


@pytest.mark.rule("W-232", "W-233")
@pytest.mark.parametrize("script", [SCRIPT, [LAST], [*SCRIPT[:1], LAST]])
async def test_a_turn_says_what_both_generations_of_clients_know_in_their_order(
    script: Any, clock: object
) -> None:
    chunks, _message = await chunks_of(script)
    kinds = {c["type"] for c in chunks}
    own = {k for k in kinds if k.startswith("data-")}
    assert kinds - own <= PARTS | CALLS | FRAME
    assert own <= {"data-effect", "data-directive"}
    check_order(chunks)


@pytest.mark.rule("W-234", "W-233")
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["r", "t", "tt", "u", "c"]), min_size=1, max_size=8),
        min_size=1,
        max_size=3,
    )
)
def test_of_text_and_reasoning_one_part_is_open_at_a_time(
    steps: list[list[str]],
) -> None:
    made: list[list[Any]] = []
    number = 0
    for step in steps:
        events: list[Any] = []
        for what in step:
            number += 1
            events.append({
                "r": ReasoningDelta(f"r{number} "), "t": TextDelta(f"t{number} "),
                "tt": TextDelta(""), "u": Usage(input_tokens=1, output_tokens=1),
                "c": call(f"c{number}", "count"),
            }[what])  # fmt: skip
        made.append(events)
    made += [[TextDelta("end")]] * 2
    chunks, _message = trio.run(chunks_of, made, clock=MockClock(autojump_threshold=0))
    check_order(chunks)


@pytest.mark.rule("W-243")
async def test_values_on_the_way_are_preliminary_and_the_message_keeps_the_last(
    clock: object,
) -> None:
    chunks, message = await chunks_of(SCRIPT)
    told = [c for c in chunks if c.get("toolCallId") == "c1"][1:]
    assert [(c["output"], c.get("preliminary")) for c in told] == [
        (0, True), (1, True), (2, True), (2, False),
    ]  # fmt: skip
    [part] = [p for p in message["parts"] if p.get("toolCallId") == "c1"]
    assert (part["output"], "preliminary" in part) == (2, False)


@pytest.mark.rule("W-240")
async def test_usage_is_metadata_of_the_message_summed_over_its_steps(
    clock: object,
) -> None:
    chunks, message = await chunks_of(SCRIPT)
    told = [c["messageMetadata"] for c in chunks if c["type"] == "message-metadata"]
    assert told[-1] == {"usage": {"inputTokens": 4, "outputTokens": 5}}
    assert message["metadata"] == told[-1]
