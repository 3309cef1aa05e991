"""The same tests over both transports."""

from __future__ import annotations

import pytest

from web import serving


@pytest.fixture(params=["own", "quart"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serve by our own listener, then by plain hypercorn."""
    monkeypatch.setattr(serving, "transport_of_tests", request.param)
    return str(request.param)
