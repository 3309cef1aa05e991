"""Each log record says whose code has written it; as JSON it is one object a line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel import Agent, Turn
from culet.kernel.logs import FIELDS, JsonLines, WhoLogs, log_runs
from culet.kernel.testing import open_test_kernel

log = logging.getLogger("somebody.else")


class Kid(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        log.warning("in the turn %s", "r1")
        yield {"type": "text-delta", "id": "t", "delta": "x"}


class Bad(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-delta", "id": "t", "delta": "x"}
        raise ValueError("no luck")


class Top(Agent):
    async def fails(self) -> None:
        await self.run_agent_tool(Bad, "x", run_id="r2")

    async def ask(self) -> None:
        log.warning("before", extra={"colour": "red", "odd": object})
        await self.run_agent_tool(Kid, "x", run_id="r1")

    async def breaks(self) -> None:
        try:
            raise ValueError("no such thing")
        except ValueError:
            log.exception("it broke")


@pytest.fixture
def lines() -> Any:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(WhoLogs())
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    yield lambda: [msgspec.json.decode(line) for line in out.getvalue().splitlines()]
    log.removeHandler(handler)


async def test_a_record_names_the_agent_and_the_run_it_works_for(
    clock: object, lines: Any
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        await (await test.kernel.get_agent(Top, "a")).ask()
    before, inside = lines()
    assert (before["agent"], before["message"], before["level"]) == (
        "Top/a", "before", "warning",
    )  # fmt: skip
    assert "run_id" not in before
    assert (before["colour"], before["odd"]) == ("red", "<class 'object'>")
    assert (inside["agent"], inside["run_id"]) == ("Top/a/Kid/r1", "r1")
    assert inside["message"] == "in the turn r1"
    assert before["at"].endswith("Z")


async def test_what_ends_a_run_names_the_run_its_agent_and_the_error(
    clock: object, lines: Any
) -> None:
    kernel_log = logging.getLogger("culet")
    kernel_log.addHandler(log.handlers[0])
    level = kernel_log.level
    kernel_log.setLevel(logging.INFO)
    try:
        async with open_test_kernel(roots=[Top], facets=[Kid, Bad]) as test:
            end = log_runs(test.kernel)
            await (await test.kernel.get_agent(Top, "a")).fails()
            end()
            await (await test.kernel.get_agent(Top, "a")).ask()
    finally:
        kernel_log.setLevel(level)
        kernel_log.removeHandler(log.handlers[0])
    told = [line for line in lines() if line["logger"].startswith("culet")]
    failed, ended = told
    for line in told:
        assert (line["agent"], line["run_id"]) == ("Top/a/Bad/r2", "r2")
    assert (failed["what"], failed["level"]) == ("turn", "error")
    assert failed["error_id"] in failed["message"]
    assert "no luck" in failed["error"]
    assert (ended["logger"], ended["level"], ended["status"], ended["attempt"]) == (
        "culet.runs", "warning", "error", 1,
    )  # fmt: skip


async def test_an_error_keeps_its_traceback_in_one_line(
    clock: object, lines: Any
) -> None:
    async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
        await (await test.kernel.get_agent(Top, "a")).breaks()
    (line,) = lines()
    assert "no such thing" in line["error"]
    assert "Traceback" in line["error"]


def test_outside_of_agents_nobody_is_named(lines: Any) -> None:
    log.warning("alone")
    (line,) = lines()
    assert not set(FIELDS) & line.keys()


anything = st.text(st.characters(codec=None))  # lone surrogates, too


@given(anything, st.dictionaries(anything, anything))
def test_whatever_is_logged_is_one_line_of_json(
    text: str, extra: dict[str, str]
) -> None:
    record = logging.makeLogRecord(
        {"msg": text, **{f"x{k}": v for k, v in extra.items()}}
    )
    assert WhoLogs().filter(record)
    made = JsonLines().format(record)
    assert "\n" not in made
    assert json.loads(made)["message"] == text
