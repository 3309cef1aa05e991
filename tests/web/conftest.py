"""The same tests over both transports."""

from __future__ import annotations

import pytest

from web import serving


def pytest_configure(config: pytest.Config) -> None:
    """Register our marker."""
    line = "cannot(reason): shows what is lost under plain hypercorn, and why"
    config.addinivalue_line("markers", line)


@pytest.fixture(params=["own", "quart"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Serve by our own listener, then by plain hypercorn."""
    monkeypatch.setattr(serving, "transport_of_tests", request.param)
    return str(request.param)
