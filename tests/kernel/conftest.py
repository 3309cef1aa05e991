"""What tests of the kernel share."""

from __future__ import annotations

import pytest

from kernel import toolkit


@pytest.fixture(autouse=True)
def nothing_heard() -> None:
    """Agents of the toolkit write down what they hear: each test begins with nothing."""
    toolkit.forget()
