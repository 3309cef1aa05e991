"""The reason that a cause leaves in the row: its own name, or none that it brings."""

from __future__ import annotations

import pytest

from culet.kernel.core.status import CAUSES, Cause, Moved, advance

SPEAKS_FOR_ITSELF = {"finished", "failed", "cancelled"}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_reason_is_the_cause(cause: Cause) -> None:
    outcome = advance("running", cause)

    if isinstance(outcome, Moved):
        assert outcome.reason == (None if cause in SPEAKS_FOR_ITSELF else cause)
