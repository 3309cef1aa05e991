"""The scenarios. Each does something by ids of its own, so that it may be asked again."""

from __future__ import annotations

from typing import Any, Final

import trio

from crash.agents import PAID, Hesitant, Thinker
from crash.story import Scenario, Story

PROGRAM: Final[list[Any]] = [["emit"], ["tool"], ["sleep", 1], ["emit"]]
NESTED: Final[list[Any]] = [
    ["emit"],
    ["nest", "Worker", [["tool"], ["sleep", 2]]],
    ["emit"],
]
SHOP: Final[list[Any]] = [
    ["buy", 10, 4],
    ["crowd", 4, [["buy", 10, 6]], 10],
    ["nest", "Worker", [["buy", 8, 8], ["nest", "Worker", [["buy", 9, 1]], 4]], 12],
    ["buy", 5, 5],
    ["buy", 30, 30],
]
CROWD: Final[list[Any]] = [["crowd", 64, [["buy", 4, 3]], 4], ["buy", 5, 5]]
HELD: Final[list[Any]] = [["emit"], ["nest", "Worker", [["sleep", 1e9]]]]


async def spawn(story: Story) -> Any:
    return await (await story.boss()).kid("k")


async def call(story: Story) -> Any:
    boss = await story.boss()
    await story.note("one")
    await boss.pair("two")
    story.notes.update(() if story.dead else ("two-left", "two-right"))
    await story.note("three")
    return await boss.notes()


async def state(story: Story) -> Any:
    boss = await story.boss()
    for number in (1, 2, 3):
        story.states.append({"n": number})
        await boss.put({"n": number})
        if not story.dead:
            story.states[:] = [{"n": number}]
    return await boss.look()


async def schedule(story: Story) -> Any:
    boss = await story.boss()
    made = await boss.once(5, "ping")
    tree = story.test.tree(*story.scenario.root)
    if tree is not None and not story.dead:
        story.model.shots[made] = (tree.root_slot, "ping")
    await trio.sleep(10)
    return await boss.notes()


async def fiber(story: Story) -> Any:
    return await (await story.boss()).walk("f", 3)


async def run(story: Story) -> Any:
    return story.told("r1", await (await story.boss()).run("Worker", PROGRAM, "r1"))


async def frail(story: Story) -> Any:
    """Completed or interrupted, but never done twice."""
    boss = await story.boss()
    return story.told("r1", await boss.once_only("r1", PROGRAM)) != "error"


async def budget(story: Story) -> Any:
    return await billed(story, SHOP)


async def crowd(story: Story) -> Any:
    """Sixty-four ask at once for what is there for ten."""
    return await billed(story, CROWD)


async def billed(story: Story, program: list[Any]) -> Any:
    """Whatever was cut, those who are paid have never billed more than the budget."""
    boss = await story.boss()
    status = story.told("r1", await boss.run("Worker", program, "r1"))
    tree = story.test.tree(*story.scenario.root)
    assert tree is not None
    sql = "SELECT tokens_spent, slot FROM account WHERE parent IS NULL AND what = 'r1'"
    for spent, slot in [] if story.dead else tree.db.execute(sql):
        bill = story.model.tokens[slot]
        story.model.need(bill <= spent <= 40, f"billed {bill}, accounted {spent}")
    return status


async def nested(story: Story) -> Any:
    boss = await story.boss()
    ends: dict[str, str] = {}

    async def ask(run_id: str, program: list[Any]) -> None:
        status = await boss.run("Worker", program, run_id)
        ends[run_id] = story.told(run_id, status)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "r1", NESTED)
        nursery.start_soon(ask, "r2", PROGRAM)
        nursery.start_soon(ask, "r3", [["emit"], ["raise"]])
    return sorted(ends.items())


async def cancelled(story: Story) -> Any:
    boss = await story.boss()
    story.start(lambda: boss.run("Worker", HELD, "r1"))
    await trio.sleep(1)
    status = await boss.cancel("r1")
    if status is None:  # the one who waits for it was not there yet
        msg = "there is no run"
        raise AssertionError(msg)
    return story.told("r1", status)


async def cleared(story: Story) -> Any:
    boss = await story.boss()
    story.forget("r1")
    story.forget("r2")
    await boss.run("Worker", PROGRAM, "r1")
    story.start(lambda: boss.run("Worker", HELD, "r2"))
    await trio.sleep(1)
    await boss.clear()
    return await boss.shown()


async def deleted(story: Story) -> Any:
    boss = await story.boss()
    await boss.grandkid("k", "below")
    await boss.busy_kid("k")
    tree = story.test.tree(*story.scenario.root)
    assert tree is not None
    sql = "SELECT slot FROM node WHERE name IN ('k', 'below') AND state = 'live'"
    slots = [] if story.dead else [row[0] for row in tree.db.execute(sql)]
    await boss.drop("k")
    if not story.dead:
        story.model.deleted.update(slots)
    return await boss.has("k")


async def upgraded(story: Story) -> Any:
    """Whatever class it has, what the first one wrote and owed is there, or is done."""
    boss = await story.boss()
    first = await boss.succeed("k")
    story.model.need(
        {"before", "was Kid"} <= set(first), f"the heir began with {first}"
    )
    for _ in range(60):
        await trio.sleep(1)
        if len(await boss.heir("k")) == 4:
            break
    return [await boss.heir("k"), await boss.kids()]


