"""What must hold in `tree.db` after every step, in every life: each a query for rows
that must not exist."""

from __future__ import annotations

from typing import Final

from culet.kernel.core.limits import DEPTH_MAX
from culet.kernel.tree import Tree

NEVER: Final = {
    "unfinished run without exactly one job": (
        "SELECT r.owner, r.id FROM run r WHERE r.status = 'running' AND (SELECT count(*)"
        " FROM job j WHERE j.kind = 'turn' AND j.owner = r.child AND j.what = r.id"
        " AND j.dead = 0) <> 1"
    ),
    "turn job of nothing that runs": (
        "SELECT j.id FROM job j WHERE j.kind = 'turn' AND NOT EXISTS (SELECT 1 FROM run r"
        " WHERE r.child = j.owner AND r.id = j.what AND r.status = 'running')"
        " AND NOT EXISTS (SELECT 1 FROM fiber f WHERE f.owner = j.owner"
        " AND f.id = j.what AND f.status = 'running')"
    ),
    "unfinished fiber without exactly one job": (
        "SELECT f.owner, f.id FROM fiber f WHERE f.status = 'running' AND (SELECT count(*)"
        " FROM job j WHERE j.kind = f.kind AND j.owner = f.owner AND j.what = f.id"
        " AND j.dead = 0) <> 1"
    ),
    "fiber job of nothing that runs": (
        "SELECT j.id FROM job j WHERE j.kind = 'fiber' AND NOT EXISTS (SELECT 1"
        " FROM fiber f WHERE f.owner = j.owner AND f.id = j.what AND f.status = 'running')"
    ),
    "job without a live owner": (
        "SELECT j.id FROM job j WHERE j.owner NOT IN"
        " (SELECT n.slot FROM node n WHERE n.state = 'live')"
    ),
    "mark without a wipe": (
        "WITH RECURSIVE c (slot) AS (SELECT j.what FROM job j WHERE j.kind = 'wipe'"
        " UNION SELECT n.slot FROM node n JOIN c ON n.parent = c.slot)"
        " SELECT n.slot FROM node n WHERE n.state = 'gone'"
        " AND n.slot NOT IN (SELECT c.slot FROM c)"
    ),
    "a live node under a gone one": (
        "SELECT n.slot FROM node n JOIN node p ON p.slot = n.parent"
        " WHERE n.state = 'live' AND p.state = 'gone'"
    ),
    "two agents of one address": (
        "SELECT n.parent, n.class, n.name FROM node n WHERE n.state = 'live'"
        " GROUP BY n.parent, n.class, n.name HAVING count(*) > 1"
    ),
    "a node without its parent": (
        "SELECT n.slot FROM node n WHERE n.parent IS NOT NULL AND NOT EXISTS"
        " (SELECT 1 FROM node p WHERE p.slot = n.parent AND p.born < n.born)"
    ),
    "a node deeper than allowed": (
        "WITH RECURSIVE d (slot, depth) AS (SELECT n.slot, 1 FROM node n"
        " WHERE n.parent IS NULL UNION ALL SELECT n.slot, d.depth + 1 FROM node n"
        f" JOIN d ON n.parent = d.slot) SELECT d.slot FROM d WHERE d.depth > {DEPTH_MAX}"
    ),
    "a run whose asker has ended": (
        "SELECT r.id FROM run r JOIN run a ON r.owner = a.child AND r.asker = a.id"
        " WHERE r.status = 'running' AND a.status <> 'running'"
    ),
    "a run whose asking fiber has ended": (
        "SELECT r.id FROM run r JOIN fiber f ON r.owner = f.owner AND r.asker = f.id"
        " WHERE r.status = 'running' AND f.status <> 'running'"
    ),
    "an account that is open without a turn, or of a turn and not open": (
        "SELECT a.slot, a.what FROM account a WHERE (a.state = 'open') <>"
        " (EXISTS (SELECT 1 FROM run r WHERE r.child = a.slot AND r.id = a.what"
        " AND r.status = 'running') OR EXISTS (SELECT 1 FROM fiber f"
        " WHERE f.owner = a.slot AND f.id = a.what AND f.status = 'running'))"
    ),
    "an account of nothing": (
        "SELECT a.slot, a.what FROM account a WHERE a.parent >= a.id OR NOT"
        " (EXISTS (SELECT 1 FROM run r WHERE r.child = a.slot AND r.id = a.what)"
        " OR EXISTS (SELECT 1 FROM fiber f WHERE f.owner = a.slot AND f.id = a.what))"
    ),
    "an account that has ended and pays for nobody": (
        "SELECT a.slot, a.what FROM account a WHERE a.state = 'ended' AND NOT EXISTS"
        " (SELECT 1 FROM account b WHERE b.parent = a.id AND b.state <> 'closed')"
    ),
    "a run of a facet that is gone": (
        "SELECT r.id FROM run r WHERE r.owner NOT IN (SELECT n.slot FROM node n"
        " WHERE n.state = 'live')"
    ),
}
for _measure in ("tokens", "cost", "calls"):
    NEVER[f"{_measure} beyond a limit"] = (
        f"SELECT a.what FROM account a WHERE a.{_measure}_spent + a.{_measure}_held >"
        f" a.{_measure}_limit OR min(a.{_measure}_spent, a.{_measure}_held) < 0"
    )
    NEVER[f"{_measure} held for nobody, or for somebody and not held"] = (
        f"SELECT a.what, a.{_measure}_held FROM account a WHERE a.{_measure}_held <>"
        f" (SELECT coalesce(sum(iif(b.{_measure}_limit IS NULL, b.{_measure}_held,"
        f" b.{_measure}_limit - b.{_measure}_spent)), 0) FROM account b"
        " WHERE b.parent = a.id)"
    )
    NEVER[f"{_measure} kept by what is closed"] = (
        f"SELECT a.what FROM account a WHERE a.state = 'closed'"
        f" AND a.{_measure}_limit <> a.{_measure}_spent + a.{_measure}_held"
    )
HOLES: Final = (
    "SELECT stream FROM main.culet_entry GROUP BY stream HAVING count(*) <> max(i) + 1"
)


def broken(tree: Tree) -> list[str]:
    """Return what does not hold, with the first rows that show it."""
    out = []
    for what, sql in NEVER.items():
        rows = tree.db.execute(sql)
        if rows:
            out.append(f"{what}: {rows[:3]}")
    files = tree.store.slots() - {"tree"}
    orphans = [slot for slot in files if tree.node_row(slot) is None]
    if orphans:
        out.append(f"files without a row: {orphans[:3]}")
    for slot in tree.store.slots():
        agent = tree.store.agent(slot)
        if slot != "tree" and agent.exists and agent.execute(HOLES):
            out.append(f"a hole in a stream of {slot}")
    for slot, node in tree.nodes.items():
        if node.state <= 1 and not tree.is_live_slot(slot):
            out.append(f"a live task of a deleted agent: {node.path_text()}")
    return out
