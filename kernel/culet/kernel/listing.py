"""What is in a tree, awake or asleep: rows for people and programs, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .core.path import path_text
from .node import Node

if TYPE_CHECKING:
    from .tree import Tree

_PAGE: Final = (
    "SELECT born, slot, parent, class, name FROM node WHERE state = 'live' AND born >"
    " coalesce((SELECT born FROM node WHERE slot = ?1), 0) ORDER BY born LIMIT ?2"
)
_JOBS: Final = (
    "SELECT job.owner, count(*), sum(job.dead) FROM node JOIN job ON job.owner = node.slot"
    " WHERE node.state = 'live' AND node.born BETWEEN ? AND ? GROUP BY job.owner"
)
_RUNS: Final = (
    "SELECT run.owner, count(*) FROM node JOIN run ON run.owner = node.slot"
    " WHERE run.status = 'running' AND node.born BETWEEN ? AND ? GROUP BY run.owner"
)


def page(tree: Tree, limit: int, after: str | None) -> list[dict[str, Any]]:
    """Return up to `limit` agents in the order of their birth, after that slot.

    The last page also has the remnants, whose slots may be those of agents above.
    """
    found = tree.db.execute(_PAGE, (after, limit))
    rows: list[dict[str, Any]] = []
    if found:
        ends = (found[0][0], found[-1][0])
        jobs = {slot: (n, dead) for slot, n, dead in tree.db.execute(_JOBS, ends)}
        runs = {slot: int(n) for slot, n in tree.db.execute(_RUNS, ends)}
        paths: dict[str, str] = {}
        for _born, slot, parent, class_name, name in found:
            above = None if parent is None else _path(tree, paths, parent)
            step = path_text([(class_name, name)])
            paths[slot] = step if above is None else f"{above}/{step}"
            node = tree.nodes.get(slot)
            rests = tree.supervision.rests((parent, class_name, name))
            rows.append(
                {
                    "path": paths[slot],
                    "slot": slot,
                    "state": _state(node, rests=rests),
                    "sockets": len(tree.sockets.of(slot)),
                    "refs": 0 if node is None else node.refs,
                    "runs": runs.get(slot, 0),
                    "jobs": int(jobs.get(slot, (0, 0))[0]),
                    "dead_jobs": int(jobs.get(slot, (0, 0))[1]),
                    "bytes": tree.store.agent(slot).size_bytes,
                }
            )
    if len(found) < limit:
        rows += [_remnant(node) for node in tree.remnants]
    return rows


def _path(tree: Tree, paths: dict[str, str], slot: str) -> str:
    known = paths.get(slot)
    if known is None:
        known = paths[slot] = tree.path_of(slot)
    return known


def _state(node: Node | None, *, rests: bool) -> str:
    if node is not None:
        return node.state.name.lower()
    return "resting" if rests else "sleeping"


def _remnant(node: Node) -> dict[str, Any]:
    nothing = dict.fromkeys(
        ("sockets", "refs", "runs", "jobs", "dead_jobs", "bytes"), 0
    )
    return {
        "path": node.path_text(),
        "slot": node.slot,
        "state": "remnant",
        **nothing,
    }
