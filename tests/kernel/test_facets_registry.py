"""`has` and `list` read what a parent has made, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from culet.kernel import ChildRef, Request, Response
from culet.kernel.errors import UsageError
from culet.kernel.testing import open_test_kernel
from kernel.agents import agent_at, settle, tree_of
from kernel.family import NOTES, Facet, Other, Top, children, count, get, opened
from kernel.peers import come


def entries(kids: Any, cls: Any = None) -> list[tuple[str, str]]:
    return [(c.class_name, c.name) for c in kids.list(cls)]


@pytest.mark.rule("F-031", "F-032")
async def test_has_and_list_tell_what_was_made_and_not_deleted(clock: object) -> None:
    async with opened() as test:
        kids = await children(test)
        for there in (False, True, False, True):
            for cls in (Facet, "Facet"):
                assert kids.has(cls, "k") is there
                assert entries(kids, cls) == [("Facet", "k")] * there
            await (kids.delete(Facet, "k") if there else kids.get(Facet, "k"))
            await settle()
        assert not kids.has(Facet, "k")


@pytest.mark.rule("F-033", "F-034", "F-035")
async def test_entries_have_class_name_and_birth_in_the_order_of_birth(
    clock: object,
) -> None:
    async with opened() as test:
        kids = await children(test)
        now = test.clock.now_ms()
        await kids.get(Other, "z")
        await kids.get(Facet, "b")
        await kids.get(Other, "a")  # in the same millisecond
        await test.advance(2)
        await kids.get(Facet, "late")
        await kids.abort(Facet, "b")
        await test.evict([("Top", "a"), ("Other", "a")])
        for cls, name in ((Other, "z"), (Facet, "b"), (Other, "a")):
            await kids.get(cls, name)  # alive, aborted, asleep: it was born once
        assert kids.list() == [
            ("Other", "z", now), ("Facet", "b", now), ("Other", "a", now),
            ("Facet", "late", now + 2000),
        ]  # fmt: skip
        assert kids.list()[0].created_at == now
        assert entries(kids, Other) == [("Other", "z"), ("Other", "a")]
        await kids.delete(Other, "z")
        await kids.get(Other, "z")
        assert kids.list("Other") == [("Other", "a", now), ("Other", "z", now + 2000)]
        assert entries(kids) == [
            ("Facet", "b"), ("Other", "a"), ("Facet", "late"), ("Other", "z"),
        ]  # fmt: skip


async def test_a_list_may_be_read_in_pages(clock: object) -> None:
    async with opened() as test:
        kids = await children(test)
        for n in range(7):
            await kids.get(Facet if n % 2 else Other, str(n))
        seen: list[Any] = []
        while page := kids.list(limit=3, after=seen[-1][:2] if seen else None):
            seen += page
        assert seen == kids.list()
        assert len(seen) == 7


@pytest.mark.rule("F-036")
async def test_asking_starts_and_writes_nothing(clock: object) -> None:
    async with opened() as test:
        kids = await children(test)
        commits = tree_of(test).store.commits
        assert not kids.has(Facet, "k")
        assert kids.list() == kids.list(Facet) == kids.list("Never") == []
        assert tree_of(test).store.commits == commits
        await kids.get(Facet, "k")
        await test.evict([("Top", "a"), ("Facet", "k")])
        NOTES.clear()
        assert kids.has(Facet, "k")
        assert len(kids.list()) == 1
        await settle()
        assert NOTES == [], "it still sleeps"


@pytest.mark.rule("F-037")
async def test_only_ones_own_children_are_listed(clock: object) -> None:
    async with opened() as test:
        await get(test, (Facet, "k"), (Facet, "deep"))
        assert entries(await children(test)) == [("Facet", "k")]
        assert not (await children(test)).has(Facet, "deep")
        below = await children(test, ("Facet", "k"))
        assert entries(below) == [("Facet", "deep")]
        assert not below.has(Facet, "k")


@pytest.mark.rule("F-039", "F-045")
async def test_an_abort_changes_no_entry(clock: object) -> None:
    async with opened() as test:
        kids = await children(test)
        await get(test, (Facet, "k"), (Other, "deep"))
        before = kids.list()
        await kids.abort(Facet, "k")
        assert kids.list() == before
        await get(test, (Facet, "k"))
        assert entries(await children(test, ("Facet", "k"))) == [("Other", "deep")]


class Guarded(Facet):
    async def on_before_sub_agent(
        self, request: Request, child: ChildRef
    ) -> Request | Response | None:
        return Response("no", 403)


@pytest.mark.rule("F-040", "F-46")
async def test_whom_the_gate_refuses_is_not_made(clock: object) -> None:
    async with opened(Guarded) as test:
        await get(test, (Guarded, "g"))
        answer = await come(test, ("Top", "a"), ("Guarded", "g"), ("Facet", "k"))
        assert isinstance(answer, Response)
        assert answer.status == 403
        assert not (await children(test, ("Guarded", "g"))).has(Facet, "k")
        assert count(test, "node") == 2
        assert "start k" not in NOTES


@pytest.mark.rule("F-071")
async def test_facets_whose_class_is_gone_can_be_seen_and_deleted(
    clock: object,
) -> None:
    async with opened(Old) as test:
        kid = await get(test, (Facet, "k"), (Old, "o"))
        await kid.keep("x")
        await kid.remind(5, "x")
        await tree_of(test).durable()
        await test.crash()
        test._facets.remove(Old)
        await test.reopen()
        await get(test, (Facet, "k"))
        kids = await children(test, ("Facet", "k"))
        assert entries(kids) == entries(kids, "Old") == [("Old", "o")]
        assert kids.has("Old", "o")
        with pytest.raises(UsageError, match="not registered"):
            await kids.get(Old, "o")
        assert len(tree_of(test).store.slots()) == 1
        await kids.delete("Old", "o")
        await test.advance(1)
        assert kids.list() == []
        assert tree_of(test).store.slots() == set(), "its file is wiped"
        assert (count(test, "node"), count(test, "job")) == (2, 0)


class Old(Facet):
    """A class that a later version does not have."""


async def test_a_class_is_itself_and_not_only_its_name(clock: object) -> None:
    twin = type("Facet", (Facet,), {})
    async with opened() as test:
        await get(test, (Facet, "k"))
        kids = agent_at(test).dynamic_agents
        with pytest.raises(UsageError, match="registered as 'Facet'"):
            kids.has(twin, "k")
        with pytest.raises(UsageError, match="registered as 'Facet'"):
            await kids.delete(twin, "k")
        assert kids.has(Facet, "k")


@pytest.mark.rule("F-038")
async def test_entries_of_a_former_life_are_read_as_they_are(
    clock: object, tmp_path: Any
) -> None:
    """The reference adds columns to old registries in place. Ours is one table with
    numbered steps; a kernel that is opened on what another one left lists the same."""
    storage = f"sqlite:{tmp_path}/data"
    lists = []
    for _ in range(2):
        async with open_test_kernel(
            roots=[Top], facets=[Facet, Other], storage=storage
        ) as test:
            kids = await children(test)
            for n in range(3):
                await kids.get(Facet if n else Other, str(n))
            lists.append(kids.list())
            await test.advance(5)
    assert lists[0] == lists[1]
    assert [c.name for c in lists[0]] == ["0", "1", "2"]
