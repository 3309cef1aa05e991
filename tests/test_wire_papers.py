"""What docs/wire-chat.md says was tried with the published packages is tried."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAPER = (ROOT / "docs" / "wire-chat.md").read_text()


def test_the_tests_that_show_what_was_tried_are_there() -> None:
    shown = re.findall(r"(\w+): \*(.*?)\*(?=<br>| \|)", PAPER)
    assert len(shown) > 40
    for name, title in shown:
        source = (ROOT / "tests" / "js" / f"{name}.test.mjs").read_text()
        pattern = rf'^test\("(?:W-\d+ ?)*:? ?{re.escape(title)}"'
        assert re.search(pattern, source, re.MULTILINE), f"{name}: {title}"
