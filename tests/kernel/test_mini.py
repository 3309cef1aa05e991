"""The thirteen flaws of the first kernel: none is back, and each fix can be seen missing.

A plain test carries `kernel-mini-N` and shows what was wrong in the smallest history.
`FIXES` takes each fix out of the product, one at a time, and the plain test of it must
fail: a test that passes without the fix proves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import pytest
import trio

from crash.scenarios import SCENARIOS
from crash.story import points_of, tell
from culet.kernel import runs as runs_module
from culet.kernel import testing_seeded as seeded
from culet.kernel.core import job as core
from culet.kernel.endings import Endings
from culet.kernel.jobs import Jobs, Taken
from culet.kernel.streams import Stream
from culet.kernel.tree import Tree
from kernel import flaws, test_fibers, test_jobs, test_runs

Patch = pytest.MonkeyPatch
Play = Callable[[], Awaitable[None]]
LONGEST_S: Final = 24 * 3600.0  # of virtual time
SEEDS: Final = 4
SEEN: Final = (AssertionError, pytest.fail.Exception, trio.TooSlowError)


def clear() -> None:
    """The plain tests lie in several files, each with its own notes."""
    for module, names in (
        (test_runs, ("HOOKS", "DEAF", "TURNS", "EFFECTS", "STARTS")),
        (test_jobs, ("FIRED",)),
        (test_fibers, ("TOLD", "DONE")),
    ):
        for name in names:
            getattr(module, name).clear()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What fails on purpose is no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# ---- plain


@pytest.mark.rule("kernel-mini-3")
async def test_a_start_that_cancels_what_it_was_woken_for_is_obeyed(
    clock: object,
) -> None:
    await flaws.cancelled_by_the_start_that_it_causes()


@pytest.mark.rule("kernel-mini-6", "I-15")
async def test_an_end_that_may_be_lost_is_not_read(clock: object) -> None:
    await flaws.read_late_and_then_lost()


@pytest.mark.rule("kernel-mini-7")
async def test_what_is_staged_comes_before_the_end_in_one_step(clock: object) -> None:
    await flaws.staged_and_ended_in_one_step()


@pytest.mark.rule("kernel-mini-12")
async def test_a_wipe_is_tried_for_ever_at_the_longest_back_off(clock: object) -> None:
    await flaws.a_wipe_that_fails_often()


@pytest.mark.rule("kernel-mini-13")
async def test_a_job_that_waits_for_its_lane_costs_nothing(clock: object) -> None:
    await flaws.a_job_behind_a_busy_lane()


@pytest.mark.rule("kernel-mini-13")
async def test_fibers_that_wait_for_each_other_recover_side_by_side(
    clock: object,
) -> None:
    await flaws.fibers_that_wait_for_each_other()


@pytest.mark.rule("kernel-mini-13")
async def test_a_back_off_does_not_move_the_instant_an_interval_counts_from(
    clock: object,
) -> None:
    await flaws.a_tick_that_fails_and_one_that_is_cut()


@pytest.mark.rule("kernel-mini-13")
async def test_a_tree_restarted_in_one_process_is_another_life(clock: object) -> None:
    await flaws.a_tree_restarted_in_one_process()


async def test_a_late_worker_does_not_say_how_a_fiber_ends(clock: object) -> None:
    await flaws.a_late_worker_that_comes_to_an_end()


# ---- each fix, taken away


def _a_take_is_the_life_alone(patch: Patch) -> None:
    patch.setattr(Jobs, "take_number", lambda jobs: jobs.epoch << 32 | 1)


def _a_remnant_keeps_its_lane(patch: Patch) -> None:
    patch.setattr(Jobs, "free_lanes", lambda _jobs, _slot: None)


def _never_looked_at_again(patch: Patch) -> None:
    patch.setattr(Jobs, "mine", lambda _jobs, _taken: True)
    patch.setattr(Jobs, "to_be_called", lambda _jobs, _taken: True)


def _looked_at_only_after_the_barrier(patch: Patch) -> None:
    one = Jobs._one
    seen: list[Taken] = []

    async def early(jobs: Jobs, taken: Taken) -> None:
        if jobs.mine(taken):
            seen.append(taken)
        await one(jobs, taken)

    patch.setattr(Jobs, "_one", early)
    patch.setattr(Jobs, "to_be_called", lambda _jobs, taken: taken in seen)


def _taken_is_begun(patch: Patch) -> None:
    failed = Jobs._failed

    def still_begun(
        jobs: Jobs, taken: Taken, error: BaseException, **more: Any
    ) -> None:
        failed(jobs, taken, error, **{**more, "begun": True})

    patch.setattr(Jobs, "_failed", still_begun)


def _a_hold_outlives_its_task(patch: Patch) -> None:
    patch.setattr(Jobs, "release", lambda *_a, **_k: None)


def _what_was_settled_late_counts_as_published(patch: Patch) -> None:
    close = Stream.close

    def close_and_forget(stream: Stream, end: Any) -> None:
        close(stream, end)
        stream.tree.streams.drop(stream)

    patch.setattr(Stream, "close", close_and_forget)


def _the_end_does_not_know_the_length(patch: Patch) -> None:
    patch.setattr(Endings, "_length", lambda _endings, _subject: 0)


def _the_end_comes_before_what_is_staged(patch: Patch) -> None:
    patch.setattr(Endings, "_flush", lambda _endings, _step: None)


def _an_end_forgets_what_it_waited_for(patch: Patch) -> None:
    patch.setattr(Endings, "asked_by", lambda _endings, _subject: [])


def _progress_does_not_count(patch: Patch) -> None:
    patch.setattr(Jobs, "progress", lambda _jobs, _taken: None)


def _progress_counts_for_itself_alone(patch: Patch) -> None:
    def credit(tree: Tree, slot: str, what: str) -> None:
        sql = "UPDATE job SET attempts = 1 WHERE owner = ? AND what = ?"
        tree.db.execute(sql, (slot, what))

    patch.setattr(Tree, "credit", credit)


def _a_planned_stop_costs_an_attempt(patch: Patch) -> None:
    give_back = Jobs.give_back

    def costly(jobs: Jobs, ids: Any, *, planned: bool) -> None:
        give_back(jobs, ids, planned=planned)
        for job_id in ids:
            sql = "UPDATE job SET attempts = attempts + ? WHERE id = ?"
            jobs.db.execute(sql, (int(planned), job_id))

    patch.setattr(Jobs, "give_back", costly)


def _a_planned_stop_is_a_failure(patch: Patch) -> None:
    give_back = Jobs.give_back

    def unplanned(jobs: Jobs, ids: Any, *, planned: bool) -> None:
        give_back(jobs, ids, planned=False)

    patch.setattr(Jobs, "give_back", unplanned)


def _a_run_may_be_awaited_in_a_start(patch: Patch) -> None:
    never: ContextVar[Any] = ContextVar("never", default=None)
    patch.setattr(runs_module, "starting", never)


def _who_was_stopped_hears_of_it(patch: Patch) -> None:
    end_row = Endings._end_row

    def with_hook(
        endings: Endings, step: Any, subject: Any, ending: Any, *, hook: bool
    ) -> bool:
        return end_row(endings, step, subject, ending, hook=True)

    patch.setattr(Endings, "_end_row", with_hook)


def _used_up_is_dead(patch: Patch) -> None:
    def bury(jobs: Jobs, taken: Taken, text: str) -> None:
        with jobs.tree.transaction():
            jobs._bury(taken, text)

    patch.setattr(Jobs, "_used_up", bury)


def _a_wipe_may_die(patch: Patch) -> None:
    verdict = core.verdict

    def mortal(kind: Any, *args: Any) -> core.Verdict:
        return verdict("hook" if kind == "wipe" else kind, *args)

    patch.setattr(core, "verdict", mortal)


def _a_wipe_is_buried_when_it_is_taken_once_more(patch: Patch) -> None:
    def beyond(jobs: Jobs, taken: Taken) -> bool:
        return taken.attempts > jobs._attempt_limit(taken)

    patch.setattr(Jobs, "_beyond", beyond)


def _attempts_go_on_over_ticks(patch: Patch) -> None:
    next_tick = Jobs._next_tick

    def keeping(jobs: Jobs, taken: Taken, error: str | None) -> None:
        next_tick(jobs, taken, error)
        sql = "UPDATE job SET attempts = ? WHERE id = ?"
        jobs.db.execute(sql, (taken.row.attempts, taken.row.id))

    patch.setattr(Jobs, "_next_tick", keeping)


def _the_minimum_is_over_all_lanes(patch: Patch) -> None:
    due = Jobs._due

    def with_busy_lanes(jobs: Jobs, now: int) -> Any:
        return due(jobs, now)[0], jobs.slot()

    patch.setattr(Jobs, "_due", with_busy_lanes)


def _fibers_share_a_lane(patch: Patch) -> None:
    add = Jobs.add

    def in_one(jobs: Jobs, owner: str, kind: str, what: str, **more: Any) -> int:
        if kind == "fiber":
            more["lane"] = "fiber"
        return add(jobs, owner, kind, what, **more)

    patch.setattr(Jobs, "add", in_one)


def _a_back_off_moves_the_tick(patch: Patch) -> None:
    failed = Jobs._failed

    def moving(jobs: Jobs, taken: Taken, error: BaseException, **more: Any) -> None:
        failed(jobs, taken, error, **more)
        jobs.db.execute("UPDATE job SET at = due_at WHERE id = ?", (taken.row.id,))

    patch.setattr(Jobs, "_failed", moving)


def _a_release_moves_the_tick(patch: Patch) -> None:
    give_back = Jobs.give_back

    def moving(jobs: Jobs, ids: Any, *, planned: bool) -> None:
        give_back(jobs, ids, planned=planned)
        for job_id in ids:
            jobs.db.execute("UPDATE job SET at = due_at WHERE id = ?", (job_id,))

    patch.setattr(Jobs, "give_back", moving)


def _a_life_is_that_of_the_process(patch: Patch) -> None:
    patch.setattr(Tree, "_new_epoch", lambda _tree: 1)


def _a_late_worker_may_settle(patch: Patch) -> None:
    settle = Endings.settle

    def unguarded(endings: Endings, subject: Any, ending: Any, taken: Any) -> bool:
        return settle(endings, subject, ending, None)

    patch.setattr(Endings, "settle", unguarded)


def _chunks_are_shown_before_they_are_durable(patch: Patch) -> None:
    flush = Stream.flush

    def early(stream: Stream) -> None:
        after = stream.tree.barrier.after
        count = len(after)
        flush(stream)
        mine = after[count:]
        del after[count:]
        for publish in mine:
            publish()

    patch.setattr(Stream, "flush", early)


def plain(test: Any, *args: Any) -> Play:
    return partial(test, *args, clock=None)


async def cancelled_at_each_step() -> None:
    for steps in range(6):
        test_jobs.FIRED.clear()
        await test_jobs.test_a_cancelled_schedule_does_not_fire_once_that_returned(
            steps, None
        )


ENDS_ASKED = test_runs.test_the_end_of_an_asker_ends_what_it_waits_for
DEAF = plain(test_runs.test_a_turn_that_will_not_stop_never_runs_beside_its_successor)
STOPS = plain(test_runs.test_planned_stops_do_not_count)
TICK = plain(test_jobs.test_a_recurring_one_gives_up_a_tick_and_goes_on)
GIVES_BACK = plain(test_fibers.test_a_cancelled_caller_gives_the_hold_back)
DELETED = plain(test_runs.test_deleting_the_child_interrupts_its_run)
TAKEN_ALONG = plain(test_fibers.test_a_turn_that_ends_takes_its_fibers_along)
PROGRESS = plain(test_runs.test_restarts_with_progress_do_not_kill_a_run)
NESTED = plain(test_runs.test_progress_of_a_nested_run_counts_for_its_askers)
IN_START = plain(test_runs.test_a_run_awaited_in_on_start_is_refused_at_once)
CANCEL = plain(test_runs.test_cancel_does_not_wake_what_it_stopped)
RESTARTS = plain(test_runs.test_restarts_without_progress_end_it)
BAD_HOOK = plain(test_fibers.test_a_hook_that_always_raises_uses_its_attempts_up)
BAD_START = plain(test_runs.test_a_start_that_fails_once_is_not_a_begun_turn)
FIXES: Final[list[tuple[int, Callable[[Patch], None], Play]]] = [
    (1, _a_take_is_the_life_alone, DEAF),
    (2, _a_remnant_keeps_its_lane, DEAF),
    (3, _never_looked_at_again, cancelled_at_each_step),
    (3, _looked_at_only_after_the_barrier, flaws.cancelled_by_the_start_that_it_causes),
    (4, _taken_is_begun, BAD_START),
    (5, _a_hold_outlives_its_task, GIVES_BACK),
    (6, _what_was_settled_late_counts_as_published, flaws.read_late_and_then_lost),
    (7, _the_end_does_not_know_the_length, DELETED),
    (7, _the_end_comes_before_what_is_staged, flaws.staged_and_ended_in_one_step),
    (8, _an_end_forgets_what_it_waited_for, plain(ENDS_ASKED, "crash")),
    (8, _an_end_forgets_what_it_waited_for, plain(ENDS_ASKED, "error")),
    (8, _an_end_forgets_what_it_waited_for, TAKEN_ALONG),
    (9, _progress_does_not_count, PROGRESS),
    (9, _progress_counts_for_itself_alone, NESTED),
    (9, _a_planned_stop_costs_an_attempt, STOPS),
    (9, _a_planned_stop_is_a_failure, STOPS),
    (10, _a_run_may_be_awaited_in_a_start, IN_START),
    (11, _who_was_stopped_hears_of_it, CANCEL),
    (12, _used_up_is_dead, RESTARTS),
    (12, _used_up_is_dead, BAD_HOOK),
    (12, _used_up_is_dead, TICK),
    (12, _attempts_go_on_over_ticks, TICK),
    (12, _a_wipe_may_die, flaws.a_wipe_that_fails_often),
    (12, _a_wipe_is_buried_when_it_is_taken_once_more, flaws.a_wipe_that_fails_often),
    (13, _the_minimum_is_over_all_lanes, flaws.a_job_behind_a_busy_lane),
    (13, _fibers_share_a_lane, flaws.fibers_that_wait_for_each_other),
    (13, _a_back_off_moves_the_tick, flaws.a_tick_that_fails_and_one_that_is_cut),
    (13, _a_release_moves_the_tick, flaws.a_tick_that_fails_and_one_that_is_cut),
    (13, _a_life_is_that_of_the_process, flaws.a_tree_restarted_in_one_process),
    (14, _a_late_worker_may_settle, flaws.a_late_worker_that_comes_to_an_end),
]  # fmt: skip


def fails(play: Play) -> bool:
    """Whether a test of ours fails in one of a few orders of the same tasks."""

    async def main() -> None:
        with trio.fail_after(LONGEST_S):
            await play()

    for seed in range(SEEDS):
        clear()
        try:
            seeded.run(main, seed=seed)
        except BaseException as error:
            found = list(leaves(error))
            wrong = [e for e in found if not isinstance(e, SEEN)]
            assert not wrong, f"it failed by itself: {wrong}"
            return True
    return False


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


@pytest.mark.parametrize(
    ("away", "play"),
    [
        pytest.param(away, play, id=f"{rule}-{away.__name__.strip('_')}")
        for rule, away, play in FIXES
    ],
)
def test_without_its_fix_a_flaw_is_seen(
    away: Callable[[Patch], None], play: Play, monkeypatch: Patch
) -> None:
    assert not fails(play), "it fails with the fix as well"

    away(monkeypatch)

    assert fails(play)


def test_deaths_show_what_was_published_too_early(monkeypatch: Patch) -> None:
    scenario = SCENARIOS["run"]
    wanted = tell(scenario)
    _chunks_are_shown_before_they_are_durable(monkeypatch)

    with pytest.raises(AssertionError, match="a finished tool call was repeated"):
        for point in points_of(wanted.lives[0]):
            tell(scenario, [point])


def test_every_flaw_has_its_fix_taken_away() -> None:
    assert {rule for rule, _away, _play in FIXES} == set(range(1, 15))
