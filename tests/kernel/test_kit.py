"""The users' kit: what counts as a broken promise, points, and the pytest plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
import trio

from culet.kernel import Agent, Chunk, Turn
from culet.kernel.errors import UsageError
from culet.kernel.node import Work
from culet.kernel.testing_crash import explore
from culet.kernel.testing_ledger import Ledger
from culet.kernel.testing_scenario import (
    Client,
    Point,
    Scenario,
    Spec,
    parse_points,
    points_text,
    run_scenario,
)

pytest_plugins = ["pytester"]


# ---- the ledger


def kinds(ledger: Ledger) -> list[tuple[str, str]]:
    return list(ledger.findings)


def test_an_effect_may_come_again_only_when_that_was_declared() -> None:
    ledger = Ledger({"mail": "at_least_once", "poll": "at_most_once"})
    for name in ("mail", "poll", "charge"):
        ledger.act(name, "a")
    assert kinds(ledger) == []
    for name in ("mail", "poll", "charge"):
        ledger.act(name, "a")
    assert kinds(ledger) == [
        ("duplicated effect", "poll 'a'"),
        ("duplicated effect", "charge 'a'"),
    ]


def test_an_effect_that_never_comes_is_lost_unless_at_most_once() -> None:
    ledger = Ledger({"mail": "at_least_once", "poll": "at_most_once"})
    ledger.check_effects(dict.fromkeys([("mail", "a"), ("poll", "a"), ("pay", "a")], 1))
    assert kinds(ledger) == [("lost effect", "mail 'a'"), ("lost effect", "pay 'a'")]


def test_a_promise_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="sometimes"):
        Ledger({"mail": "sometimes"})  # type: ignore[dict-item]


def test_what_was_told_must_stay_and_be_readable() -> None:
    ledger = Ledger({})
    ledger.tell("a", 1)
    ledger.tell("b", 2)
    ledger.tell("b", 3)
    ledger.tell("c", 4)
    ledger.check_recall({"b": 2, "c": 5})
    assert kinds(ledger) == [(("lost event"), key) for key in "bac"]


def test_an_end_that_was_told_must_be_the_rows() -> None:
    ledger = Ledger({})
    ledger.end("r", "running")
    ledger.check_runs({"r": "aborted"})
    assert kinds(ledger) == []
    for run_id in "rst":
        ledger.end(run_id, "completed")
    ledger.check_runs({"r": "completed", "s": "error"})
    assert kinds(ledger) == [("wrong terminal", "s"), ("wrong terminal", "t")]
    ledger.end("r", "error")
    assert ("wrong terminal", "r") in kinds(ledger)


# ---- points


@pytest.mark.parametrize("text", ["1", "12", "r3", "r3+"])
def test_a_point_reads_what_it_writes(text: str) -> None:
    assert str(Point.parse(text)) == text
    assert Point.parse(text).says()


def test_deaths_in_a_row_are_read_and_written() -> None:
    points = parse_points("7,r2+")
    assert points == (Point("commit", 7), Point("landed", 2))
    assert points_text(points) == "7,r2+"


@pytest.mark.parametrize("text", ["", "0", "r0", "3+", "x", "r", "-1", "1 2"])
def test_what_is_no_point_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="point"):
        Point.parse(text)


# ---- what only whole scenarios show


class Clerk(Agent):
    outside: ClassVar[Client]

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "data-step", "data": 0}
        await trio.sleep(10)

    async def begin_fiber(self, how: str) -> None:
        async def work() -> None:
            self.sql("CREATE TABLE IF NOT EXISTS t (x)")
            try:
                await trio.sleep(10)
            finally:
                self.sql("INSERT INTO t VALUES ('at once')")
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)
                    if how == "late":
                        self.sql("INSERT INTO t VALUES ('late')")

        await self.fibers.start("work", work, fiber_id="f")

    async def stop_fiber(self) -> None:
        self.fibers.cancel("f")

    async def begin(self, run_id: str, how: str) -> None:
        await self.run_agent_tool(Clerk, how, run_id=run_id, detached=True)

    async def hang(self) -> None:
        await trio.sleep_forever()

    async def set_timer(self, seconds: float) -> None:
        await self.schedule(seconds, "ring", idempotent=True)

    async def ring(self, payload: object, schedule: object) -> None:
        self.outside.effect("ring", "a")

    async def once(self, key: str) -> int:
        self.sql("CREATE TABLE IF NOT EXISTS o (key TEXT UNIQUE)")
        self.sql("INSERT INTO o VALUES (?)", key)
        return 1


SPEC = Spec(roots=[Clerk], facets=lambda: [Clerk])


@pytest.mark.parametrize(
    ("how", "fence", "count"),
    [("late", True, 0), ("late", False, 1), ("clean", False, 0)],
)
def test_sql_of_a_fiber_that_was_ended_is_seen_where_no_fence_refuses_it(
    how: str, fence: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fence:  # plant a hole
        monkeypatch.setattr(Work, "cut", lambda work, reason: None)

    async def body(scenario: Scenario) -> None:
        clerk = await scenario.get(Clerk, "c")
        await clerk.begin_fiber(how)
        await scenario.advance(3)
        await clerk.stop_fiber()

    found = run_scenario(body, SPEC).findings
    assert [f.kind for f in found] == ["late write"] * count
    assert all("'late'" in f.what for f in found)


def test_work_that_never_ends_is_told_as_stuck() -> None:
    async def body(scenario: Scenario) -> None:
        await (await scenario.get(Clerk, "c")).begin("r", "clean")

    found = run_scenario(body, Spec(roots=[Clerk], facets=[Clerk], quiet_s=2)).findings
    assert ("stuck", "Clerk/c: run r") in [(f.kind, f.what) for f in found]


def test_a_scenario_that_fails_without_a_crash_fails_as_itself() -> None:
    async def body(scenario: Scenario) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        explore(body, SPEC)


def test_a_client_that_waits_for_ever_is_ended() -> None:
    async def body(scenario: Scenario) -> None:
        await (await scenario.get(Clerk, "c")).hang()

    with pytest.raises(trio.TooSlowError):
        run_scenario(body, SPEC)


def test_asking_again_must_work_after_the_crash() -> None:
    async def body(scenario: Scenario) -> None:
        clerk = await scenario.get(Clerk, "c")
        await clerk.once("k")  # not idempotent: a second asking hits the unique key

    report = explore(body, SPEC)
    assert [f.finding.kind for f in report.found] == ["failed"]
    assert "UNIQUE" in report.found[0].finding.how


def test_a_timer_is_waited_for_and_fires_in_spite_of_crashes() -> None:
    async def body(scenario: Scenario) -> None:
        Clerk.outside = scenario
        await (await scenario.get(Clerk, "c")).set_timer(300)

    spec = Spec(roots=[Clerk], facets=[Clerk], effects={"ring": "at_least_once"})
    assert run_scenario(body, spec).effects == {("ring", "a"): 1}
    report = explore(body, spec)
    assert report.found == ()


def test_the_same_point_twice_is_the_same_run() -> None:
    async def body(scenario: Scenario) -> None:
        clerk = await scenario.get(Clerk, "c")
        await clerk.begin("r", "clean")

    for text in ("6", "r2", "r2+", "6,2"):
        points = parse_points(text)
        first = run_scenario(body, SPEC, points)
        assert first.reached, text
        assert first == run_scenario(body, SPEC, points)


# ---- the plugin

SHOP = """
import pytest
from culet.kernel import Agent

