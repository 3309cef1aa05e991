"""Names and words that command a terminal, end a line or turn the writing around, in logs.

A record of ours stays one line, escaped and cut, whatever is in it.
"""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel import Agent
from culet.kernel.core.limits import LOG_CHARS, LOG_ERROR_CHARS, SHOWN_CHARS
from culet.kernel.core.shown import shortened, shown, without_query
from culet.kernel.logs import JsonLines, PlainLines, WhoLogs
from culet.kernel.testing import open_test_kernel

pytestmark = pytest.mark.rule("F-55")

WILD = (
    "\x1b[31mred\x1b[0m", "a\nERROR culet.kernel forged", "a\r\nb", "\u202eevil\u202c",
    "\u2066x\u2069", "nul\0", "bell\a", "lone\ud800", "\u2028next", "\x9b31m", "x" * 9_000,
)  # fmt: skip
COMMANDS = ("\x1b", "\x9b", "\x00", "\a", "\r", "\u202e", "\u202c", "\u2066", "\u2028")


class Top(Agent):
    async def make(self, name: str) -> None:
        await self.dynamic_agents.get(Kid, name)

    async def ring(self, payload: Any, schedule: Any) -> None:
        raise ValueError(payload)

    async def plan(self, text: str) -> None:
        await self.schedule(0, "ring", text)


class Kid(Agent):
    async def on_start(self) -> None:
        raise ValueError(self.name)


def logger(out: io.StringIO, formatter: logging.Formatter) -> Any:
    handler = logging.StreamHandler(out)
    handler.addFilter(WhoLogs())
    handler.setFormatter(formatter)
    return handler


@given(st.text(st.characters(), max_size=200), st.integers(4, 300))
def test_what_is_shown_is_printable_on_one_line_and_fits(text: str, most: int) -> None:
    told = shown(text, most)
    assert told.isprintable()
    assert len(told) <= most
    if text.isprintable() and len(text) <= most:
        assert told == text


def test_a_long_text_keeps_its_begin_and_end() -> None:
    told = shortened("a" * 500 + "b" * 500, 101)
    assert (told[:49], told[-49:]) == ("a" * 49, "b" * 49)
    assert len(told) <= 101
    assert shown("x" * (SHOWN_CHARS + 1)).endswith("…")


def test_the_query_of_an_address_is_no_text_for_logs() -> None:
    assert without_query("/agents/a/b?token=secret?x") == "/agents/a/b"


@pytest.mark.parametrize("text", WILD, ids=range(len(WILD)))
@pytest.mark.parametrize("kind", [JsonLines, PlainLines])
async def test_a_record_of_the_kernel_is_one_line_whatever_is_in_it(
    kind: Any, text: str, clock: object
) -> None:
    out = io.StringIO()
    handler = logger(out, kind())
    log = logging.getLogger("culet.kernel")
    log.addHandler(handler)
    try:
        async with open_test_kernel(roots=[Top], facets=[Kid]) as test:
            # a root of that name, where one may have it
            name = text[:200].replace("\0", "").replace("\ud800", "")
            top = await test.kernel.get_agent(Top, name or "a")
            with pytest.raises(Exception):  # noqa: B017 - its start fails
                await top.make(name)
            if "\ud800" not in text:
                await top.plan(text)
            await test.advance(60)
            test.kernel.report("test", None, ValueError(text), name=text)
    finally:
        log.removeHandler(handler)
    lines = out.getvalue().split("\n")[:-1]
    assert lines
    for line in lines:
        assert not any(c in line for c in COMMANDS), line
        if kind is JsonLines:
            told = json.loads(line)
            assert len(told["message"]) <= LOG_CHARS
            assert len(told.get("error", "")) <= LOG_ERROR_CHARS
        else:
            assert line.startswith(
                ("ERROR culet.", "WARNING culet.", "INFO culet.", "    ")
            )
            assert not line.startswith("ERROR culet.kernel forged")


def test_nothing_of_the_log_of_a_huge_text_is_without_a_bound() -> None:
    record = logging.makeLogRecord({"msg": "x" * 100_000, "levelname": "INFO"})
    for kind in (JsonLines(), PlainLines()):
        assert len(kind.format(record)) < LOG_CHARS + 200
