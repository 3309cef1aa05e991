"""Calls copy, and classes are looked at when the kernel opens."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypedDict

import msgspec
import pytest
import trio

from culet.kernel import Agent, AsyncCallback, Stub, current_agent, rpc
from culet.kernel.errors import SqlError, StorageError, UsageError
from culet.kernel.testing import ScriptedChild, open_test_kernel
from kernel.agents import agent_at, raises


class Point(msgspec.Struct):
    x: int
    tags: list[str] = []


@dataclasses.dataclass
class Pair:
    a: int
    b: str


class Options(TypedDict):
    deep: bool


class Kid(Agent):
    async def take(self, point: Point) -> Point:
        point.tags.append("seen")
        return point

    async def pair(self, pair: Pair, options: Options) -> Pair:
        return dataclasses.replace(pair, b=str(options["deep"]))

    async def plain(self, value: Any) -> Any:
        if isinstance(value, dict):
            value["changed"] = True
        return value

    async def bare(self, value, more=1):  # type: ignore[no-untyped-def]
        return [value, more]

    async def wrong_result(self) -> int:
        return "text"  # type: ignore[return-value]

    async def keyword(self, a: int, *, b: int = 2) -> int:
        return a * 10 + b

    async def when(self, at: datetime) -> datetime:
        return at

    async def call_back(self, fn: AsyncCallback, to: Stub[Any]) -> Any:
        return [await fn("x"), await to.ping(1)]

    async def who(self) -> list[str]:
        here = current_agent()
        assert here is not None
        return [here.agent.name, self.name]

    def sync_method(self) -> int:
        return 1

    async def _private(self) -> int:
        return 1


class Top(Agent):
    async def ping(self, n: int) -> int:
        return n + 1

    async def kid(self) -> None:
        await self.dynamic_agents.get(Kid, "k")


async def kid_of(test: Any) -> Any:
    root = await test.kernel.get_agent(Top, "a")
    await root.kid()
    return await agent_at(test).dynamic_agents.get(Kid, "k")


def opened() -> Any:
    return open_test_kernel(roots=[Top], facets=[Kid])


@pytest.mark.rule("F-481", "F-024")
async def test_arguments_and_results_are_copies(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        mine = Point(1)
        theirs = await kid.take(mine)
        assert theirs == Point(1, ["seen"])
        assert mine == Point(1, [])
        assert await kid.pair(Pair(1, "x"), {"deep": True}) == Pair(1, "True")
        value: dict[str, Any] = {"a": [1, {"b": None}]}
        assert await kid.plain(value) == {**value, "changed": True}
        assert "changed" not in value
        at = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
        assert await kid.when(at) == at
        assert await kid.bare(1) == [1, 1]
        assert await kid.bare([1, 2], more="x") == [[1, 2], "x"]
        assert await kid.keyword(1, b=3) == 13
        assert await kid.keyword(a=1) == 12


@pytest.mark.rule("F-27", "F-024")
@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("take", ["text"], {}), ("take", [], {}), ("take", [Point(1), 2], {}),
        ("plain", [object()], {}), ("keyword", [1, 2], {}), ("keyword", [1], {"c": 1}),
        ("keyword", [2**70], {}), ("keyword", [1], {"a": 1}), ("wrong_result", [], {}),
    ],
)  # fmt: skip
async def test_what_does_not_fit_is_refused_by_name(
    method: str, args: list[Any], kwargs: dict[str, Any], clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        with pytest.raises(UsageError, match=f"Kid.{method}"):
            await getattr(kid, method)(*args, **kwargs)


@pytest.mark.rule("F-025")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("_private", "belongs to the agent itself"), ("sql", "belongs to"),
        ("on_start", "belongs to"), ("sync_method", "make it async"),
        ("nothing", "does not exist"), ("destroy", "belongs to"),
    ],
)  # fmt: skip
async def test_a_stub_has_the_public_async_methods_only(
    name: str, why: str, clock: object
) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        with pytest.raises(UsageError, match=why):
            getattr(kid, name)
        with pytest.raises(UsageError):
            kid.name = "other"


@pytest.mark.rule("F-023")
async def test_stubs_and_callables_cross_by_reference(clock: object) -> None:
    async with opened() as test:
        kid = await kid_of(test)
        root = await test.kernel.get_agent(Top, "a")

        async def fn(text: str) -> str:
            return text + "!"

        assert await kid.call_back(fn, root) == ["x!", 2]


async def test_the_callee_is_the_current_agent(clock: object) -> None:
    async with opened() as test:
        assert await (await kid_of(test)).who() == ["k", "k"]
        assert current_agent() is None


# ---- classes


async def refused(*classes: type[Agent], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        async with open_test_kernel(roots=list(classes)):
            pytest.fail("it opened")


async def test_annotations_that_cannot_be_decoded_refuse_the_class() -> None:
    class Unknown(Agent):
        async def f(self, x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    class Lock(Agent):
        async def f(self, lock: dict[Point, int] | set[int] | list[str]) -> None: ...

    class Variadic(Agent):
        async def f(self, *args: int) -> None: ...

    await refused(Unknown, match=r"Unknown\.f")
    await refused(Lock, match=r"Lock\.f: 'lock'")
    await refused(Variadic, match=r"\*args")


@pytest.mark.parametrize(
    "name", ["name", "sql", "state", "runs", "schedule", "spawn", "_node", "_begin"]
)
async def test_a_class_that_hides_a_member_is_refused(name: str) -> None:
    hides = type("Hides", (Agent,), {name: lambda self: None})
    await refused(hides, match=f"Hides.{name} hides")


async def test_an_instance_that_hides_a_member_is_refused(clock: object) -> None:
    class Hides(Agent):
        async def on_start(self) -> None:
            self.state = 1  # type: ignore[misc]

    async with open_test_kernel(roots=[Hides]) as test:
        await raises(Exception, test.kernel.get_agent, Hides, "a")


@pytest.mark.rule("F-387")
async def test_classes_must_be_agents_with_names_of_their_own() -> None:
    other = type("Top", (Agent,), {})
    await refused(int, match="Agent class")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="two different"):
        async with open_test_kernel(roots=[Top], facets=[other]):
            pytest.fail("it opened")
    await refused(type("Sub", (Agent,), {}), match="sub")
    with pytest.raises(UsageError, match="root"):
        async with open_test_kernel(roots=[]):
            pytest.fail("it opened")


@pytest.mark.rule("F-424")
def test_rpc_wants_an_async_method() -> None:
    with pytest.raises(UsageError, match="async"):

        @rpc
        def sync(self: Any) -> None: ...


# ---- an agent's own SQL


class Db(Agent):
    async def on_start(self) -> None:
        self.sql("create table if not exists t (id integer primary key, v text)")

    async def do(self, fn: Callable[[Any], Awaitable[Any]]) -> Any:
        return await fn(self)

    async def due(self, payload: Any, schedule: Any) -> None: ...

    async def count(self) -> int:
        return int(self.sql("select count(*) as n from t")[0].n)


async def db_of(test: Any) -> Any:
    return await test.kernel.get_agent(Db, "a")


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_rows_and_transactions(kind: str, tmp_path: Any, clock: object) -> None:
    storage = "memory:" if kind == "memory" else f"sqlite:{tmp_path}"
    async with open_test_kernel(roots=[Db], storage=storage) as test:
        db = await db_of(test)
        me = test.find([("Db", "a")]).agent  # type: ignore[union-attr]
        me.sql("insert into t (v) values (?)", "x")
        (row,) = me.sql("select id, v from t")
        assert (row[0], row.v, row["v"], tuple(row), row.keys()) == (
            1, "x", "x", (1, "x"), ["id", "v"],
        )  # fmt: skip
        with pytest.raises(AttributeError):
            row.v = 2
        with pytest.raises(AttributeError):
            _ = row.nothing
        with me.transaction():
            me.sql("insert into t (v) values ('a')")
            me.sql("insert into t (v) values ('b')")
        with pytest.raises(ZeroDivisionError), me.transaction():
            me.sql("insert into t (v) values ('c')")
            raise ZeroDivisionError
        assert await db.count() == 3


@pytest.mark.rule("F-396")
async def test_a_transaction_over_an_await_is_rolled_back(clock: object) -> None:
    async with open_test_kernel(roots=[Db]) as test:
        db = await db_of(test)
        me = test.find([("Db", "a")]).agent  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="await"), me.transaction():
            me.sql("insert into t (v) values ('a')")
            await trio.sleep(0)
        assert await db.count() == 0

        async def other() -> None:
            me.sql("insert into t (v) values ('other')")

        async with trio.open_nursery() as nursery:
            with pytest.raises((UsageError, SqlError)), me.transaction():
                me.sql("insert into t (v) values ('a')")
                nursery.start_soon(other)
                await trio.sleep(0)
                await trio.sleep(0)
        values = [r.v for r in me.sql("select v from t")]
        assert values == ["other"], "a statement of another task does not join it"


@pytest.mark.rule("F-397")
@pytest.mark.parametrize(
    "sql",
    [
        "begin", "commit", "savepoint x", "attach ':memory:' as m", "pragma user_version",
        "create temp table x (a)", "insert into culet_value values ('state', '1')",
        "select load_extension('x')", "nonsense", "select 1; select 2",
        "with recursive c(n) as (select 1 union all select n + 1 from c) select n from c",
    ],
)  # fmt: skip
async def test_refused_sql_is_named(sql: str, clock: object) -> None:
    async with open_test_kernel(roots=[Db]) as test:
        db = await db_of(test)
        me = test.find([("Db", "a")]).agent  # type: ignore[union-attr]
        with pytest.raises(SqlError):
            me.sql(sql)
        assert await db.count() == 0


@pytest.mark.rule("I-23", "F-391")
async def test_one_agent_sees_its_own_file_only(clock: object) -> None:
    async with open_test_kernel(roots=[Db]) as test:
        await db_of(test)
        await test.kernel.get_agent(Db, "b")
        one = test.find([("Db", "a")]).agent  # type: ignore[union-attr]
        two = test.find([("Db", "b")]).agent  # type: ignore[union-attr]
        one.sql("insert into t (v) values ('mine')")
        assert two.sql("select * from t") == []
        with pytest.raises(SqlError):
            one.sql("select * from job")


async def test_what_the_kernel_writes_is_not_rolled_back_with_it(
    clock: object,
) -> None:
    """A state and a chunk that meet a transaction held over an await are kept."""

    class Held(ScriptedChild):
        async def on_start(self) -> None:
            self.sql("create table t (v)")

        async def hold(self) -> None:
            with self.transaction():
                self.sql("insert into t values (1)")
                await trio.sleep(2)
                self.sql("insert into t values (2)")

    class Asks(Agent):
        async def run(self) -> str:
            script = [["sleep", 1], ["say", "x"], ["sleep", 9]]
            return (await self.run_agent_tool(Held, script, run_id="r")).status

        async def hold(self) -> None:
            await (await self.dynamic_agents.get(Held, "r")).hold()

    async with open_test_kernel(roots=[Asks], facets=[Held]) as test:
        root = await test.kernel.get_agent(Asks, "a")
        answers: list[str] = []

        async def run() -> None:
            answers.append(await root.run())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await test.advance(0.5)
            nursery.start_soon(raises, UsageError, root.hold)
            await test.advance(1)
            kid = test.find([("Asks", "a"), ("Held", "r")])
            assert kid is not None
            kid.agent.set_state({"kept": 1})
            await test.advance(9)
        assert answers == ["completed"]
        tree = test.tree("Asks", "a")
        assert tree is not None
        stored = kid.db.execute("SELECT i FROM main.culet_entry ORDER BY i")
        assert stored == [(0,), (1,), (2,)]
        assert kid.db.execute("SELECT count(*) FROM t") == [(0,)]
        assert kid.db.execute("SELECT value FROM main.culet_value") == [('{"kept":1}',)]


async def test_a_full_disk_is_told_to_who_writes(clock: object) -> None:
    async with open_test_kernel(roots=[Db]) as test:
        db = await db_of(test)
        me = test.find([("Db", "a")]).agent  # type: ignore[union-attr]
        test.faults.fail_commit(stay=True)
        with pytest.raises(StorageError):
            me.sql("insert into t (v) values ('a')")
        with pytest.raises(StorageError), me.transaction():
            me.sql("insert into t (v) values ('a')")
        with pytest.raises(StorageError):
            me.set_state({"x": 1})
        assert me.state is None
        with pytest.raises(StorageError):
            await me.schedule(1, "due")
        assert await db.count() == 0
        test.faults.heal()
        me.sql("insert into t (v) values ('a')")
        assert await db.count() == 1
