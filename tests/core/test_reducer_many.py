"""A hundred thousand ways in which frames may come, and one state for all of them."""

from __future__ import annotations

import random
from typing import Any, Final

import pytest

from culet.kernel import AgentToolEvents, apply_agent_tool_event
from volume import Volume

INTERLEAVINGS: Final = Volume(3_000, 100_000, 1_000_000)
STORIES: Final = 200


def story(chance: random.Random) -> list[list[dict[str, Any]]]:
    """Return the frames of one to three runs, each from its start to its end, or not."""
    out = []
    for number in range(chance.randint(1, 3)):
        frames: list[dict[str, Any]] = []

        def add(
            kind: str,
            to: list[dict[str, Any]] = frames,
            run: str = f"r{number}",
            **more: Any,
        ) -> None:
            about = {"kind": kind, "runId": run, **more}
            frame = {"type": "agent-tool-event", "sequence": len(to), "event": about}
            to.append({**frame, "parentToolCallId": "c"})

        add("started", agentType="A", order=number)
        for _ in range(chance.randint(0, 5)):
            word = chance.choice(["Hel", "lo", "é"])
            add("chunk", body=f'{{"type":"text-delta","id":"t","delta":"{word}"}}')
        end = chance.choice(["finished", "error", "aborted", None])
        if end is not None:
            add(
                end,
                **{"finished": {"summary": "s"}, "error": {"error": "e"}}.get(end, {}),
            )
        out.append(frames)
    return out


def mixed(chance: random.Random, runs: list[list[dict[str, Any]]]) -> list[Any]:
    """Deliver some of it live, cut the line, begin again, and at last replay it all.

    Each run's frames keep their order on one line; lines and runs mix as they like.
    """
    got: list[Any] = []
    for _line in range(chance.randint(0, 3)):
        left = [list(frames[: chance.randint(0, len(frames))]) for frames in runs]
        while any(left):
            frames = chance.choice([frames for frames in left if frames])
            got.append(frames.pop(0))
            if chance.random() < 0.2:
                got.append(got[-1])
    left = [[{**frame, "replay": True} for frame in frames] for frames in runs]
    while any(left):
        got.append(chance.choice([frames for frames in left if frames]).pop(0))
    return got


def folded(frames: list[Any]) -> AgentToolEvents:
    state = AgentToolEvents.empty()
    for frame in frames:
        state = apply_agent_tool_event(state, frame)
    return state


@pytest.mark.slow
@pytest.mark.rule("G-09", "I-16", "F-34")
def test_whatever_comes_first_or_twice_the_state_is_that_of_the_replay() -> None:
    chance = random.Random(9)
    for _ in range(STORIES):
        runs = story(chance)
        wanted = folded([frame for frames in runs for frame in frames]).to_json()
        for _ in range(INTERLEAVINGS.now // STORIES):
            frames = mixed(chance, runs)
            assert folded(frames).to_json() == wanted, frames
