"""Addresses: one codec between `(class, name)` chains and URL paths.

A path is read once, from the raw target, and both the gate and the open use what was
read: what a gate has seen is what gets opened. So the codec is stricter than the
clients' own. It splits before it decodes (an encoded slash stays inside a name), it
decodes each name exactly once, hops stand directly after the root or the hop before,
and whatever a browser would have rewritten (dot segments, backslashes) is refused
instead of guessed at. A marker `sub` that names no known class ends the matter: to
skip ahead to a later one would open what no gate was asked about.

Laws: `parse(build(steps)) == steps`, for every name that `check_name` lets through
and, at the root, that a URL carries unchanged; and parsing returns, raises
`UsageError` (HTTP 400) or raises `NotFound` (404), nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes, urlsplit

from culet.kernel.core.limits import DEPTH_MAX, NAME_MAX
from culet.kernel.errors import NotFound, UsageError

RESERVED: Final = "sub"
# What encodeURIComponent of the clients leaves alone, besides letters and digits.
_UNRESERVED: Final = "-_.!~*'()"
# Characters of a path that no URL parser changes. `%` begins an escape.
_STABLE: Final = re.compile(r"[A-Za-z0-9!$&'()*+,\-.:;=@\[\]_|~%]+", re.ASCII)
_BROKEN_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CAPITAL: Final = re.compile(r"[A-Z]")
# what in a name would read as another path, or end a line of a log
_MISREAD: Final = re.compile("[%/\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DEFAULT_PORTS: Final = {"http": ":80", "ws": ":80", "https": ":443", "wss": ":443"}


class PathStep(NamedTuple):
    """One level of an address: the class of an agent and its name there."""

    class_name: str
    name: str


class ParsedPath(NamedTuple):
    """What a URL path addresses. `leaf_path` is raw and begins with a slash."""

    root: PathStep
    hops: tuple[PathStep, ...]
    leaf_path: str

    @property
    def steps(self) -> tuple[PathStep, ...]:
        """All levels, root first."""
        return (self.root, *self.hops)

    @property
    def below(self) -> PathBelow:
        """What is addressed below the root."""
        return PathBelow(self.hops, self.leaf_path)


class PathBelow(NamedTuple):
    """What a path addresses below an agent; without hops that agent itself."""

    hops: tuple[PathStep, ...]
    leaf_path: str

    def tail(self, hop: int) -> str:
        """Return the path from a hop on (0: the first), still encoded."""
        parts = [
            f"/{RESERVED}/{kebab(step.class_name)}/{quote(step.name, safe=_UNRESERVED)}"
            for step in self.hops[hop:]
        ]
        return "".join(parts) + (
            "" if parts and self.leaf_path == "/" else self.leaf_path
        )


def path_text(steps: Iterable[tuple[str, str]]) -> str:
    """Return a path for people, `Class/name/Class/name`; two paths never read the same."""
    return "/".join(
        f"{class_name}/{_MISREAD.sub(lambda found: quote(found.group(), safe=''), name)}"
        for class_name, name in steps
    )


@lru_cache(maxsize=4096)
def kebab(class_name: str) -> str:
    """Return the URL segment of a class, exactly as the JavaScript clients make it.

    A name in capitals is lower-cased; else each capital gets a dash before it. The
    rest follows the clients letter by letter: `MyAPI` is `my-a-p-i`.
    """
    if class_name == class_name.upper() and class_name != class_name.lower():
        return class_name.lower().replace("_", "-")
    dashed = _CAPITAL.sub(lambda found: "-" + found.group().lower(), class_name)
    return dashed.removeprefix("-").replace("_", "-").removesuffix("-")


def check_name(name: str, *, root: bool = False) -> str:
    """Return `name` if an agent may have it.

    Raises `UsageError`: not a text, empty, NUL inside, `.` or `..`, longer than
    `NAME_MAX` code points, a lone surrogate, or a root called `sub`.
    """
    if not isinstance(name, str):
        raise UsageError(f"an agent's name is a text, not {type(name).__name__}")
    if not name:
        raise UsageError("an agent's name must not be empty")
    if len(name) > NAME_MAX:
        raise UsageError(
            f"an agent's name has at most {NAME_MAX} characters, not {len(name)}"
        )
    if "\0" in name:
        raise UsageError(f"an agent's name must not hold NUL: {name!r}")
    if name in {".", ".."}:
        raise UsageError(f"an agent cannot be called {name!r}")
    if root and name == RESERVED:
        raise UsageError("a root cannot be called 'sub', which marks a hop in URLs")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"an agent's name must be valid Unicode: {name!r}") from None
    return name


def check_classes(names: Iterable[str]) -> dict[str, str]:
    """Return the table segment -> class name for the classes of one kernel.

    Raises `UsageError` for a class whose segment is empty, `sub` or not routable,
    and for two classes that share a segment (their agents could not be told apart).
    """
    table: dict[str, str] = {}
    for name in names:
        segment = _class_segment(name)
        other = table.setdefault(segment, name)
        if other != name:
            raise UsageError(
                f"classes {other!r} and {name!r} have the same URL segment {segment!r}: "
                "rename one"
            )
    return table


def parse_agent_path(
    raw_path: str, classes: Iterable[str], prefix: str = "agents"
) -> ParsedPath | None:
    """Read the raw (still percent-encoded) path of a request.

    None: not under `prefix`, or too short to name a root, so not ours to answer.
    Raises `UsageError` (400) for an unknown root class, a name or an escape that is
    not allowed, dot segments, backslashes and paths deeper than `DEPTH_MAX`, and
    `NotFound` (404) for a `sub` marker without a known class and a name. Nothing may
    be woken after either.
    """
    path = raw_path.partition("#")[0].partition("?")[0]
    parts = [part for part in path.split("/") if part]
    lead = _prefix_parts(prefix)
    if tuple(parts[: len(lead)]) != lead or len(parts) < len(lead) + 2:
        return None
    if "\\" in path or any(_is_dots(part) for part in parts):
        raise UsageError("dot segments and backslashes are not allowed in a path")
    table = _table(tuple(classes))
    class_segment, name_segment, *rest = parts[len(lead) :]
    root_class = table.get(class_segment)
    if root_class is None:
        raise UsageError(f"no agent class answers to {class_segment!r}")
    root = PathStep(root_class, check_name(_decode(name_segment), root=True))
    hops, leaf_path = _hops(rest, table)
    return ParsedPath(root, hops, leaf_path)


def parse_below(raw_path: str, classes: Iterable[str]) -> PathBelow:
    """Read the raw path that is left below an agent: hops at its very start, then a leaf.

    Raises what `parse_agent_path` raises, by the same rules.
    """
    path = raw_path.partition("#")[0].partition("?")[0]
    parts = [part for part in path.split("/") if part]
    if "\\" in path or any(_is_dots(part) for part in parts):
        raise UsageError("dot segments and backslashes are not allowed in a path")
    return PathBelow(*_hops(parts, _table(tuple(classes))))


def find_below(raw_path: str) -> str | None:
    """Return the part of a raw path that begins with its first `sub` marker, or None.

    What stands before belongs to whoever routes; the first marker decides, whether or
    not a known class follows it.
    """
    path = raw_path.partition("#")[0].partition("?")[0]
    parts = [part for part in path.split("/") if part]
    if RESERVED not in parts:
        return None
    return "/" + "/".join(parts[parts.index(RESERVED) :])


def _hops(
    parts: list[str], table: Mapping[str, str]
) -> tuple[tuple[PathStep, ...], str]:
    """Split the segments after an agent into hops and the leaf path."""
    hops: list[PathStep] = []
    rest = parts
    while rest and rest[0] == RESERVED:
        if len(rest) < 3 or rest[1] not in table:
            raise NotFound("no such agent")
        hops.append(PathStep(table[rest[1]], check_name(_decode(rest[2]))))
        rest = rest[3:]
    if len(hops) >= DEPTH_MAX:
        raise UsageError(f"a path has at most {DEPTH_MAX} levels, not {len(hops) + 1}")
    return tuple(hops), "/" + "/".join(rest)


def build_agent_path(
    steps: Sequence[tuple[str, str]],
    prefix: str = "agents",
    leaf_path: str | None = None,
    root_binding: str | None = None,
) -> str:
    """Return the URL path of the agent at `steps` (class and name, root first).

    Child names are percent-encoded. A root name is put in as it is, so it must be one
    that a URL carries unchanged, without `%`. `root_binding` stands for the root's
    class where a server knows it under another name. Raises `UsageError`.
    """
    if not steps:
        raise UsageError("a path needs at least one step")
    if len(steps) > DEPTH_MAX:
        raise UsageError(f"a path has at most {DEPTH_MAX} levels, not {len(steps)}")
    (root_class, root_name), *children = steps
    check_name(root_name, root=True)
    if "%" in root_name or not _STABLE.fullmatch(root_name):
        raise UsageError(f"a URL does not carry the root name {root_name!r} unchanged")
    parts = [*_prefix_parts(prefix), _class_segment(root_binding or root_class)]
    parts.append(root_name)
    for class_name, name in children:
        encoded = quote(check_name(name), safe=_UNRESERVED)
        parts += (RESERVED, _class_segment(class_name), encoded)
    return "/" + "/".join(parts) + (_leaf(leaf_path) if leaf_path else "")


def build_agent_url(
    origin: str,
    steps: Sequence[tuple[str, str]],
    prefix: str = "agents",
    leaf_path: str | None = None,
    root_binding: str | None = None,
) -> str:
    """Return `origin` (http, https, ws or wss and a host) with the path of an agent.

    Raises `UsageError` for an origin with credentials, path, query or fragment.
    """
    try:
        split = urlsplit(origin)
        host, _port = split.hostname, split.port
    except ValueError:
        raise UsageError(f"invalid origin {origin!r}") from None
    extra = split.query or split.fragment or split.path not in {"", "/"}
    if split.scheme not in _DEFAULT_PORTS or not host or "@" in split.netloc or extra:
        raise UsageError(
            f"invalid origin {origin!r}: give an http(s) or ws(s) origin without "
            "credentials, path, query or fragment"
        )
    netloc = split.netloc.lower().removesuffix(_DEFAULT_PORTS[split.scheme])
    path = build_agent_path(steps, prefix, leaf_path, root_binding)
    return f"{split.scheme}://{netloc}{path}"


@lru_cache(maxsize=64)
def _table(classes: tuple[str, ...]) -> dict[str, str]:
    return check_classes(classes)


@lru_cache(maxsize=64)
def _prefix_parts(prefix: str) -> tuple[str, ...]:
    parts = tuple(prefix.split("/"))
    for part in parts:
        if part == RESERVED or _is_dots(part) or not _STABLE.fullmatch(part):
            raise UsageError(f"{prefix!r} cannot be the prefix of agent paths")
    return parts


def _class_segment(class_name: str) -> str:
    segment = kebab(class_name)
    if segment == RESERVED:
        raise UsageError(f"class {class_name!r}: 'sub' is reserved in URLs; rename it")
    if "%" in segment or _is_dots(segment) or not _STABLE.fullmatch(segment):
        raise UsageError(f"class {class_name!r} does not make a URL segment")
    return segment


def _leaf(leaf_path: str) -> str:
    leaf = leaf_path if leaf_path.startswith("/") else "/" + leaf_path
    if leaf == "/":
        return leaf
    parts = leaf[1:].split("/")
    for part in parts:
        if _is_dots(part) or not _STABLE.fullmatch(part):
            raise UsageError(f"a URL does not carry the leaf path {leaf_path!r}")
    if parts[0] == RESERVED:
        raise UsageError(f"leaf path {leaf_path!r} would be read as a hop")
    return leaf


def _is_dots(segment: str) -> bool:
    """Whether a URL parser would take the segment for `.` or `..`."""
    return segment.replace("%2e", ".").replace("%2E", ".") in {".", ".."}


def _decode(segment: str) -> str:
    """Decode one segment, once. Raises `UsageError` for what is no escaped UTF-8."""
    if _BROKEN_ESCAPE.search(segment):
        raise UsageError(f"broken percent escape in {segment!r}")
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeError:
        raise UsageError(f"not UTF-8 when decoded: {segment!r}") from None
