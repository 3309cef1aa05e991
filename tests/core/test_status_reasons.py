"""The reason that a cause leaves in the row: its own name, with three that do not."""

from __future__ import annotations

import pytest

from culet.kernel.core.status import CAUSES, Cause, Moved, advance

OTHERS = {"finished": None, "silent": "no-progress", "forgotten": "cleared"}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_reason_is_the_cause(cause: Cause) -> None:
    outcome = advance("running", cause)

    if isinstance(outcome, Moved):
        assert outcome.reason == OTHERS.get(cause, cause)
