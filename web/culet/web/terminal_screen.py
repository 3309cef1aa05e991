"""Writing to a terminal: text that streams, lines, and one status line at the bottom.

The status line is erased before anything else is written and drawn again after it, one
write each, so nothing flickers; it is cut to the width of the terminal and there is none
where a terminal cannot move its cursor. Answers go to `out`, all else to `err`, so a pipe
gets the answer alone. What comes from afar loses its control characters.
"""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Mapping
from typing import Final, Literal, TextIO, final

Style = Literal["plain", "dim", "good", "bad", "warn", "bold"]
_SGR: Final[dict[Style, str]] = {
    "plain": "",
    "dim": "2",
    "good": "32",
    "bad": "31",
    "warn": "33",
    "bold": "1",
}
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
_ERASE: Final = "\r\x1b[K"
_PIPED_WIDTH: Final = 300  # of a line that no terminal cuts


@final
class Screen:
    """Two streams that may be one terminal."""

    def __init__(
        self, out: TextIO, err: TextIO, env: Mapping[str, str] = os.environ
    ) -> None:
        self._out, self._err = out, err
        dumb = env.get("TERM") == "dumb"
        self.out_is_tty, self.err_is_tty = out.isatty(), err.isatty()
        self._moves = self.err_is_tty and not dumb
        self._colours = self._moves and not env.get("NO_COLOR")
        self._status = ""
        self._drawn = ""
        self._prompt = ""  # that is shown now
        self._open_line = False  # the answer's last line has no end yet

    # ---- what is written

    def text(self, text: str) -> None:
        """Write a piece of an answer, as it is (without control characters at a tty)."""
        if self.out_is_tty:
            text = clean(text)
        if not text:
            return
        self._erase()
        self._write(self._out, text)
        self._open_line = not text.endswith("\n")
        self._draw()

    def end_text(self) -> None:
        """End the answer's last line."""
        if self._open_line:
            self._erase()
            self._write(self._out, "\n")
            self._open_line = False
            self._draw()

    def line(self, text: str, style: Style = "plain") -> None:
        """Write one line for people, cut to what fits."""
        if self._open_line and self.out_is_tty and self.err_is_tty:
            self.end_text()
        width = self.width if self.err_is_tty else _PIPED_WIDTH
        told = self._styled(cut(one_line(text), width), style) + "\n"
        self._write(self._err, self._erasure() + told + self._drawing())

    def status(self, text: str) -> None:
        """Set the status line; an empty text removes it."""
        self._status = text
        self._draw()

    def prompt(self, text: str) -> None:
        """Show a prompt, the cursor behind it, until `entered`; no status meanwhile."""
        self.end_text()
        self._erase()
        self._prompt = text if self.err_is_tty else ""
        self._draw()

    def entered(self) -> None:
        """A line was typed: its end has moved the cursor on."""
        self._prompt = self._drawn = ""
        self._draw()

    def close(self) -> None:
        """Leave the cursor at the beginning of a line."""
        self._status = ""
        self.end_text()
        if self._prompt:
            self._prompt = self._drawn = ""
            self._write(self._err, "\n")
        self._erase()

    def json(self, encoded: bytes) -> None:
        """Write one JSON line."""
        self._write(self._out, encoded.decode() + "\n")

    @property
    def width(self) -> int:
        """Columns that may be used: one less than there are, so nothing wraps."""
        return max(shutil.get_terminal_size().columns - 1, 10)

    # ---- how

    def _styled(self, text: str, style: Style) -> str:
        code = _SGR[style]
        return f"\x1b[{code}m{text}\x1b[0m" if code and self._colours else text

    def _erase(self) -> None:
        self._write(self._err, self._erasure())

    def _draw(self) -> None:
        self._write(self._err, self._drawing())

    def _erasure(self) -> str:
        """Return what removes the status line or prompt that is shown."""
        if not self._drawn:
            return ""
        self._drawn = ""
        return _ERASE if self._moves else "\n"

    def _drawing(self) -> str:
        """Return what draws it, where there is room for it and it is another."""
        hidden = not self._moves or (self._open_line and self.out_is_tty)
        wanted = "" if hidden else cut(one_line(self._status), self.width)
        style: Style = "dim"
        if self._prompt:
            wanted, style = self._prompt, "bold"
        if wanted == self._drawn:
            return ""
        self._drawn = wanted
        return (_ERASE if self._moves else "") + self._styled(wanted, style)

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        if not text:
            return
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


def clean(text: str) -> str:
    """Return a text without characters that command a terminal; tabs and newlines stay."""
    return _CONTROL.sub("", text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return a text on one line, runs of white space made one space."""
    return clean(" ".join(text.split()))


def cut(text: str, width: int) -> str:
    """Return as much of a text as fits into so many columns, `…` for the rest."""
    used = 0
    for at, character in enumerate(text):
        used += columns(character)
        if used > width:
            return _fit(text[:at], width - 1) + "…"
    return text


def _fit(text: str, width: int) -> str:
    while text and sum(map(columns, text)) > width:
        text = text[:-1]
    return text


def columns(character: str) -> int:
    """Return how many columns one character takes."""
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
