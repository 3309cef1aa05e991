"""A kernel opens on any row that the schema lets in, and the other rows go on.

Between two lives some values of `job`, `run`, `fiber` and `node` rows become anything:
other texts, broken JSON, huge numbers, names of classes and methods that never were.
One agent, its schedule and its finished run are spared: they must work as before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Final

import trio
import trio.testing

from culet.kernel import Agent, Chunk, Schedule, Turn
from culet.kernel.core.limits import DEFAULT
from culet.kernel.errors import StorageError
from culet.kernel.ports import SqlValue, Store, TreeKey, TreeStore
from culet.kernel.testing import open_test_kernel
from culet.storage import open_memory
from fuzz.case import Case
from machines.sometimes import Sometimes

SOMETIMES: Final = Sometimes(
    "changed", "refused by the schema", "job", "run", "fiber", "node"
)
COLUMNS: Final = {
    "job": ("what", "payload", "every", "at", "due_at", "lane", "key", "retry", "attempts",
            "begun", "held", "paused", "dead", "error", "snapshot", "created_at", "kind",
            "tries"),
    "run": ("class", "asker", "tool_call_id", "display_order", "display", "preview",
            "input_digest", "detached", "error", "output", "summary", "usage", "reason",
            "started_at", "child"),
    "fiber": ("kind", "name", "key", "asker", "metadata", "error", "result", "started_at"),
    "node": ("class", "name", "created_at", "upgraded_from"),
}  # fmt: skip
SPARED: Final = {
    "job": "owner NOT IN (SELECT slot FROM node WHERE name = 'spared' OR parent IS NULL)",
    "run": "id <> 'spared'",
    "fiber": "1",
    "node": "parent IS NOT NULL AND name <> 'spared'",
}
ROOT: Final = ("Top", "a")


class Facet(Agent):
    """Owes itself calls, runs fibers, takes turns."""

    resumable = True
    fired: ClassVar[list[str]] = []

    async def owe(self, seconds: float) -> None:
        await self.schedule(seconds, "fire", {"n": 1})
        await self.schedule_every(seconds + 5, "fire")
        await self.schedule("*/7 * * * *", "fire", tz="Europe/Zurich")
        self.queue.put("fire")

    async def fire(self, payload: Any, schedule: Schedule) -> None:
        self.fired.append(self.name)

    async def wait(self) -> None:
        async def fn() -> None:
            self.stash(1)
            await trio.sleep(500)

        await self.fibers.start("waits", fn)

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        yield {"type": "text-delta", "id": "t", "delta": "x"}
        await trio.sleep(turn.input)


class Top(Agent):
    """The root."""

    async def make(self, name: str) -> None:
        facet = await self.dynamic_agents.get(Facet, name)
        await facet.owe(60)
        await facet.wait()

    async def begin(self, run_id: str, seconds: float) -> None:
        await self.run_agent_tool(
            Facet, seconds, run_id=run_id, detached=seconds > 1, display={"name": "n"}
        )

    async def status(self, run_id: str) -> str | None:
        run = self.runs.get(run_id)
        return None if run is None else run.status

    async def again(self) -> int:
        facet = await self.dynamic_agents.get(Facet, "spared")
        await facet.owe(1)
        return len(self.dynamic_agents.list())


def play(case: Case) -> None:
    """Live, die, change rows, live again."""
    logging.disable(logging.CRITICAL)
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(_lives, case, clock=clock)


async def _lives(case: Case) -> None:
    Facet.fired = []
    store = open_memory("", limits=DEFAULT)
    with trio.fail_after(100_000):  # of virtual time: nothing waits for good
        async with open_test_kernel(
            roots=[Top], facets=[Facet], storage=store, abort_grace_s=1
        ) as test:
            root = await test.kernel.get_agent(Top, "a")
            for name in ("spared", "other", "third"):
                await root.make(name)
            await root.begin("spared", 0)
            await root.begin("cut", 700)
            await test.advance(1)
            await test.crash()
            _change(case, store)
            Facet.fired.clear()
            await test.reopen()
            root = await test.kernel.get_agent(Top, "a")
            assert await root.status("spared") == "completed"
            await test.advance(400)
            assert "spared" in Facet.fired, "the schedule of an unharmed agent is lost"
            before = Facet.fired.count("spared")
            assert await root.again() >= 1
            await test.advance(30)
            assert Facet.fired.count("spared") > before, "nothing new can be owed"
            await _stop(test.tree(*ROOT))


async def _stop(tree: Any) -> None:
    """An agent that cannot be deleted would be for good."""
    for slot, _class, name, _born in tree.children(tree.root_slot, None, 100, None):
        if name != "spared":
            await tree.delete(slot)


def _change(case: Case, store: Store) -> None:
    store.open()
    tree = store.open_tree(TreeKey(*ROOT), level="process", create=False)
    for _ in range(case.rng.randrange(1, 6)):
        table = case.rng.choice(list(COLUMNS))
        column = case.rng.choice(COLUMNS[table])
        sql = (
            f"UPDATE {table} SET {column} = ?1 WHERE rowid IN (SELECT rowid FROM {table}"
            f" WHERE {SPARED[table]} ORDER BY rowid LIMIT 1 OFFSET ?2)"
        )
        try:
            tree.tree.execute(sql, (_value(case), case.rng.randrange(9)))
        except StorageError:
            case.mark("refused by the schema")
        else:
            case.mark("changed")
            case.mark(table)
    _make_durable(tree)
    tree.close()
    store.close()


def _make_durable(tree: TreeStore) -> None:
    record = tree.begin()
    while not tree.fill(record, 1 << 62):
        pass
    tree.write(record)
    tree.done(record)


def _value(case: Case) -> SqlValue:
    match case.rng.randrange(6):
        case 0:
            return None
        case 1:
            return case.one(0, -1, 1, 2**31, 2**53, 2**63 - 1, -(2**63))
        case 2:
            return case.one(
                "", "{", "[]", "{}", "null", '"x"', "1e999", "[[[[", '{"type":1}'
            )
        case 3:
            return case.one('{"type":"interval","seconds":1e300}', '{"type":"cron","expr":"x"}',
                            '{"max_attempts":-1}', '{"type":"interval","seconds":0}')  # fmt: skip
        case 4:
            return case.one(
                "Facet", "Top", "__init__", "fire", "destroy", "spared", "cut"
            )
    return case.name().encode("utf-8", "replace").decode()
