"""What a target gets: a seeded source of chance, and the marks that it must reach."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from machines.sometimes import Sometimes

T = TypeVar("T")
# Names that broke somebody's program before.
NASTY: Final = (
    "a", "sub", "SUB", "%", "%25", "%2f", "%2F", "%00", "%2e%2e", "%zz", "a/b", "/", "//",
    "\\", "..", ".", "...", " ", "  a ", "a+b", "a?b", "a#b", "a;b=c", "\0", "a\0b", "\t",
    "\r\n", "\x7f", "\x85", "\u2028", "\ufeff", "\u202e", "é", "e\u0301", "İ", "ß", "ſ",
    "日本", "👩‍👩‍👧", "\ud800", "\udfff", "__proto__", "constructor", "toString", "null",
    "-1", "1e999", "'; DROP TABLE node; --", "\"", "agents", "tree", "tree.db", "-wal",
    "x" * 255, "x" * 256, "x" * 257, "é" * 300,
)  # fmt: skip


class Case:
    """One case of a target: everything in it comes from its seed."""

    def __init__(self, seed: int, sometimes: Sometimes) -> None:
        self.seed = seed
        self.rng: Final = random.Random(seed)
        self.mark = sometimes.hit

    def one(self, *of: T) -> T:
        """Choose one."""
        return self.rng.choice(of)

    def luck(self, probability: float) -> bool:
        """Return True so often."""
        return self.rng.random() < probability

    def name(self) -> str:
        """Return a name, nasty more often than not."""
        if self.luck(0.6):
            return self.rng.choice(NASTY)
        if self.luck(0.5):
            return "".join(self.rng.choice(NASTY)[:4] for _ in range(3))
        count = self.rng.randrange(1, 9)
        return "".join(chr(self.rng.randrange(1, 0x3000)) for _ in range(count))

    def json(self, depth: int = 0) -> object:
        """Return a JSON value."""
        kind = self.rng.randrange(8 if depth < 4 else 6)
        match kind:
            case 0:
                return self.one(None, True, False)
            case 1:
                return self.one(0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1)
            case 2:
                return self.one(0.0, -0.0, 0.5, 1e308, -1e-308)
            case 3 | 4 | 5:
                return self.name().encode("utf-8", "replace").decode()
            case 6:
                return [self.json(depth + 1) for _ in range(self.rng.randrange(4))]
        return {
            self.name().encode("utf-8", "replace").decode(): self.json(depth + 1)
            for _ in range(self.rng.randrange(4))
        }

    def damaged(self, data: bytes) -> bytes:
        """Return bytes that are wrong in one place or a few."""
        out = bytearray(data)
        for _ in range(self.rng.randrange(1, 4)):
            at = self.rng.randrange(len(out) + 1)
            match self.rng.randrange(5):
                case 0 if out:
                    out[at % len(out)] ^= 1 << self.rng.randrange(8)
                case 1:
                    del out[at:]
                case 2:
                    out[at:at] = self.rng.randbytes(self.rng.randrange(1, 12))
                case 3:
                    del out[at : at + self.rng.randrange(1, 12)]
                case 4:
                    size = min(self.rng.randrange(1, 600), len(out) - at)
                    out[at : at + size] = bytes(size)
        return bytes(out)


class Target(NamedTuple):
    """A target as the runner sees it. `invariant` is the first sentence of its file."""

    name: str
    invariant: str
    play: Callable[[Case], None]
    sometimes: Sometimes
