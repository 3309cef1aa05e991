"""The pytest plugin: `@pytest.mark.culet_scenario`, the fixture `scenario`, and the
options `--culet-crash`, `--culet-crash-twice` and `--culet-crash-at POINT`.

A marked async test runs once, in virtual time, like any other test. With
`--culet-crash` it runs once more for each commit and record in which its process may
stop. No other plugin for async tests is needed, and none gets in the way.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

MARK: Final = "culet_scenario"
_TRIED: Final = pytest.StashKey[list[tuple[str, int]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("culet", "crashes of agents")
    group.addoption(
        "--culet-crash",
        action="store_true",
        help="stop each culet scenario at every commit and record, resume, and judge",
    )
    group.addoption(
        "--culet-crash-at",
        metavar="POINT",
        help="stop each culet scenario at one point only: 7, r3, r3+, or 7,2",
    )
    group.addoption(
        "--culet-crash-twice",
        action="store_true",
        help="as --culet-crash, and the next life is stopped everywhere as well",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(roots, facets=(), effects={{}}, seed=0, quiet_s=600, ...): an async"
        " test on culet agents that --culet-crash stops at every point",
    )
    config.stash[_TRIED] = []


@pytest.fixture
def scenario(request: pytest.FixtureRequest) -> Any:
    """The scenario of a test that is marked `culet_scenario`; a new one for each run."""
    if request.node.get_closest_marker(MARK) is None:
        pytest.fail(f"the fixture `scenario` is for tests marked {MARK}", pytrace=False)
    return None  # the runner puts the scenario of each run in its place


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Make marked tests ordinary ones, before others take async tests for theirs."""
    for item in items:
        marker = item.get_closest_marker(MARK)
        if marker is None or not isinstance(item, pytest.Function):
            continue
        if not inspect.iscoroutinefunction(item.obj):
            msg = f"{item.nodeid}: a {MARK} is an async function"
            raise pytest.UsageError(msg)
        if "scenario" not in item.fixturenames:
            msg = f"{item.nodeid}: a {MARK} takes the fixture `scenario`"
            raise pytest.UsageError(msg)
        item.obj = _ordinary(config, item, marker, item.obj)


def _ordinary(
    config: pytest.Config,
    item: pytest.Function,
    marker: pytest.Mark,
    test: Callable[..., Any],
) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        _run(config, item, marker, lambda s: test(**{**fixtures, "scenario": s}))

    return run


def _run(
    config: pytest.Config,
    item: pytest.Function,
    marker: pytest.Mark,
    body: Callable[[Any], Any],
) -> None:
    from .testing_crash import explore
    from .testing_scenario import Spec, parse_points, run_scenario

    if marker.args:
        pytest.fail(f"{MARK} takes keyword arguments only", pytrace=False)
    unknown = set(marker.kwargs) - {f.name for f in msgspec.structs.fields(Spec)}
    if unknown or "roots" not in marker.kwargs:
        why = f"no argument {sorted(unknown)}" if unknown else "it needs roots="
        pytest.fail(f"{MARK}: {why}", pytrace=False)
    spec = Spec(**marker.kwargs)
    at = config.getoption("--culet-crash-at")
    twice = bool(config.getoption("--culet-crash-twice"))
    if at is None and not (twice or config.getoption("--culet-crash")):
        findings = run_scenario(body, spec).findings
        if findings:
            pytest.fail("\n".join(map(str, findings)), pytrace=False)
        return
    only = None if at is None else parse_points(at)
    report = explore(body, spec, only, depth=2 if twice else 1)
    config.stash[_TRIED].append((item.nodeid, report.points))
    if report.found:
        pytest.fail(report.text(functools.partial(_command, item)), pytrace=False)
    if at is not None and not report.points:
        pytest.fail(f"{item.nodeid} has no point {at}", pytrace=False)


def _command(item: pytest.Item, points: Any) -> str:
    from .testing_scenario import points_text

    return f"pytest {shlex.quote(item.nodeid)} --culet-crash-at {points_text(points)}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how often processes were stopped."""
    tried = config.stash[_TRIED]
    if tried:
        points = sum(count for _, count in tried)
        line = f"culet: {points} crash points tried in {len(tried)} scenarios"
        terminalreporter.write_line(line)
