"""How deep a tree may be, what agents may be called, and who is not mixed up with whom."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from culet.kernel import Agent, Limits, Response, open_kernel
from culet.kernel.core.limits import DEPTH_MAX
from culet.kernel.core.path import build_agent_path, parse_agent_path
from culet.kernel.errors import UsageError
from culet.kernel.ports import TreeKey
from culet.kernel.testing import ScriptedChild, open_test_kernel
from kernel.agents import agent_at, node_at, raises, settle, tree_of
from kernel.family import NOTES, Facet, Top, children, count, files, get, opened
from kernel.peers import come, connect

ODD = [
    "sub", "a/b", "/", "a b", " ", "100%", "%2F", "a:b", "ü?#", "🜁", "..x", "Facet/k",
    "\n", "\\", "'; --", "tree.db", "x" * 256, "🜁" * 256,
]  # fmt: skip


class Same(Facet):
    """A class that is a root, a facet, and a facet of itself."""


def same() -> Any:
    NOTES.clear()
    return open_test_kernel(roots=[Same, Top], facets=[Same, Facet])


# ---- depth


@pytest.mark.rule("F-379", "F-380")
async def test_a_fifth_level_is_refused_before_anything_is_made(clock: object) -> None:
    async with opened() as test:
        deep = [(Facet, "1"), (Facet, "2"), (Facet, "3")]
        assert await (await get(test, *deep)).ping(1) == 2
        kids = await children(test, *[(c.__name__, n) for c, n in deep])
        before = (count(test, "node"), tree_of(test).store.commits)
        error = await raises(UsageError, kids.get, Facet, "4")
        assert "is 4 deep already" in str(error)
        names = [("Facet", str(n)) for n in range(1, 5)]
        answer = await come(test, ("Top", "a"), *names)
        assert isinstance(answer, Response)
        assert answer.status == 400
        assert (count(test, "node"), tree_of(test).store.commits) == before
        absent = await come(test, ("Top", "nobody"), *names)
        assert isinstance(absent, Response)
        assert absent.status == 400
        assert TreeKey("Top", "nobody") not in test.kernel.trees


@pytest.mark.limit("depth")
@pytest.mark.rule("F-380")
async def test_a_kernel_may_allow_less_depth(clock: object) -> None:
    async with opened(ScriptedChild, limits=Limits(depth=2)) as test:
        await get(test, (Facet, "1"))
        await raises(UsageError, get, test, (Facet, "1"), (Facet, "2"))
        agent = agent_at(test, ("Facet", "1"))
        run = await agent.run_agent_tool(ScriptedChild, [["say", "x"]], run_id="r")
        assert (run.status, run.reason) == ("error", "depth")
        answer = await come(test, ("Top", "a"), ("Facet", "1"), ("Facet", "2"))
        assert isinstance(answer, Response)
        assert answer.status == 400
        assert count(test, "node") == 2
    with pytest.raises(ValueError, match=f"at most {DEPTH_MAX}"):
        Limits(depth=DEPTH_MAX + 1)


@pytest.mark.rule("F-381")
async def test_depth_is_that_of_the_rows_and_of_nothing_an_agent_says(
    clock: object,
) -> None:
    async with opened() as test:
        await get(test, (Facet, "1"), (Facet, "2"), (Facet, "3"))
        agent = agent_at(test, ("Facet", "1"), ("Facet", "2"), ("Facet", "3"))
        for forged in ("_node", "parent_path", "self_path", "dynamic_agents"):
            with pytest.raises(UsageError):
                setattr(agent, forged, [])
        agent.self_path.clear()  # a copy
        await raises(UsageError, agent.dynamic_agents.get, Facet, "4")
        await test.evict([("Top", "a"), ("Facet", "1")])
        await tree_of(test).durable()
        await test.crash()
        await test.reopen()
        await get(test, (Facet, "1"), (Facet, "2"), (Facet, "3"))
        agent = agent_at(test, ("Facet", "1"), ("Facet", "2"), ("Facet", "3"))
        await raises(UsageError, agent.dynamic_agents.get, Facet, "4")


# ---- names


@pytest.mark.rule("F-382", "F-383", "F-389")
@pytest.mark.parametrize("name", ODD)
async def test_a_facet_may_be_called_almost_anything(name: str, clock: object) -> None:
    async with opened() as test:
        kid = await get(test, (Facet, name))
        await kid.keep(name)
        await kid.remind(1, "x")
        assert await kid.path() == [["Top", "a"], ["Facet", name]]
        url = build_agent_path([("Top", "a"), ("Facet", name)])
        parsed = parse_agent_path(url, ["Top", "Facet"])
        assert parsed is not None
        assert parsed.hops == (("Facet", name),)
        found = await come(test, ("Top", "a"), *parsed.hops)
        assert not isinstance(found, Response)
        await test.advance(2)
        assert f"{name} hears x" in NOTES
        await (await children(test)).abort(Facet, name)
        assert await (await get(test, (Facet, name))).kept() == [name]


@pytest.mark.rule("F-012", "F-382", "F-389")
@pytest.mark.parametrize(
    ("name", "why"),
    [("", "empty"), ("a\0b", "NUL"), ("x" * 257, "256 characters, not 257")],
)
async def test_what_no_agent_may_be_called(name: str, why: str, clock: object) -> None:
    async with opened() as test:
        kids = await children(test)
        before = tree_of(test).store.commits
        error = await raises(UsageError, kids.get, Facet, name)
        assert why in str(error)
        answer = await come(test, ("Top", "a"), ("Facet", name))
        assert isinstance(answer, Response)
        assert answer.status == 400
        assert tree_of(test).store.commits == before


@pytest.mark.rule("F-383")
async def test_a_root_called_sub_is_refused_and_makes_nothing(clock: object) -> None:
    """The reference can parse it and not build it. Ours refuses it on every way."""
    async with opened() as test:
        await raises(UsageError, test.kernel.get_agent, Top, "sub")
        with pytest.raises(UsageError):
            build_agent_path([("Top", "sub")])
        with pytest.raises(UsageError):
            parse_agent_path("/agents/top/sub/sub/facet/k", ["Top", "Facet"])
        assert test.kernel.trees == {}


@pytest.mark.rule("F-388")
async def test_names_that_look_alike_are_two_agents(
    clock: object, tmp_path: Any
) -> None:
    names = [
        "k",
        "K",
        "café",
        unicodedata.normalize("NFD", "café"),
        "ﬁ",
        "fi",
        "ß",
        "SS",
    ]
    async with open_test_kernel(
        roots=[Top], facets=[Facet], storage=f"sqlite:{tmp_path}/d"
    ) as test:
        for name in names:
            await (await get(test, (Facet, name))).keep(name)
        for name in names:
            assert await (await get(test, (Facet, name))).kept() == [name]
        made = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert len({name.lower() for name in made}) == len(made)
        assert not any(name in file for file in made for name in names[2:])
        assert all(file.isascii() and len(file) < 64 for file in made)


# ---- classes


@pytest.mark.rule("F-384")
async def test_a_root_and_a_facet_of_one_class_and_name_are_two(clock: object) -> None:
    async with same() as test:
        root = await test.kernel.get_agent(Same, "x")
        await root.keep("root")
        kid = await get(test, (Same, "x"))
        await kid.keep("facet")
        assert (await root.kept(), await kid.kept()) == (["root"], ["facet"])
        assert (await root.path(), await kid.path()) == (
            [["Same", "x"]], [["Top", "a"], ["Same", "x"]],
        )  # fmt: skip
        await (await children(test)).delete(Same, "x")
        assert await root.kept() == ["root"]


@pytest.mark.rule("F-385", "F-386")
async def test_a_facet_may_have_the_class_and_name_of_its_parent(clock: object) -> None:
    async with same() as test:
        await test.kernel.get_agent(Same, "x")
        path = [("Same", "x")]
        texts = []
        for depth in range(DEPTH_MAX):
            node = test.find(path)
            assert node is not None
            texts.append(f"at {depth}")
            await node.agent.keep(texts[-1])
            if depth < DEPTH_MAX - 1:
                await node.agent.dynamic_agents.get(Same, "x")
                path.append(("Same", "x"))
        url = build_agent_path(path, leaf_path="/leaf")
        parsed = parse_agent_path(url, ["Same"])
        assert parsed is not None
        assert (parsed.steps, parsed.leaf_path) == (tuple(path), "/leaf")
        for depth in range(DEPTH_MAX):
            peer = await connect(test, *path[: depth + 1], label=str(depth))
            node = test.find(path[: depth + 1])
            assert node is not None
            assert [c.id for c in node.agent.sockets.list()] == [str(depth)]
            assert await node.agent.kept() == [f"at {depth}"]
            assert peer.closed is None
        middle = test.find(path[:2])
        assert middle is not None
        await middle.agent.dynamic_agents.delete(Same, "x")
        await settle()
        assert test.find(path[:2]) is middle
        assert test.find(path[:3]) is None


@pytest.mark.rule("F-387")
async def test_two_classes_of_one_name_or_segment_are_refused() -> None:
    twin = type("Facet", (Agent,), {})
    alike = type("FACET", (Agent,), {})
    for facets in ([Facet, twin], [Facet, alike]):
        with pytest.raises(UsageError, match=r"Facet|FACET"):
            async with open_kernel(roots=[Top], facets=facets):
                pass
    with pytest.raises(UsageError, match="named Facet"):
        async with open_kernel(roots=[twin], facets=[Facet]):
            pass


async def test_the_same_class_may_stand_in_both_lists(clock: object) -> None:
    async with same() as test:
        await get(test, (Same, "k"), (Facet, "b"))
        assert node_at(test, ("Same", "k"), ("Facet", "b")).slot not in files(test)
