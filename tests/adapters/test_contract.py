"""The conformance suite: what it accepts, and ten adapters that it must reject."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from adapters.chatbase import ChatBase
from adapters.wrong import LAW
from culet.adapters import AIChatAgent, Think
from culet.adapters.contract import adapter_contract, perform
from culet.adapters.model import Finish, ModelEvent, ModelRequest, TextDelta
from culet.kernel import Agent, Chunk, Turn
from culet.kernel.errors import UsageError


def delta(word: str) -> Chunk:
    return {"type": "text-delta", "id": "t", "delta": f"{word} "}


class Plain(Agent):
    """A turn that cannot be resumed: a crash interrupts it."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        async for word in perform(turn.input):
            yield delta(word)


class Patient(Plain):
    """One that goes on after a crash."""

    resumable = True

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        async for word in perform(turn.input, skip=len(turn.chunks())):
            yield delta(word)


class Chatty(AIChatAgent):
    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        said = sum(c["type"] == "text-delta" for c in turn.chunks())
        prompt = "".join(p["text"] for p in turn.messages[-1]["parts"])
        if not said:
            yield {"type": "text-start", "id": "t"}
        async for word in perform(prompt, skip=said):
            yield delta(word)
        yield {"type": "text-end", "id": "t"}


class Performing:
    """A model that says what its prompt performs, after what is stored of the step."""

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelEvent]:
        prompt = str(request.messages[-1].content)
        async for word in perform(prompt, skip=len(request.partial.split())):
            yield TextDelta(f"{word} ")
        yield Finish("stop")


class Thinking(Think):
    model = Performing()


TestPlain = adapter_contract(lambda: Plain, examples=6)
TestPatient = adapter_contract(lambda: Patient, examples=6)
TestChatty = adapter_contract(lambda: Chatty, examples=6)
TestThinking = adapter_contract(lambda: Thinking, examples=6)
TestChatBase = adapter_contract(lambda: ChatBase, examples=6)


def holds(child: type[Agent], law: str) -> bool:
    """Whether a law holds of a child."""
    suite = adapter_contract(lambda: child, examples=25, shrink=False)
    try:
        getattr(suite(), f"test_{law}")()
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("child", LAW, ids=lambda c: c.__name__)
@pytest.mark.rule("T-015", "T-048", "T-051", "T-062", "T-032", "T-034", "T-046")
def test_a_wrong_adapter_is_rejected_by_the_law_that_it_breaks(
    child: type[Agent],
) -> None:
    assert not holds(child, LAW[child])
    assert holds(ChatBase, LAW[child])  # and it is no law that nobody keeps


def test_half_an_adapter_has_no_suite() -> None:
    class Half(Agent):
        async def inspect_agent_tool_run(self, run_id: str) -> None:
            return None

    with pytest.raises(UsageError, match="lacks agent_tool_chunks, cancel_agent"):
        adapter_contract(lambda: Half)
