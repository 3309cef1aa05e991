"""What was built is what gets parsed, for every name; whatever else is parsed is an
address, `UsageError` or `NotFound`.

Names are nasty on purpose. A path is then damaged as a proxy, a browser or an attacker
would, and what is still accepted must be an address that can be built again.
"""

from __future__ import annotations

from typing import Final

from culet.kernel.core.limits import DEPTH_MAX
from culet.kernel.core.path import (
    ParsedPath,
    PathStep,
    build_agent_path,
    check_name,
    parse_agent_path,
)
from culet.kernel.errors import NotFound, UsageError
from fuzz.case import Case
from machines.sometimes import Sometimes

CLASSES: Final = ("Supervisor", "JobRunner", "HTTPWorker", "My_Agent", "Sub2", "ß")
ROUTED: Final = CLASSES[:-1]
SOMETIMES: Final = Sometimes("round trip", "refused", "damaged, accepted", "not found")


def play(case: Case) -> None:
    """Build, parse, damage, parse again."""
    depth = case.rng.randrange(1, DEPTH_MAX + 2)
    root = case.one("a", "A-b_c.~", "x:y@z", case.name())
    names = [root, *(case.name() for _ in range(depth - 1))]
    steps = [PathStep(case.one(*ROUTED), name) for name in names]
    prefix = case.one("agents", "a", "api/v1/agents")
    try:
        path = build_agent_path(steps, prefix)
    except UsageError:
        case.mark("refused")
        assert depth > DEPTH_MAX or not all(map(_allowed, names)) or _unstable(root)
        path = f"/{prefix}/supervisor/a"
    else:
        case.mark("round trip")
        want = ParsedPath(steps[0], tuple(steps[1:]), "/")
        assert parse_agent_path(path, ROUTED, prefix) == want
        assert path.isascii()
    damaged = case.damaged(path.encode()).decode("latin-1")
    if case.luck(0.3):
        at = case.rng.randrange(len(damaged) + 1)
        damaged = (
            damaged[:at]
            + case.one("/sub/", "/../", "%2f", "?", "#", "//")
            + case.name()
        )
    _parse(case, damaged, prefix)


def _allowed(name: str) -> bool:
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def _unstable(root: str) -> bool:
    odd = set(root) - set("!$&'()*+,-.:;=@[]_|~")
    return root == "sub" or any(not (c.isascii() and c.isalnum()) for c in odd)


def _parse(case: Case, path: str, prefix: str) -> None:
    try:
        found = parse_agent_path(path, ROUTED, prefix)
    except UsageError:
        return
    except NotFound:
        case.mark("not found")
        return
    if found is None:
        return
    case.mark("damaged, accepted")
    assert len(found.steps) <= DEPTH_MAX
    for step in found.steps:
        assert step.class_name in ROUTED
        assert check_name(step.name) == step.name
    if not _unstable(found.root.name):
        again = parse_agent_path(build_agent_path(found.steps, prefix), ROUTED, prefix)
        assert again is not None
        assert again.steps == found.steps
