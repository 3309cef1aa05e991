"""An agent sees its own storage and nobody else's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from culet.kernel import Agent, open_kernel
from culet.kernel.errors import Deleted, SqlError, UsageError
from kernel.agents import agent_at, node_at, raises, settle, tree_of
from kernel.family import NOTES, Facet, Other, Top, children, get, opened

HEARD: list[Any] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    HEARD.clear()


class Careful(Facet):
    """Meets SQL errors, with and without catching them."""

    async def on_error(self, error: BaseException, *, connection: Any = None) -> None:
        HEARD.append(error)

    async def bad(self) -> None:
        self.sql("SELECT nothing FROM nowhere")

    async def bad_and_caught(self) -> str:
        try:
            self.sql("INSERT INTO kept VALUES (?", 1)
        except SqlError as error:
            return error.query
        return ""


class Writes(Facet):
    async def long(self) -> None:
        self.sql("CREATE TABLE t (v)")
        with self.transaction():
            self.sql("INSERT INTO t VALUES (1)")
            await trio.sleep(10)


PATHS: list[list[tuple[type[Agent], str]]] = [
    [], [(Facet, "one")], [(Facet, "two")], [(Other, "one")],
    [(Facet, "one"), (Facet, "one")],
]  # fmt: skip


@pytest.mark.rule("F-003", "F-390", "F-391")
async def test_tables_and_state_of_one_name_are_apart(clock: object) -> None:
    async with opened() as test:
        for number, path in enumerate(PATHS):
            await (await get(test, *path)).keep(str(number))
        for number, path in enumerate(PATHS):
            agent = agent_at(test, *[(c.__name__, n) for c, n in path])
            agent.set_state({"n": number})
            tables = agent.sql("SELECT name FROM sqlite_schema WHERE name = 'kept'")
            assert len(tables) == 1
        for number, path in enumerate(PATHS):
            agent = agent_at(test, *[(c.__name__, n) for c, n in path])
            assert agent.state == {"n": number}
            assert await agent.kept() == [str(number)]
        child = agent_at(test, ("Facet", "one"))
        child.sql("DROP TABLE kept")
        child.sql("CREATE TABLE own (v)")
        assert await agent_at(test).kept() == ["0"]
        for path in ([], [("Facet", "two")], [("Facet", "one"), ("Facet", "one")]):
            with pytest.raises(SqlError, match="own"):
                agent_at(test, *path).sql("SELECT * FROM own")


@pytest.mark.rule("F-392")
async def test_a_tree_is_one_folder_that_may_be_moved(
    clock: object, tmp_path: Path
) -> None:
    async def run(folder: Path) -> list[list[str]]:
        async with open_kernel(
            roots=[Mover], facets=[Mover], storage=f"sqlite:{folder}", threads=False
        ) as kernel:
            root = await kernel.get_agent(Mover, "a")
            found = [await root.kept(), await root.below("k"), await root.below("l")]
            await root.keep("root")
            return found

    assert await run(tmp_path / "one") == [[], ["k"], ["l"]]
    (home,) = {path.parent for path in (tmp_path / "one" / "roots").rglob("*.db")}
    assert (home / "tree.db").exists()
    assert len(list(home.glob("*.db"))) == 1 + 3
    shutil.move(tmp_path / "one", tmp_path / "two")
    assert await run(tmp_path / "two") == [["root"], ["k", "k"], ["l", "l"]]


class Mover(Facet):
    async def below(self, name: str) -> list[str]:
        kid = await self.dynamic_agents.get(Mover, name)
        await kid.keep(name)
        return await kid.kept()


@pytest.mark.rule("F-393", "F-391")
async def test_what_others_owe_is_neither_seen_nor_ended(clock: object) -> None:
    async with opened() as test:
        for path in PATHS:
            await (await get(test, *path)).remind(10, "mine")
        one = agent_at(test, ("Facet", "one"))
        (mine,) = one.schedules.list()
        for path in ([], [("Facet", "two")], [("Facet", "one"), ("Facet", "one")]):
            (theirs,) = agent_at(test, *path).schedules.list()
            assert one.schedules.get(theirs.id) is None
            assert one.schedules.list() == [mine]
            for change in ("cancel", "pause", "resume", "run_now", "replay"):
                assert getattr(one.schedules, change)(theirs.id) is False
            assert one.queue.remove(theirs.id) is False
        for table in ("job", "node", "run", "fiber", "cf_agents_schedules"):
            with pytest.raises(SqlError):
                one.sql(f"SELECT * FROM {table}")
        await test.advance(11)
        assert sorted(n for n in NOTES if "hears" in n) == sorted(
            ["a hears mine", *["one hears mine"] * 3, "two hears mine"]
        )


@pytest.mark.rule("F-394")
async def test_an_agent_cannot_change_whose_child_it_is(clock: object) -> None:
    async with opened() as test:
        kid = await get(test, (Facet, "one"), (Facet, "deep"))
        path = await kid.path()
        agent = agent_at(test, ("Facet", "one"), ("Facet", "deep"))
        for sql in (
            "UPDATE node SET parent = NULL", "DELETE FROM culet_value",
            "INSERT INTO culet_value VALUES ('parent', '1')",
            "UPDATE culet_value SET value = 'x'", "DROP TABLE culet_entry",
            "CREATE TRIGGER t AFTER INSERT ON culet_message BEGIN SELECT 1; END",
        ):  # fmt: skip
            with pytest.raises(SqlError):
                agent.sql(sql)
        agent.sql("CREATE TABLE cf_agents_parent_path (v)")
        agent.sql("INSERT INTO cf_agents_parent_path VALUES ('[]')")
        await (await children(test, ("Facet", "one"))).abort(Facet, "deep")
        kid = await get(test, (Facet, "one"), (Facet, "deep"))
        assert await kid.path() == path


@pytest.mark.rule("F-395")
async def test_no_statement_reaches_another_file(clock: object, tmp_path: Path) -> None:
    async with opened(storage=f"sqlite:{tmp_path}/d") as test:
        await (await get(test, (Facet, "two"))).keep("secret")
        await (await get(test, (Facet, "one"))).keep("mine")
        tree = next((tmp_path / "d").rglob("tree.db"))
        others = [str(p) for p in tree.parent.glob("*.db")]
        assert len(others) == 3
        agent = agent_at(test, ("Facet", "one"))
        before = {p: p.stat().st_size for p in tmp_path.rglob("*.db")}
        for other in others:
            for sql in (
                f"ATTACH '{other}' AS o", f"ATTACH 'file:{other}?mode=ro' AS o",
                f"VACUUM INTO '{other}2'", f"SELECT load_extension('{other}')",
                "PRAGMA database_list", "SELECT * FROM pragma_database_list",
                f"SELECT readfile('{other}')", f"SELECT writefile('{other}2', 'x')",
                f"CREATE VIRTUAL TABLE v USING csv(filename='{other}')",
            ):  # fmt: skip
                with pytest.raises(SqlError):
                    agent.sql(sql)
        assert {p: p.stat().st_size for p in tmp_path.rglob("*.db")} == before
        assert await (await get(test, (Facet, "two"))).kept() == ["secret"]


@pytest.mark.rule("F-396")
async def test_a_transaction_of_one_holds_up_nobody(clock: object) -> None:
    async with opened(Writes) as test:
        writer = await get(test, (Writes, "w"))
        beside = await get(test, (Facet, "beside"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raises, UsageError, writer.long)
            await settle()
            began = trio.current_time()
            for stub in (await get(test), beside):
                await stub.keep("meanwhile")
                assert await stub.kept() == ["meanwhile"]
            await tree_of(test).durable()
            assert trio.current_time() - began < 1
        agent = node_at(test, ("Writes", "w")).agent
        assert agent.sql("SELECT * FROM t") == [], "and was itself rolled back"


@pytest.mark.rule("F-397")
async def test_an_sql_error_comes_to_its_caller_with_its_query(clock: object) -> None:
    async with opened(Careful) as test:
        kid = await get(test, (Careful, "c"))
        error = await raises(SqlError, kid.bad)
        assert error.query == "SELECT nothing FROM nowhere"
        assert error.__cause__ is not None
        assert "nowhere" in str(error)
        assert await kid.bad_and_caught() == "INSERT INTO kept VALUES (?"
        assert HEARD == [], "an error of SQL is the caller's alone"


async def test_a_stub_is_the_only_way_between_agents(clock: object) -> None:
    async with opened() as test:
        kid = await get(test, (Facet, "one"))
        for name in ("sql", "state", "set_state", "schedules", "dynamic_agents"):
            with pytest.raises(UsageError):
                getattr(kid, name)
        await (await children(test)).delete(Facet, "one")
        await raises(Deleted, kid.kept)
        assert (await get(test)) is not None
        assert isinstance(agent_at(test), Top)
