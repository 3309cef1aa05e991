"""Tell one story again: `cd tests && python -m crash.again run commit4 lost1`."""

from __future__ import annotations

import re
import sys
from typing import cast

from crash.scenarios import SCENARIOS
from crash.story import Point, Where, tell


def point(text: str) -> Point:
    """Return the point that `str` wrote."""
    found = re.fullmatch(r"(commit|lost|landed)(\d+)", text)
    assert found is not None, f"{text!r} is no point"
    return Point(cast(Where, found[1]), int(found[2]))


if __name__ == "__main__":
    print(tell(SCENARIOS[sys.argv[1]], [point(text) for text in sys.argv[2:]]))
