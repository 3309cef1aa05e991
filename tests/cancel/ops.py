"""The operations that are cut: what they do, and what the rows may say afterwards."""

from __future__ import annotations

from typing import Any, Final

import trio

from cancel.cut import Op, World
from crash.agents import Kid

LIVE: Final = (
    "SELECT name FROM node WHERE parent IS NOT NULL AND state = 'live' ORDER BY name"
)
RUNS: Final = "SELECT id, status FROM run ORDER BY id"
PROGRAM: Final[list[Any]] = [["emit"], ["tool"], ["sleep", 1], ["emit"]]
HELD: Final[list[Any]] = [["emit"], ["sleep", 1e9]]


def live(there: World) -> Any:
    return [row[0] for row in there.select(LIVE)]


def runs(there: World) -> Any:
    return there.select(RUNS)


def runs_and_facets(there: World) -> Any:
    """A run that was forgotten has no facet any more, and no file."""
    files = len(there.tree.store.slots() - {"tree", there.tree.root_slot})
    return runs(there), live(there), files


def notes(there: World) -> Any:
    return there.own("SELECT id FROM note ORDER BY id")


async def lookup(there: World) -> Any:
    boss = await there.boss()
    return [await boss.find("k"), await boss.find("none")]


async def kid(there: World) -> Any:
    return await (await there.boss()).make("k")


async def family(there: World) -> Any:
    boss = await there.boss()
    await boss.kid("k")
    await boss.grandkid("k", "below")


async def held(there: World) -> None:
    await (await there.boss()).send("r2", HELD)
    await trio.sleep(1)


async def two_runs(there: World) -> None:
    await (await there.boss()).run("Worker", PROGRAM, "r1")
    await held(there)


async def woken(there: World) -> None:
    await there.wake()


def fibers(there: World) -> Any:
    jobs = "SELECT kind, what FROM job"
    return there.select("SELECT status FROM fiber") + there.select(jobs)


def open_fibers(there: World) -> Any:
    """Without those that went on after their caller was gone: their rows are kept."""
    return [row for row in fibers(there) if row != ("completed",)]


def schedules(there: World) -> Any:
    return there.select(
        "SELECT what, count(*) FROM job WHERE kind = 'call' GROUP BY what"
    )


def chat(there: World) -> Any:
    roles = there.own(
        "SELECT json_extract(body, '$.role') FROM main.culet_message ORDER BY seq"
    )
    return [roles, [row[0] for row in there.select("SELECT status FROM fiber")]]


def awake(there: World) -> Any:
    """Who there is, and who of them is in memory."""
    return live(there), sorted(node.name for node in there.tree.nodes.values())


async def halted(there: World) -> Any:
    await (await there.boss()).halt("k")
    return True


async def cleared(there: World) -> Any:
    return await (await there.boss()).clear() >= 0


async def outside(there: World) -> Any:
    boss = await there.boss()
    kid = await there.test.kernel.get_sub_agent(boss, Kid, "k")
    await kid.note("made", "x")
    return await kid.notes()


OPS: Final = {
    op.name: op
    for op in (
        Op(
            "get_agent", lambda w: opened(w), rows=notes, before=[], done=[], same="a",
        ),
        Op(
            "get", kid, rows=live, before=[], done=["k"], same="k",
        ),
        Op(
            "get, slow to start", lambda w: method(w, "make_slow", "k"), rows=live,
            before=[], done=["k"], same="k",
        ),
        Op(
            "get_sub_agent", outside, rows=live, before=[], done=["k"], same=["made"],
        ),
        Op(
            "lookup", lookup, prepare=kid, rows=live, before=["k"], done=["k"],
            same=[True, False],
        ),
        Op(
            "call", lambda w: method(w, "twice", "a"), rows=notes, before=[],
            done=["a-1", "a-2", "a-3"], between=(["a-1"],), same="a",
        ),
        Op(
            "call below", lambda w: method(w, "through", "k", "a"), rows=live, before=[],
            done=["k"], same="a",
        ),
        Op(
            "durable", lambda w: method(w, "safe", "a"), rows=notes, before=[],
            done=["a"], same="a",
        ),
        Op(
            "run_agent_tool", lambda w: method(w, "run", "Worker", PROGRAM, "r1"),
            rows=runs, before=[], done=[("r1", "completed")], same="completed",
        ),
        Op(
            "runs.cancel", lambda w: method(w, "cancel", "r2"), prepare=held, rows=runs,
            before=[("r2", "running")], done=[("r2", "aborted")], same="aborted",
        ),
        Op(
            "schedule", lambda w: scheduled(w), rows=schedules, before=[],
            done=[("fire", 1)], same=True,
        ),
        Op(
            "run_fiber", lambda w: method(w, "fiber", 2), prepare=woken, rows=open_fibers,
            before=[], done=[],
        ),
        Op(
            "fibers.start", lambda w: method(w, "walk", "f", 2), prepare=woken,
            rows=fibers, before=[], done=[("completed",)], same="completed",
        ),
        Op(
            "abort", lambda w: halted(w), prepare=family, rows=awake,
            before=(["below", "k"], ["a", "below", "k"]), done=(["below", "k"], ["a"]),
            same=True,
        ),
        Op(
            "delete", lambda w: method(w, "drop", "k"), prepare=family,
            rows=runs_and_facets, before=([], ["below", "k"], 2), done=([], [], 0),
        ),
        Op(
            "runs.clear", lambda w: cleared(w), prepare=two_runs, rows=runs_and_facets,
            before=([("r1", "completed"), ("r2", "running")], ["r1", "r2"], 2),
            between=(([("r2", "running")], ["r2"], 1),), done=([], [], 0), same=True,
        ),
        Op(
            "save_messages", lambda w: say(w), root=("CutThinker", "a"), rows=chat, joins=False,
            before=[[], []], done=[["user", "assistant"], ["completed"]],
            twice=[["user", "assistant", "user", "assistant"], ["completed"] * 2],
            same="completed",
        ),
    )
}  # fmt: skip


async def opened(there: World) -> Any:
    await there.boss()
    return there.root[1]


async def method(there: World, name: str, *args: Any) -> Any:
    return await getattr(await there.boss(), name)(*args)


async def scheduled(there: World) -> Any:
    return bool(await (await there.boss()).once(1e6, "later"))


async def say(there: World) -> Any:
    thinker = await there.thinker()
    count = len(await thinker.history())
    return await thinker.say(f"hi {count}")