class Shop(Agent):
    outside = None

    async def on_start(self):
        self.sql("CREATE TABLE IF NOT EXISTS o (id TEXT PRIMARY KEY)")

    async def buy(self, key):
        if not self.sql("SELECT 1 FROM o WHERE id = ?", key):
            if not (ASKS and self.outside.done("charge", key)):
                self.outside.effect("charge", key)
            self.sql("INSERT INTO o VALUES (?)", key)

@pytest.mark.culet_scenario(roots=[Shop])
async def test_buy(scenario, tmp_path):
    assert tmp_path.is_dir()
    Shop.outside = scenario
    await (await scenario.get(Shop, "s")).buy("o1")
"""
PLUGIN = ("-p", "culet.kernel.pytest_plugin", "-q")


def run_pytest(
    pytester: pytest.Pytester, source: str, *options: str
) -> pytest.RunResult:
    pytester.makepyfile(test_shop=source)
    pytester.makeini("[pytest]\naddopts = --strict-markers\n")
    return pytester.runpytest_inprocess(*PLUGIN, *options)


def test_without_the_option_it_is_a_plain_test(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, SHOP.replace("ASKS", "False"))
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*crash point*")


def test_a_promise_that_breaks_without_a_crash_fails_the_plain_test(
    pytester: pytest.Pytester,
) -> None:
    twice = SHOP.replace("ASKS", "False") + '    scenario.effect("charge", "o1")\n'
    result = run_pytest(pytester, twice)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["duplicated effect: charge 'o1': done 2 times*"])
    result = pytester.runpytest_inprocess(*PLUGIN, "--culet-crash")
    result.stdout.fnmatch_lines(["*without any crash*"])


def test_the_report_ends_in_a_command_that_repeats_it(
    pytester: pytest.Pytester,
) -> None:
    result = run_pytest(pytester, SHOP.replace("ASKS", "False"), "--culet-crash")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "1 broken promise; * crash points tried",
            "duplicated effect: charge 'o1': done 2 times, declared exactly_once",
            "*stops in commit *, at test_shop.py:14 in Shop.buy, after effect charge*",
            "*repeat: pytest test_shop.py::test_buy --culet-crash-at *",
        ]
    )
    line = next(x for x in result.outlines if "repeat:" in x)
    again = pytester.runpytest_inprocess(*PLUGIN, *line.split("pytest ")[1].split())
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["1 broken promise; 1 crash points tried"])


def test_agents_that_keep_their_promises_pass(pytester: pytest.Pytester) -> None:
    result = run_pytest(pytester, SHOP.replace("ASKS", "True"), "--culet-crash")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["culet: * crash points tried in 1 scenarios"])


def test_a_point_that_is_not_there_is_said(pytester: pytest.Pytester) -> None:
    source = SHOP.replace("ASKS", "True")
    result = run_pytest(pytester, source, "--culet-crash-at", "99")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*has no point 99*"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("roots=[Shop]", "", "*it needs roots=*"),
        ("roots=[Shop]", "[Shop]", "*takes keyword arguments only*"),
        ("roots=[Shop]", "roots=[Shop], root=1", "*no argument*root*"),
        ("(scenario, tmp_path)", "(tmp_path)", "*takes the fixture `scenario`*"),
        ("async def test_buy", "def test_buy", "*is an async function*"),
        ("@pytest.mark.culet_scenario(roots=[Shop])", "", "*for tests marked*"),
    ],
)
def test_a_marker_that_is_used_wrongly_is_refused(
    pytester: pytest.Pytester, old: str, new: str, said: str
) -> None:
    source = SHOP.replace("ASKS", "True").replace(old, new)
    if "await" in source and "async def test_buy" not in source:
        source = source.replace('    await (await scenario.get(Shop, "s"))', "    # (")
    result = run_pytest(pytester, source)
    assert result.ret != 0
    output = [*result.outlines, *result.errlines]
    assert any(
        Path(x).match(said) or said.strip("*").split("*")[0] in x for x in output
    )
