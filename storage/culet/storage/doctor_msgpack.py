"""The few shapes of MessagePack that a log holds, read with nothing but the language.

Texts, bytes, non-negative integers, null and lists of them. The kernel writes them
with a library; a doctor that read them with the same library would share its faults.
"""

from __future__ import annotations

from typing import Final, NoReturn

Value = str | bytes | int | None | list["Value"]
_DEEPEST: Final = 4  # lists in lists: a record, an entry, its pages

# first byte -> (shape, bytes of the length or the number that follows)
_SIZED: Final[dict[int, tuple[str, int]]] = {
    0xC4: ("bytes", 1), 0xC5: ("bytes", 2), 0xC6: ("bytes", 4),
    0xCC: ("int", 1), 0xCD: ("int", 2), 0xCE: ("int", 4), 0xCF: ("int", 8),
    0xD9: ("text", 1), 0xDA: ("text", 2), 0xDB: ("text", 4),
    0xDC: ("list", 2), 0xDD: ("list", 4),
}  # fmt: skip


def decode(data: bytes) -> Value:
    """Return the one value that `data` is; `ValueError` if it is anything else."""
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        _refuse("there is something behind the value")
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            _refuse("it ends in the middle")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def value(self, depth: int) -> Value:
        first = self.number(1)
        if first < 0x80:
            return first
        if first == 0xC0:
            return None
        if 0x90 <= first < 0xA0:
            return self.items(first & 0x0F, depth)
        if 0xA0 <= first < 0xC0:
            return self.take(first & 0x1F).decode()
        if first not in _SIZED:
            _refuse(f"the byte {first:#x} begins nothing that a log holds")
        shape, width = _SIZED[first]
        number = self.number(width)
        if shape == "int":
            return number
        if shape == "list":
            return self.items(number, depth)
        content = self.take(number)
        return content.decode() if shape == "text" else content

    def items(self, count: int, depth: int) -> list[Value]:
        if depth == _DEEPEST:
            _refuse("lists lie too deep")
        if count > len(self.data) - self.at:  # each takes a byte at least
            _refuse("it ends in the middle")
        return [self.value(depth + 1) for _ in range(count)]


def _refuse(why: str) -> NoReturn:
    msg = f"no MessagePack of a log: {why}"
    raise ValueError(msg)
