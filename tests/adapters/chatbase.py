"""The chat base of the guide to adapters, saying what `perform` says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from culet.adapters.contract import perform

GUIDE = Path(__file__).parents[2] / "docs" / "guide-adapters.md"
[SOURCE] = re.findall(
    r"^```python\n(# chatbase\.py\n.*?)^```",
    GUIDE.read_text(),
    re.DOTALL | re.MULTILINE,
)
_names: dict[str, Any] = {"__name__": __name__}
exec(compile(SOURCE, str(GUIDE), "exec"), _names)
NOW: str = _names["NOW"]


class ChatBase(_names["ChatBase"]):  # type: ignore[misc]
    """Every word is one chunk, stored as it is said."""

    def reply(self, prompt: Any, said: int) -> Any:
        return perform(prompt, skip=said)
