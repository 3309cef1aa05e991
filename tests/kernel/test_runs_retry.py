"""`retry_run`: the same id first; another one only for what somebody has given up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio

from culet.kernel import AgentToolRun, Retry, retry_run
from culet.kernel.core.again import next_step, run_id_of
from culet.kernel.core.limits import NAME_MAX
from culet.kernel.core.status import STATUSES
from culet.kernel.errors import UsageError
from kernel.agents import settle
from kernel.toolkit import TURNS, Frail, Kid, again, forget, opened, top

TWICE = Retry(max_attempts=2, base_delay=1, max_delay=5)


@pytest.fixture(autouse=True)
def fresh() -> None:
    forget()


class Asked:
    """Says yes or no to giving a run up, and notes of which it was asked."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.about: list[tuple[str, str]] = []

    async def __call__(self, run: AgentToolRun) -> bool:
        self.about.append((run.run_id, run.status))
        return self.answers.pop(0)


@pytest.mark.rule("B-24")
def test_only_what_was_interrupted_is_asked_about_and_only_what_runs_is_joined() -> (
    None
):
    for status, joined, number, most in itertools.product(
        STATUSES, range(1, 5), range(1, 5), range(1, 5)
    ):
        step = next_step(status, joined, number, most)
        assert (step == "ask") == (status == "interrupted" and number < most)
        assert (step == "attach") == (status == "running" and joined < most)
    ids = [run_id_of("r", n) for n in range(1, 100)]
    assert ids[0] == "r"
    assert len(set(ids)) == len(ids)


async def cut(test: Any, me: Any, **options: Any) -> None:
    """Let the process die in the middle of the run r of a facet that cannot go on."""

    async def lost() -> None:
        await retry_run(me, Frail, [["sleep", 9]], run_id="r", **options)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lost)
        await test.advance(5)
        await me.durable()
        await test.crash()
        nursery.cancel_scope.cancel()


@pytest.mark.rule("B-24")
async def test_what_was_interrupted_is_returned_when_nobody_gives_it_up(
    clock: object,
) -> None:
    async with opened() as test:
        await cut(test, await top(test))
        await test.reopen()
        me = await top(test)
        for abandon in (None, Asked(False), lambda run: False):
            run = await retry_run(
                me, Frail, [["say", "x"]], run_id="r", abandon=abandon
            )
            assert (run.run_id, run.status) == ("r", "interrupted")
        assert TURNS == {"r": 1}
        assert len(me.runs.list()) == 1


@pytest.mark.rule("B-24")
async def test_what_is_given_up_is_begun_again_once_under_an_id_of_its_own(
    clock: object,
) -> None:
    async with opened() as test:
        await cut(test, await top(test))
        await test.reopen()
        me = await top(test)
        asked = Asked(True)
        began = trio.current_time()
        run = await retry_run(
            me, Frail, [["say", "x"]], run_id="r", abandon=asked, retry=TWICE
        )
        assert trio.current_time() - began >= 0.5, "not hot"
        assert (run.run_id, run.status, run.summary) == ("r.again-2", "completed", "x")
        assert asked.about == [("r", "interrupted")]
        never = Asked()
        same = await retry_run(
            me, Frail, [["say", "x"]], run_id="r", abandon=never, retry=TWICE
        )
        assert same == run, "it was given up once: nobody is asked again"
        me = await again(test)
        same = await retry_run(me, Frail, [["say", "x"]], run_id="r", retry=TWICE)
        assert (same.run_id, same.summary) == ("r.again-2", "x")
        assert TURNS == {"r": 1, "r.again-2": 1}


@pytest.mark.rule("B-24")
async def test_there_are_at_most_as_many_runs_as_attempts(clock: object) -> None:
    async with opened() as test:
        await cut(test, await top(test))
        await test.reopen()
        await cut(test, await top(test), abandon=lambda run: True, retry=TWICE)
        await test.reopen()
        me = await top(test)
        await test.advance(1)
        run = await retry_run(
            me, Frail, [["say", "x"]], run_id="r", abandon=Asked(), retry=TWICE
        )
        assert (run.run_id, run.status) == ("r.again-2", "interrupted")
        assert set(TURNS.values()) == {1}


@pytest.mark.rule("B-24")
@pytest.mark.parametrize("end", ["error", "aborted", "completed"])
async def test_every_other_end_is_for_good(end: str, clock: object) -> None:
    program = {"error": [["fail", "no"]], "completed": [["say", "x"]]}
    async with opened() as test:
        me = await top(test)
        asked = Asked()
        async with trio.open_nursery() as nursery:
            if end == "aborted":

                async def stop() -> None:
                    await settle()
                    await me.runs.cancel("r", "enough")

                nursery.start_soon(stop)
            run = await retry_run(
                me, Kid, program.get(end, [["sleep", 9]]), run_id="r", abandon=asked
            )
        assert (run.run_id, run.status) == ("r", end)
        assert asked.about == []
        assert TURNS == {"r": 1}


@pytest.mark.rule("B-24")
async def test_a_run_that_is_silent_is_joined_again_not_begun_again(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        program = [["sleep", 25], ["say", "late"]]
        run = await retry_run(
            me, Kid, program, run_id="r", no_progress_s=10, abandon=Asked(), retry=TWICE
        )
        assert (run.status, run.reason) == ("running", "no-progress"), (
            "twice ten seconds"
        )
        run = await retry_run(
            me, Kid, program, run_id="r", no_progress_s=10, abandon=Asked()
        )
        assert (run.status, run.summary) == ("completed", "sleeplate")
        assert TURNS == {"r": 1}


async def test_what_cannot_be_retried_is_refused_before_anything_is_asked(
    clock: object,
) -> None:
    async with opened() as test:
        me = await top(test)
        with pytest.raises(UsageError, match="detached"):
            await retry_run(me, Kid, [], run_id="r", detached=True)
        with pytest.raises(UsageError, match="at most 256"):
            await retry_run(me, Kid, [], run_id="r" * NAME_MAX)
        assert me.runs.list() == []
