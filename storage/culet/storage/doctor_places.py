"""What must hold of places: one order of all frames of a tree, as its files lie there.

A folder that an older version has left has no places yet; then there is nothing to check.
"""

from __future__ import annotations

import sqlite3
from typing import Final

_TREE_RULES: Final[tuple[tuple[str, str], ...]] = (
    (
        "The run {} of agent {} has no place in the feed.",
        "SELECT run.id, run.owner FROM run WHERE run.place IS NULL",
    ),
    (
        "The run {} of agent {} is {} and its end lies at {}, its start at {}.",
        """
        SELECT run.id, run.owner, run.status, run.end_place, run.place FROM run
        WHERE (run.status = 'running') <> (run.end_place IS NULL)
          OR run.end_place <= run.place
        """,
    ),
    (
        "Place {} of the feed was given to {} frames.",
        """
        SELECT given.place, count(*) FROM (
          SELECT run.place FROM run
          UNION ALL SELECT run.end_place FROM run
          UNION ALL SELECT gone.place FROM gone
        ) AS given WHERE given.place IS NOT NULL
        GROUP BY given.place HAVING count(*) > 1
        """,
    ),
    (
        "What is gone at place {} is without a live owner: {}.",
        """
        SELECT gone.place, gone.owner FROM gone WHERE NOT EXISTS (
          SELECT 1 FROM node WHERE node.slot = gone.owner AND node.state = 'live')
        """,
    ),
    (
        "The frame of what is gone at place {} is no JSON.",
        "SELECT gone.place FROM gone WHERE NOT json_valid(gone.frame)",
    ),
)
_AGENT_RULE: Final = (
    "Entry {} of the stream {} lies at {}, before the one that it follows.",
    """
    SELECT b.i, b.stream, b.place FROM main.culet_entry AS a
    JOIN main.culet_entry AS b ON b.stream = a.stream AND b.i = a.i + 1
    WHERE coalesce(b.place, 0) < a.place
    """,
)
_THERE: Final = "SELECT 1 FROM pragma_table_info(?) WHERE name = 'place'"
_SPANS: Final = (
    "SELECT stream, min(place), max(place) FROM main.culet_entry"
    " WHERE place IS NOT NULL GROUP BY stream"
)
_RUNS: Final = "SELECT run.child, run.id, run.place, run.end_place FROM run"
Spans = dict[str, tuple[int, int]]  # of a stream: its first place and its last one


def _known(connection: sqlite3.Connection, table: str) -> bool:
    return connection.execute(_THERE, (table,)).fetchone() is not None


def check(connection: sqlite3.Connection, *, tree: bool) -> list[str]:
    """Check the places of one database by itself."""
    if not _known(connection, "run" if tree else "culet_entry"):
        return []
    rules = _TREE_RULES if tree else (_AGENT_RULE,)
    return [
        sentence.format(*row)
        for sentence, sql in rules
        for row in connection.execute(sql)
    ]


def spans(connection: sqlite3.Connection) -> Spans:
    """Return where the entries of each stream of an agent's file lie."""
    if not _known(connection, "culet_entry"):
        return {}
    return {s: (low, high) for s, low, high in connection.execute(_SPANS)}


def check_spans(tree: sqlite3.Connection, found: dict[str, Spans]) -> list[str]:
    """Compare them with the start and the end of each run."""
    if not _known(tree, "run"):
        return []
    problems: list[str] = []
    for child, run_id, place, end_place in tree.execute(_RUNS):
        low, high = found.get(child, {}).get(run_id, (None, None))
        if low is None or high is None or place is None:
            continue
        if low <= place or (end_place is not None and high >= end_place):
            problems.append(
                f"The entries of the run {run_id} of agent {child} lie at {low} to {high},"
                f" the run itself at {place} to {end_place}."
            )
    return problems
