"""A user's SQL may do what it likes with its own tables, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from culet.kernel.core.limits import Limits
from culet.kernel.errors import SqlError, StorageFull
from culet.kernel.ports import AgentDb, TreeStore, UserRows
from culet.storage import open_memory
from storage.driving import KEY, NOTE, NOTES, add_node, barrier, opened

LIMITS = Limits(
    sql_rows=100, sql_steps=200_000, sql_bytes=20_000, value_bytes=300_000,
    database_pages=500,
)  # fmt: skip


@pytest.fixture(params=["sqlite", "memory", "unwritten"])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentDb]:
    store = opened(str(tmp_path), limits=LIMITS)
    if request.param == "memory":
        store.close()
        memory = open_memory("", limits=LIMITS)
        memory.open()
        tree: TreeStore = memory.open_tree(KEY, level="power")
        agent: AgentDb = tree.agent("root0")
    else:
        tree = store.open_tree(KEY, level="power")
        agent = tree.agent("root0")
    add_node(tree, "root0")
    if request.param != "unwritten":
        agent.execute(NOTE, ("kept", "1"))
        run(agent, "CREATE TABLE mine (id INTEGER PRIMARY KEY AUTOINCREMENT, a)")
        run(agent, "INSERT INTO mine (a) VALUES (1), (2)")
    yield agent
    tree.close()
    store.close()


def run(agent: AgentDb, sql: str, *params: str | int) -> UserRows:
    return agent.user(sql, params, LIMITS.sql_rows)


REFUSED = [
    # transactions are the kernel's
    "BEGIN", "BEGIN IMMEDIATE", "COMMIT", "END", "ROLLBACK", "SAVEPOINT a", "RELEASE a",
    "ROLLBACK TO a",
    # other files, other settings
    "ATTACH 'other.db' AS other", "ATTACH ':memory:' AS m", "DETACH main", "VACUUM",
    "VACUUM INTO 'copy.db'", "PRAGMA journal_mode = DELETE", "PRAGMA synchronous",
    "PRAGMA writable_schema = 1", "PRAGMA wal_checkpoint", "PRAGMA main.user_version = 9",
    "SELECT * FROM pragma_wal_checkpoint", "PRAGMA query_only = 0",
    "SELECT load_extension('x')", "ANALYZE",
    # nothing that could shadow a table of ours
    "CREATE TEMP TABLE t (a)", "CREATE TABLE temp.t (a)", "CREATE TEMP VIEW v AS SELECT 1",
    "CREATE TEMP TABLE culet_value (key, value)", "CREATE TEMP TABLE t AS SELECT 1",
    # our tables are read-only, at any depth
    "INSERT INTO culet_value (key, value) VALUES ('a', '1')",
    "INSERT INTO main.culet_value (key, value) VALUES ('a', '1')",
    "INSERT INTO \"CULET_VALUE\" (key, value) VALUES ('a', '1')",
    "UPDATE culet_value SET value = '2'", "DELETE FROM culet_message",
    "REPLACE INTO culet_value (key, value) VALUES ('a', '1')",
    "WITH x AS (SELECT 1) DELETE FROM [culet_entry]",
    "DROP TABLE culet_entry", "DROP TRIGGER culet_entry_keeps",
    "ALTER TABLE culet_value RENAME TO mine2", "ALTER TABLE culet_value ADD COLUMN x",
    "CREATE TABLE culet_mine (a)", "CREATE TABLE Culet_mine (a)",
    "CREATE INDEX i ON culet_value (value)", "CREATE VIEW culet_v AS SELECT 1",
    "CREATE VIEW v AS SELECT * FROM culet_value",
    "CREATE TRIGGER t AFTER INSERT ON culet_entry BEGIN SELECT 1; END",
    "CREATE VIRTUAL TABLE culet_f USING fts5(x)",
    "CREATE VIRTUAL TABLE f USING fts5(body, content='culet_message')",
    # what SQLite keeps for itself
    "INSERT INTO sqlite_master VALUES ('table', 'x', 'x', 0, '')",
    "DELETE FROM sqlite_sequence", "UPDATE sqlite_sequence SET seq = 0",
    "CREATE TABLE sqlite_mine (a)",
    # one statement at a time, none at all
    "SELECT 1; SELECT 2", "SELECT 1; DROP TABLE culet_entry",
    # nonsense
    "", "SELEC 1", "SELECT nothing", 'SELECT "nothing"', "SELECT ?", "SELECT ?, ?, ?",
]  # fmt: skip


@pytest.mark.rule("F-251", "F-30", "F-394", "F-395")
@pytest.mark.parametrize("sql", [s for s in REFUSED if s])
def test_a_statement_is_refused(agent: AgentDb, sql: str) -> None:
    existed = agent.exists
    before = agent.execute(
        "SELECT type, name, sql FROM main.sqlite_master ORDER BY name"
    )
    with pytest.raises(SqlError) as caught:
        run(agent, sql)

    assert caught.value.query == sql
    assert not agent.in_user_transaction
    if existed:
        assert agent.execute(NOTES) == [("kept",)]
        assert run(agent, "SELECT count(*) FROM mine").rows == [(2,)]
    after = agent.execute(
        "SELECT type, name, sql FROM main.sqlite_master ORDER BY name"
    )
    assert after == before


NEEDS_MINE = [
    # the name that ALTER gives, the body of a trigger, the target of a key
    "ALTER TABLE mine RENAME TO culet_mine", "ALTER TABLE mine RENAME TO 'CULET_x'",
    "CREATE TRIGGER t AFTER INSERT ON mine BEGIN DELETE FROM culet_entry; END",
    "CREATE TRIGGER t AFTER INSERT ON mine BEGIN DELETE FROM sqlite_sequence; END",
    "CREATE TEMP TRIGGER t AFTER INSERT ON mine BEGIN SELECT 1; END",
    "CREATE TABLE k (a REFERENCES culet_message (id))",
    "CREATE INDEX culet_i ON mine (a)",
]  # fmt: skip


@pytest.mark.rule("F-30", "F-395")
@pytest.mark.parametrize("sql", NEEDS_MINE)
def test_a_detour_is_refused(agent: AgentDb, sql: str) -> None:
    run(agent, "CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY, a)")

    with pytest.raises(SqlError, match=r"culet_|sqlite_sequence|TEMP"):
        run(agent, sql)


ALLOWED = [
    "CREATE TABLE t (a INTEGER PRIMARY KEY AUTOINCREMENT, b TEXT) STRICT",
    "INSERT INTO t (b) VALUES ('culet_ may be said in a text')",
    "INSERT INTO t (b) VALUES ('a;b');",
    "INSERT OR REPLACE INTO t (a, b) VALUES (1, 'x') RETURNING a, b",
    "INSERT INTO t (a) VALUES (1) ON CONFLICT (a) DO UPDATE SET b = 'y'",
    "CREATE INDEX t_b ON t (b)", "CREATE VIEW v AS SELECT b FROM t",
    "CREATE TABLE log (what)",
    "CREATE TRIGGER t_log AFTER INSERT ON t BEGIN INSERT INTO log VALUES (NEW.b); END",
    "INSERT INTO t (b) VALUES ('z')", "SELECT * FROM v, log",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9) SELECT * FROM n",
    "SELECT json_extract('{\"a\": 1}', '$.a')", "SELECT * FROM pragma_table_info('t')",
    "SELECT name FROM sqlite_master", "SELECT seq FROM sqlite_sequence",
    "SELECT key FROM culet_value", "EXPLAIN QUERY PLAN SELECT * FROM t",
    "ALTER TABLE t RENAME COLUMN b TO c", "ALTER TABLE t ADD COLUMN d TEXT", "REINDEX t_b",
    "ALTER TABLE t RENAME TO u", "DROP VIEW v", "DROP TRIGGER t_log", "DROP TABLE u",
    "SELECT 1;", "-- a comment\nSELECT 1 -- and another",
]  # fmt: skip


def test_what_is_the_users_own_is_allowed(agent: AgentDb) -> None:
    for sql in ALLOWED:
        if sql == "DROP VIEW v":  # renaming kept it whole
            assert run(agent, "SELECT * FROM v").columns == ("c",)
        run(agent, sql)


def test_rows_come_with_their_columns(agent: AgentDb) -> None:
    found = run(agent, "SELECT 1 AS a, 'x' AS b, x'00' AS c, NULL AS d, 0.5 AS e")

    assert found.columns == ("a", "b", "c", "d", "e")
    assert found.rows == [(1, "x", b"\0", None, 0.5)]


def test_full_text_search_works(agent: AgentDb) -> None:
    run(agent, "CREATE VIRTUAL TABLE page USING fts5(title, body, tokenize='porter')")
    run(agent, "INSERT INTO page VALUES (?, ?)", "queue", "Waiting in lines")
    run(agent, "INSERT INTO page VALUES (?, ?)", "stack", "last in, first out")
    found = run(
        agent, "SELECT title FROM page WHERE page MATCH ? ORDER BY rank", "line"
    )
    run(agent, "INSERT INTO page (page) VALUES ('optimize')")
    run(agent, "UPDATE page SET body = 'nothing' WHERE title = 'queue'")

    assert found.rows == [("queue",)]
    assert run(agent, "SELECT count(*) FROM page WHERE page MATCH 'line'").rows == [
        (0,)
    ]
    with pytest.raises(SqlError):
        run(agent, "DELETE FROM page_data")  # a shadow table
    run(agent, "DROP TABLE page")


def test_a_statement_that_was_fine_is_judged_again_when_the_schema_changes(
    agent: AgentDb,
) -> None:
    run(agent, "CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY, a)")
    for _ in range(3):  # now it is compiled and kept
        run(agent, "INSERT INTO mine (a) VALUES (7)")
    # Only the kernel can make such a trigger; were it there, the fence would see it.
    agent.execute(
        "CREATE TRIGGER main.bad AFTER INSERT ON mine BEGIN "
        "INSERT INTO culet_value VALUES ('stolen', '1'); END"
    )

    with pytest.raises(SqlError, match="read-only"):
        run(agent, "INSERT INTO mine (a) VALUES (7)")
    assert ("stolen",) not in agent.execute(NOTES)


def test_the_text_of_a_kernel_statement_gets_a_user_no_further(agent: AgentDb) -> None:
    for i in range(3):
        agent.execute(NOTE, (f"k{i}", "1"))

    with pytest.raises(SqlError, match="read-only"):
        run(agent, NOTE, "u", "1")
    agent.execute(NOTE, ("k9", "1"))


def test_too_many_rows_are_refused_and_nothing_is_changed(agent: AgentDb) -> None:
    run(agent, "CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY, a)")
    run(agent, "DELETE FROM mine")
    many = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
    )
    assert len(run(agent, many + "SELECT i FROM n", 100).rows) == 100
    with pytest.raises(SqlError, match="100 rows"):
        run(agent, many + "SELECT i FROM n", 101)
    with pytest.raises(SqlError, match="100 rows"):
        run(agent, "INSERT INTO mine (a) " + many + "SELECT i FROM n RETURNING a", 101)

    assert run(agent, "SELECT count(*) FROM mine").rows == [(0,)]


@pytest.mark.limit("sql_steps")
def test_a_statement_that_does_not_end_is_ended(agent: AgentDb) -> None:
    count = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    )
    assert run(agent, count + "SELECT max(i) FROM n", 5_000).rows == [(5_000,)]
    with pytest.raises(SqlError, match="sql_steps"):
        run(agent, count + "SELECT max(i) FROM n", 50_000)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    with pytest.raises(SqlError, match="sql_steps"):
        run(agent, endless + "SELECT max(i) FROM n")

    assert run(agent, "SELECT 1").rows == [(1,)]


@pytest.mark.limit("sql_bytes", "value_bytes", "sql_rows")
def test_what_is_at_a_bound_passes_and_one_more_does_not(agent: AgentDb) -> None:
    run(agent, "CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY, a)")
    text = "SELECT 1 --" + "x" * (LIMITS.sql_bytes - 11)
    assert run(agent, text).rows == [(1,)]
    for more in (text + "x", text[:-2] + "☃"):
        with pytest.raises(SqlError, match="sql_bytes"):
            run(agent, more)
    run(agent, "INSERT INTO mine (id, a) VALUES (1000, ?)", "x" * 299_990)
    with pytest.raises(SqlError, match="value_bytes"):
        run(agent, "INSERT INTO mine (id, a) VALUES (1001, ?)", "x" * 300_001)
    rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    assert len(run(agent, rows + "SELECT i FROM n", LIMITS.sql_rows).rows) == 100
    with pytest.raises(SqlError, match="more than 100 rows"):
        run(agent, rows + "SELECT i FROM n", LIMITS.sql_rows + 1)


def test_long_texts_and_values_are_refused(agent: AgentDb) -> None:
    run(agent, "CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY, a)")
    with pytest.raises(SqlError, match="sql_bytes"):
        run(agent, "SELECT " + "1," * 10_000 + "1")
    with pytest.raises(SqlError, match="value_bytes"):
        run(agent, "INSERT INTO mine (a) VALUES (?)", "x" * 300_001)
    with pytest.raises(SqlError, match="value_bytes"):
        run(agent, "SELECT zeroblob(300001)")


def test_a_full_quota_is_told_and_leaves_the_agent_usable(agent: AgentDb) -> None:
    run(agent, "CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY, a)")
    with pytest.raises(StorageFull):
        for _ in range(10):
            run(agent, "INSERT INTO mine (a) VALUES (?)", "x" * 100_000)

    run(agent, "DELETE FROM mine")
    run(agent, "INSERT INTO mine (a) VALUES (?)", "x" * 100_000)


def test_an_error_that_ends_the_users_transaction_is_remembered(agent: AgentDb) -> None:
    run(agent, "CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY, a)")
    run(agent, "CREATE TABLE once (a UNIQUE)")
    agent.user_begin()
    run(agent, "INSERT INTO once VALUES (1)")
    with pytest.raises(SqlError):
        run(agent, "INSERT OR ROLLBACK INTO once VALUES (1)")
    with pytest.raises(SqlError, match="rolled back"):
        run(agent, "INSERT INTO once VALUES (2)")  # must not commit by itself
    with pytest.raises(SqlError, match="rolled back"):
        agent.user_end(commit=True)

    assert run(agent, "SELECT * FROM once").rows == []
    run(agent, "INSERT INTO once VALUES (3)")


def test_keys_of_the_user_are_checked_at_commit(agent: AgentDb) -> None:
    run(agent, "CREATE TABLE top (id INTEGER PRIMARY KEY)")
    run(agent, "CREATE TABLE low (t REFERENCES top DEFERRABLE INITIALLY DEFERRED)")
    agent.user_begin()
    run(agent, "INSERT INTO low VALUES (5)")
    with pytest.raises(SqlError, match="FOREIGN KEY"):
        agent.user_end(commit=True)

    assert not agent.in_user_transaction
    assert run(agent, "SELECT * FROM low").rows == []


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800", {"a": 1}])
def test_a_value_that_sqlite_has_no_word_for_is_refused(
    agent: AgentDb, value: object
) -> None:
    with pytest.raises(SqlError):
        agent.user("SELECT ?", (value,), 1)  # type: ignore[arg-type] # what users do


@pytest.mark.rule("I-23", "F-395")
def test_a_user_cannot_see_another_agent(tmp_path: Path) -> None:
    store = opened(str(tmp_path))
    tree = store.open_tree(KEY, level="power")
    for slot in ("a", "b"):
        add_node(tree, slot)
        tree.agent(slot).user("CREATE TABLE mine (a)", (), 1)
        tree.agent(slot).user("INSERT INTO mine VALUES (?)", (slot,), 1)
    barrier(tree)

    assert tree.agent("a").user("SELECT a FROM mine", (), 9).rows == [("a",)]
    with pytest.raises(SqlError, match="no such table"):
        tree.agent("a").user("SELECT * FROM node", (), 9)
    store.close()