async def aborted(story: Story) -> Any:
    """What an abort stops is owed, and goes on."""
    boss = await story.boss()
    ends: list[str] = []

    async def ask() -> None:
        ends.append(story.told("r1", await boss.run("Worker", NESTED, "r1")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(1)
        await boss.stop("r1")
    return ends


async def detached(story: Story) -> Any:
    boss = await story.boss()
    await boss.send("r1", PROGRAM)
    for _ in range(60):
        await trio.sleep(1)
        if "r1" in await boss.notes():
            break
    return [await boss.notes(), await boss.shown()]


async def chat(story: Story) -> Any:
    thinker = await story.test.kernel.get_agent(Thinker, "a")
    await thinker.submit("k1", "How much?")
    status = await thinker.ended("k1")
    return [status, await thinker.history(), await thinker.asked()]


async def stalled(story: Story) -> Any:
    """A turn whose attempt was given up is owed, and goes on behind what it has said."""
    hesitant = await story.test.kernel.get_agent(Hesitant, "a")
    await hesitant.submit("k1", "Count.")
    status = await hesitant.ended("k1")
    return [status, await hesitant.history()]


async def effects(story: Story) -> Any:
    """What is done outside is done once, or again under the same token, and listed."""
    boss = await story.boss()
    found: dict[str, str] = {}

    async def pay(how: str) -> None:
        found[how] = await boss.pay(how)

    async with trio.open_nursery() as nursery:
        for how in PAID:
            nursery.start_soon(pay, how)
        await trio.sleep(5)  # by now it is done, or waits for somebody who decides
        await boss.decide()
    return sorted(found.items())


async def doubt(story: Story) -> Any:
    """A call in doubt waits for somebody who decides; then its turn goes on."""
    thinker = await story.test.kernel.get_agent(Thinker, "a")
    await thinker.submit("p1", "Pay.")
    await thinker.ended("p1")
    for _ in range(60):
        if not await thinker.decide() and not await thinker.busy():
            break
        await trio.sleep(1)
    return await thinker.history()


async def begun(story: Story) -> None:
    """A run under way, a fiber, a schedule and a delete: what a crash leaves undone."""
    boss = await story.boss()
    await boss.once(4, "later")
    story.start(lambda: boss.run("Worker", NESTED, "r1"))
    story.start(lambda: boss.walk("f", 4))
    await trio.sleep(1)


async def reconciled(story: Story) -> Any:
    boss = await story.boss()
    status = story.told("r1", await boss.run("Worker", NESTED, "r1"))
    return [status, await boss.walk("f", 4)]


async def feed(story: Story) -> Any:
    """A reader of the feed is cut with each life, and goes on at its cursor."""
    boss = await story.boss()
    story.start(lambda: story.reader.read(story.test.kernel))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(boss.run, "Worker", NESTED, "r1")
        nursery.start_soon(boss.run, "Worker", PROGRAM, "r2")
    await boss.busy_kid("k")
    await trio.sleep(1)
    await boss.drop("k")
    await trio.sleep(1)
    tree = story.test.tree(*story.scenario.root)
    assert tree is not None
    await story.reader.check(story.test.kernel, tree)
    ended = {e.path for e in story.reader.got if e.kind == "finished"}
    return sorted(path for path in ended if "/Kid/" not in path)


async def evicted(story: Story) -> Any:
    boss = await story.boss()
    await boss.kid("k")
    await story.note("before")
    await story.test.evict([story.scenario.root])
    await story.note("after")
    kid = await boss.kid("k")
    return [kid, await boss.notes()]


async def drained(story: Story) -> Any:
    boss = await story.boss()
    await story.note("before")
    story.start(lambda: boss.run("Worker", NESTED, "r1"))
    await trio.sleep(1)
    await story.test.kernel.drain()
    await story.test.close()
    await story.reopen()
    boss = await story.boss()
    status = story.told("r1", await boss.run("Worker", NESTED, "r1"))
    return [status, await boss.notes()]


SCENARIOS: Final = {
    s.name: s
    for s in (
        Scenario("spawn", spawn),
        Scenario("call", call),
        Scenario("state", state),
        Scenario("schedule", schedule),
        Scenario("fiber", fiber),
        Scenario("run", run),
        Scenario("frail", frail),
        Scenario("budget", budget),
        Scenario("crowd", crowd),
        Scenario("nested", nested),
        Scenario("cancelled", cancelled, rests=False),
        Scenario("cleared", cleared, rests=False),
        Scenario("deleted", deleted),
        Scenario("upgrade", upgraded),
        Scenario("aborted", aborted),
        Scenario("detached", detached),
        Scenario("chat", chat, root=("Thinker", "a")),
        Scenario("stalled", stalled, root=("Hesitant", "a")),
        Scenario("effects", effects),
        Scenario("doubt", doubt, root=("Thinker", "a")),
        Scenario("reconcile", reconciled, before=begun),
        Scenario("migration", reconciled, before=begun, newer=True),
        Scenario("feed", feed),
        Scenario("evicted", evicted),
        Scenario("drained", drained),
    )
}
