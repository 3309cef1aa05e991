"""A schema that no version has: what the next one will do to what this one has stored.

Each step changes the tables, copies what is there and notes what it saw, so that a half
one, a second one and a missing one can all be told from a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from unittest.mock import patch

from culet.storage import schema

TREE_STEP: Final = """
ALTER TABLE node ADD COLUMN test_born INTEGER;
UPDATE node SET test_born = born;
CREATE TABLE test_step (nodes INTEGER NOT NULL) STRICT;
INSERT INTO test_step SELECT count(*) FROM node;
CREATE INDEX test_node ON node (test_born);
"""
AGENT_STEP: Final = """
CREATE TABLE culet_copy (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
INSERT INTO culet_copy SELECT key, value FROM culet_value;
CREATE TABLE culet_step (number INTEGER PRIMARY KEY) STRICT;
INSERT INTO culet_step VALUES (1);
"""


@contextmanager
def newer_schema(
    tree: str = TREE_STEP, agent: str = AGENT_STEP, steps: int = 1
) -> Iterator[None]:
    """From here on this is the next version; the further steps are empty tables."""
    more = tuple(f"CREATE TABLE culet_more{n} (a ANY) STRICT;" for n in range(1, steps))
    with (
        patch.object(schema, "TREE", (*schema.TREE, tree, *more)),
        patch.object(schema, "AGENT", (*schema.AGENT, agent, *more)),
    ):
        yield
