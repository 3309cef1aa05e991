"""What must hold in the files of a tree, each rule with the sentence for its breach."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from . import doctor_places as places
from . import schema
from .doctor_accounts import ACCOUNT_RULES

_WRITER: Final = slice(96, 100)  # of a database: the SQLite that wrote it last

# Each finds what must not be, as the gaps of its sentence. Columns are always
# qualified: a bare `what = id` inside a subquery would quietly mean the job's own id.
_TREE_RULES: Final[tuple[tuple[str, str], ...]] = (
    (
        "The running run {} of agent {} has {} turn jobs, not one.",
        """
        SELECT run.id, run.owner, (
          SELECT count(*) FROM job
          WHERE job.kind = 'turn' AND job.owner = run.child AND job.what = run.id
        ) AS jobs
        FROM run WHERE run.status = 'running' AND jobs <> 1
        """,
    ),
    (
        "The running fiber {} of agent {} has {} jobs, not one.",
        """
        SELECT fiber.id, fiber.owner, (
          SELECT count(*) FROM job
          WHERE job.kind IN ('fiber', 'turn')
            AND job.owner = fiber.owner AND job.what = fiber.id
        ) AS jobs
        FROM fiber WHERE fiber.status = 'running' AND jobs <> 1
        """,
    ),
    (
        "The {} job {} of agent {} is about nothing unfinished.",
        """
        SELECT job.kind, job.what, job.owner FROM job
        WHERE job.kind IN ('fiber', 'turn') AND NOT EXISTS (
          SELECT 1 FROM fiber
          WHERE fiber.owner = job.owner AND fiber.id = job.what
            AND fiber.status = 'running')
        AND NOT EXISTS (
          SELECT 1 FROM run
          WHERE run.child = job.owner AND run.id = job.what AND run.status = 'running')
        """,
    ),
    (
        "The {} job {} is without a live owner: {}.",
        """
        SELECT job.kind, job.what, job.owner FROM job
        WHERE job.kind <> 'wipe' AND NOT EXISTS (
          SELECT 1 FROM node WHERE node.slot = job.owner AND node.state = 'live')
        """,
    ),
    (
        "The run {} is without a live owner: {}.",
        """
        SELECT run.id, run.owner FROM run WHERE NOT EXISTS (
          SELECT 1 FROM node WHERE node.slot = run.owner AND node.state = 'live')
        """,
    ),
    (
        "The fiber {} is without a live owner: {}.",
        """
        SELECT fiber.id, fiber.owner FROM fiber WHERE NOT EXISTS (
          SELECT 1 FROM node WHERE node.slot = fiber.owner AND node.state = 'live')
        """,
    ),
    (
        "The agent {} is gone and no wipe covers it.",
        """
        WITH RECURSIVE covered (slot) AS (
          SELECT job.what FROM job WHERE job.kind = 'wipe'
          UNION
          SELECT node.slot FROM node JOIN covered ON node.parent = covered.slot)
        SELECT node.slot FROM node
        WHERE node.state = 'gone' AND node.slot NOT IN (SELECT covered.slot FROM covered)
        """,
    ),
    (
        "The agent {} is a live node under a gone or missing one.",
        """
        SELECT child.slot FROM node AS child
        LEFT JOIN node AS parent ON parent.slot = child.parent
        WHERE child.parent IS NOT NULL AND child.state = 'live'
          AND parent.state IS NOT 'live'
        """,
    ),
    (
        "There is more than one root: {}.",
        """
        SELECT group_concat(node.slot) FROM node
        WHERE node.parent IS NULL HAVING count(*) > 1
        """,
    ),
    (
        "The stream {} of agent {} has more than one end: {}.",
        """
        SELECT ends.id, ends.slot, group_concat(ends.what) FROM (
          SELECT run.id AS id, run.child AS slot, 'run of ' || run.owner AS what
          FROM run
          UNION ALL
          SELECT fiber.id, fiber.owner, fiber.kind FROM fiber
        ) AS ends GROUP BY ends.id, ends.slot HAVING count(*) > 1
        """,
    ),
)
_SINCE: Final[dict[int, tuple[tuple[str, str], ...]]] = {  # schemas of `tree.db`
    2: (
        (
            "The effect {} ({}) is without a live owner: {}.",
            """
            SELECT effect.born, effect.name, effect.owner FROM effect WHERE NOT EXISTS (
              SELECT 1 FROM node WHERE node.slot = effect.owner AND node.state = 'live')
            """,
        ),
        (
            "The result of effect {} ({}) is no JSON.",
            """
            SELECT effect.born, effect.name FROM effect
            WHERE effect.result IS NOT NULL AND NOT json_valid(effect.result)
            """,
        ),
    ),
    3: (
        (
            "The turn {} of agent {} was taken {} times, {} times without progress.",
            """
            SELECT job.what, job.owner, job.tries, job.attempts FROM job
            WHERE job.kind = 'turn' AND job.tries < job.attempts
            """,
        ),
    ),
    5: ACCOUNT_RULES,
    7: (
        (
            "The letter {} to run {} of agent {} is for no run that goes on.",
            """
            SELECT mail.id, mail.run, mail.slot FROM mail WHERE NOT EXISTS (
              SELECT 1 FROM run WHERE run.child = mail.slot AND run.id = mail.run
                AND run.status = 'running')
            """,
        ),
        (
            "The letter {} to run {} is no JSON.",
            "SELECT mail.id, mail.run FROM mail WHERE NOT json_valid(mail.body)",
        ),
    ),
}
_AGENT_RULES: Final[tuple[tuple[str, str], ...]] = (
    (
        "The stream {} has a gap: {} entries up to number {}.",
        """
        SELECT stream, count(*), max(i) FROM main.culet_entry
        GROUP BY stream HAVING min(i) <> 0 OR max(i) <> count(*) - 1
        """,
    ),
    (
        "Entry {} of the stream {} is of an earlier attempt than the one before it.",
        """
        SELECT b.i, b.stream FROM main.culet_entry AS a
        JOIN main.culet_entry AS b ON b.stream = a.stream AND b.i = a.i + 1
        WHERE b.attempt < a.attempt
        """,
    ),
    (
        "Entry {} of the stream {} is no JSON.",
        "SELECT i, stream FROM main.culet_entry WHERE NOT json_valid(body)",
    ),
    (
        "The value {} is no JSON.",
        "SELECT key FROM main.culet_value WHERE NOT json_valid(value)",
    ),
)
_GUARDS: Final[dict[bool, tuple[str, ...]]] = {
    True: ("fiber_absorbs", "run_absorbs"),
    False: ("culet_entry_keeps",),
}  # the triggers that keep what is for good
_GUARDS_SINCE: Final = {
    2: ("effect_absorbs",),
    5: ("account_of_run", "account_of_turn"),
    7: ("mail_of_ended", "mail_of_run"),
}
_ENDS: Final = (
    "SELECT run.id, run.n, 'run' FROM run JOIN node ON node.slot = run.child"
    " WHERE run.status <> 'running' AND node.state = 'live' AND run.child = ?"
    " UNION ALL SELECT fiber.id, fiber.n, 'turn' FROM fiber"
    " WHERE fiber.kind = 'turn' AND fiber.status <> 'running' AND fiber.owner = ?"
)
_LENGTHS: Final = "SELECT stream, count(*) FROM main.culet_entry GROUP BY stream"
_LIVE: Final = "SELECT slot FROM node WHERE state = 'live'"


class TooNew(Exception):
    """This SQLite is too old for what a newer one has written; one sentence."""


@contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
    """Open a file that nobody else has, to be read only.

    Raises `sqlite3.DatabaseError` where it is damaged, `TooNew` where that may only
    be because this SQLite is older than the one that wrote it.
    """
    connection = sqlite3.connect(f"file:{_quoted(path)}?immutable=1", uri=True)
    connection.text_factory = _text
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            yield connection
        except sqlite3.DatabaseError as error:
            if not _may_be_age(path, error):
                raise
            msg = (
                f"this SQLite, {sqlite3.sqlite_version}, is older than the one that "
                f"wrote it and cannot read it: {error}."
            )
            raise TooNew(msg) from error
    finally:
        connection.close()


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _text(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")


def _may_be_age(path: str, error: sqlite3.DatabaseError) -> bool:
    with open(path, "rb") as file:
        writer = int.from_bytes(file.read(100)[_WRITER], "big")
    major, minor, patch = sqlite3.sqlite_version_info
    older = writer > major * 1_000_000 + minor * 1_000 + patch
    words = ("malformed database schema", "unknown function", "no such function")
    return older and any(word in str(error) for word in words)


def check_file(connection: sqlite3.Connection, *, tree: bool) -> list[str]:
    """Check one database by itself: whole, of a known schema, its own rules kept."""
    problems = [
        f"SQLite finds: {text}."
        for (text,) in connection.execute("PRAGMA integrity_check")
        if text != "ok"
    ]
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    known = len(schema.TREE if tree else schema.AGENT)
    if version > known:
        problems.append(
            f"It has schema {version}, newer than {known}: use that version."
        )
        return problems
    sql = "SELECT name FROM main.sqlite_master WHERE type = 'trigger'"
    there = {name for (name,) in connection.execute(sql)}
    guards = _GUARDS[tree]
    rules = _TREE_RULES if tree else _AGENT_RULES
    for since, more in _SINCE.items() if tree else ():
        if version >= since:
            rules += more
            guards += _GUARDS_SINCE.get(since, ())
    problems += [
        f"The trigger {name} is missing." for name in guards if name not in there
    ]
    for sentence, sql in rules:
        problems += [sentence.format(*row) for row in connection.execute(sql)]
    return problems + places.check(connection, tree=tree)


def lengths(connection: sqlite3.Connection) -> dict[str, int]:
    """Return how many entries each stream of an agent's file holds."""
    return dict(connection.execute(_LENGTHS).fetchall())


def check_ends(
    tree: sqlite3.Connection, stored: dict[str, dict[str, int]], unknown: set[str]
) -> list[str]:
    """Compare the length that each end names with what its agent's file holds.

    A chat drops what its old turns have streamed, so a turn may hold nothing. The
    files of the agents in `unknown` could not be read.
    """
    problems: list[str] = []
    for (slot,) in tree.execute(_LIVE).fetchall():
        if slot in unknown:
            continue
        streams = stored.get(slot, {})
        for stream, n, kind in tree.execute(_ENDS, (slot, slot)):
            there = streams.get(stream, 0)
            if there != n and (kind == "run" or there):
                problems.append(
                    f"The {kind} {stream} of agent {slot} ended with {n} entries, "
                    f"its file holds {there}."
                )
    return problems
