"""Names and words that command a terminal, as the command line shows them: escaped."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from culet.kernel import Agent, Turn, open_kernel
from culet.web.__main__ import main
from culet.web.terminal_screen import Screen

WILD = "\x1b[31mred\x1b[0m\u202eevil\r\nforged: all is well\x9b2J\a\u2028x"
COMMANDS = ("\x1b", "\x9b", "\a", "\r", "\u202e", "\u2028")


class Kid(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-delta", "id": "t", "delta": WILD}
        raise ValueError(WILD)


class Top(Agent):
    async def work(self) -> None:
        await self.dynamic_agents.get(Kid, WILD)
        await self.run_agent_tool(Kid, 1, run_id="r", display={"name": WILD})
        await self.schedule(3600, "ring", WILD)

    async def ring(self, payload: Any, schedule: Any) -> None:
        pass


@pytest.mark.rule("F-55")
async def test_the_command_line_shows_them_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with open_kernel(
        roots=[Top], facets=[Kid], storage=f"sqlite:{folder}"
    ) as kernel:
        await (await kernel.get_agent(Top, WILD)).work()
    for line in (["tree"], ["tree", "--due", "24h"], ["runs"], ["doctor"],
                 ["tree", "--json"], ["runs", "--json"], ["doctor", "--json"]):  # fmt: skip
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            main([line[0], str(folder), *line[1:]])
        told = out.getvalue()
        assert "red" in told or line[0] == "doctor"
        assert not [c for c in COMMANDS if c in told], line
        assert "\nforged" not in told, line


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.rule("F-55")
def test_the_terminal_client_shows_none_of_them() -> None:
    out, err = Tty(), Tty()
    screen = Screen(out, err, {"TERM": "xterm", "NO_COLOR": "1"})
    screen.text(WILD)
    screen.line(WILD)
    screen.end_text()
    shown = out.getvalue() + err.getvalue().replace("\r\x1b[K", "")
    assert "red" in shown
    assert not [c for c in COMMANDS if c in shown]
