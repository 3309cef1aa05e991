"""What a terminal shows: streaming text, lines, one status line, on any width."""

from __future__ import annotations

import io
import re

import pytest

from culet.web.terminal_screen import Screen, clean, columns, cut, one_line


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Pipe(io.StringIO):
    encoding = "utf-8"


def shown(written: str) -> list[str]:
    """Return the lines that are seen after all of it was written."""
    lines = [""]
    for part in re.split(r"(\n|\r\x1b\[K)", written):
        if part == "\n":
            lines.append("")
        elif part == "\r\x1b[K":
            lines[-1] = ""
        else:
            assert "\r" not in part
            lines[-1] += re.sub(r"\x1b\[\d*m", "", part)
    return lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "21")
    return Terminal()


def test_the_status_line_is_below_lines_and_never_among_them(terminal):
    screen = Screen(terminal, terminal, {})
    screen.status("2 runs")
    assert shown(terminal.getvalue()) == ["2 runs"]
    screen.line("one")
    screen.line("two")
    assert shown(terminal.getvalue()) == ["one", "two", "2 runs"]
    screen.status("")
    screen.close()
    assert shown(terminal.getvalue()) == ["one", "two", ""]


def test_the_same_status_is_drawn_once(terminal):
    screen = Screen(terminal, terminal, {})
    screen.status("same")
    before = terminal.getvalue()
    screen.status("same")
    assert terminal.getvalue() == before


def test_text_streams_unbroken_and_the_status_waits_for_its_end(terminal):
    screen = Screen(terminal, terminal, {})
    screen.status("busy")
    for piece in ("Hello", ", ", "you"):
        screen.text(piece)
        screen.status(f"busy {piece}")
    assert shown(terminal.getvalue()) == ["Hello, you"]
    screen.end_text()
    assert shown(terminal.getvalue()) == ["Hello, you", "busy you"]


def test_a_line_in_the_middle_of_text_begins_a_line_of_its_own(terminal):
    screen = Screen(terminal, terminal, {})
    screen.text("Hel")
    screen.line("run started")
    screen.text("lo")
    screen.close()
    assert shown(terminal.getvalue()) == ["Hel", "run started", "lo", ""]


def test_lines_and_status_fit_a_narrow_terminal(terminal):
    screen = Screen(terminal, terminal, {})
    screen.line("x" * 100)
    screen.line("日本語" * 20)
    screen.status("y" * 100)
    for line in shown(terminal.getvalue()):
        assert sum(map(columns, line)) <= 20
        assert line.endswith("…")


def test_a_prompt_stays_the_last_thing_until_a_line_is_typed(terminal):
    screen = Screen(terminal, terminal, {})
    screen.prompt("> ")
    screen.status("busy")
    screen.line("news")
    assert shown(terminal.getvalue()) == ["news", "> "]
    terminal.write("typed\n")  # the terminal's own echo
    screen.entered()
    assert shown(terminal.getvalue()) == ["news", "> typed", "busy"]


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(terminal, env):
    screen = Screen(terminal, terminal, env)
    screen.line("bad", "bad")
    screen.prompt("> ")
    assert "m" not in re.findall(r"\x1b\[\d*(\w)", terminal.getvalue())


def test_a_dumb_terminal_gets_no_status_and_no_escapes(terminal):
    screen = Screen(terminal, terminal, {"TERM": "dumb"})
    screen.status("busy")
    screen.text("x")
    screen.line("y")
    assert terminal.getvalue() == "x\ny\n"


def test_a_pipe_gets_the_answer_alone_and_as_it_is():
    out, err = Pipe(), Pipe()
    screen = Screen(out, err, {})
    screen.status("busy")
    screen.text("a\x1b[31mb")
    screen.line("run\x1b[2J started", "good")
    screen.end_text()
    assert out.getvalue() == "a\x1b[31mb\n"
    assert err.getvalue() == "run[2J started\n"


@pytest.mark.rule("F-55")
def test_what_comes_from_afar_cannot_command_a_terminal(terminal):
    screen = Screen(terminal, terminal, {"NO_COLOR": "1"})
    screen.text("a\x1b]0;title\x07\x1b[2J\u202eb\tc\nd\r")
    assert terminal.getvalue() == "a]0;title[2Jb\tc\nd"
    assert clean("\x9b31m") == "31m"
    assert one_line(" a\n\n b\t\x00c ") == "a b c"


def test_letters_that_an_encoding_lacks_are_replaced():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = Screen(out, out, {})
    screen.text("✓ é")
    assert out.buffer.getvalue() == b"? ?"


def test_cut_counts_columns():
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"
    assert cut("日本語", 5) == "日本…"
    assert cut("日本語", 4) == "日…"
    assert cut("e\u0301e\u0301", 2) == "e\u0301e\u0301"
