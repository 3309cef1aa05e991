"""What a run's status says, where it is seen, and that one step decides it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import trio

import culet.kernel
from culet.kernel import AgentToolEvents, apply_agent_tool_event
from culet.kernel.core.run import Status
from culet.kernel.core.status import CAUSES, Refused, advance
from culet.kernel.errors import StorageError
from kernel.agents import rows, settle, tree_of
from kernel.peers import connect
from kernel.toolkit import (
    Frail,
    Kid,
    again,
    ask,
    folded,
    frames,
    kinds,
    opened,
    top,
)

SCRIPTS: dict[str, list[Any]] = {
    "completed": [["say", "x"]], "error": [["say", "x"], ["fail", "no"]],
    "aborted": [["say", "x"], ["sleep", 99]], "interrupted": [["say", "x"], ["sleep", 99]],
}  # fmt: skip
LAST = {"completed": "finished"}


async def ended(test: Any, me: Any, status: str, run_id: str) -> Any:
    """End a run in that status; return the result that its caller got."""
    async with trio.open_nursery() as nursery:
        results = ask(nursery, me, Kid, SCRIPTS[status], run_id=run_id)
        await test.advance(1)
        if status == "aborted":
            await me.runs.cancel(run_id, "enough")
        if status == "interrupted":
            await me.dynamic_agents.delete(Kid, run_id)
    return results[0]


@pytest.mark.rule("T-032", "T-038", "T-039")
@pytest.mark.parametrize("status", get_args(Status))
async def test_a_status_is_seen_as_such_wherever_a_run_is_shown(
    status: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        if status == "running":
            await me.run_agent_tool(Kid, [["sleep", 9]], run_id="r", detached=True)
            await test.advance(1)
        else:
            result = await ended(test, me, status, "r")
            assert result == me.runs.get("r")
        await me.durable()
        late = await connect(test, label="late")
        assert me.runs.get("r").status == status
        assert [run.status for run in me.runs.list()] == [status]
        assert me.runs.list(status=status) == me.runs.list()
        assert rows(tree_of(test), "SELECT status FROM run") == [(status,)]
        for client in (peer, late):
            assert folded(client)["runsById"]["r"]["status"] == status
        last = kinds(await frames(me, "r"))[-1][1]
        expected = "started" if status == "running" else LAST.get(status, status)
        assert last in (expected, "chunk")
        if status != "running":
            assert last == expected


@pytest.mark.rule("T-033", "T-028")
@pytest.mark.parametrize("status", sorted(SCRIPTS))
async def test_a_run_that_has_ended_does_not_run_again(
    status: str, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        run = await ended(test, me, status, "r")
        assert run.status == status
        tree = tree_of(test)
        with pytest.raises(StorageError):
            tree.db.execute("UPDATE run SET status = 'running' WHERE id = 'r'")
        assert me.runs.get("r") == run
        for cause in CAUSES:
            assert advance(run.status, cause) == Refused(run.status)


async def test_runs_are_listed_by_what_they_are_page_by_page(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        for number in range(7):
            await me.run_agent_tool(
                Kid if number % 2 else Frail, [["fail", "x"]] if number == 3 else [],
                run_id=f"r{6 - number}", parent_tool_call_id=f"c{number % 3}",
            )  # fmt: skip

        def ids(**wanted: Any) -> list[str]:
            return [run.run_id for run in me.runs.list(**wanted)]

        assert ids() == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]
        assert ids(limit=3) == ["r6", "r5", "r4"]
        assert ids(limit=3, after="r4") == ["r3", "r2", "r1"]
        assert ids(limit=3, after="r1") == ["r0"]
        assert ids(status="error") == ["r3"]
        assert ids(agent_type="Kid") == ["r5", "r3", "r1"]
        assert ids(parent_tool_call_id="c0") == ["r6", "r3", "r0"]
        assert ids(agent_type="Kid", parent_tool_call_id="c0", status="completed") == []


@pytest.mark.rule("T-040")
async def test_who_watches_does_not_show_in_the_status(clock: object) -> None:
    assert set(get_args(Status)) == {
        "running", "completed", "error", "aborted", "interrupted",
    }  # fmt: skip
    async with opened() as test:
        me = await top(test)
        peer = await connect(test)
        with trio.move_on_after(1):
            await me.run_agent_tool(Kid, [["sleep", 9]], run_id="r")
        before = me.runs.get("r")
        await me.run_agent_tool(Kid, [["sleep", 9]], run_id="d", detached=True)
        assert peer.connection is not None
        peer.connection.closed(1006, "", was_clean=False)
        await settle()
        assert me.runs.get("r") == before
        assert {run.status for run in me.runs.list()} == {"running"}


@pytest.mark.rule("T-037")
def test_one_statement_ends_a_run() -> None:
    folder = Path(culet.kernel.__file__).parent
    found = [
        path.name
        for path in folder.rglob("*.py")
        for _ in re.finditer(r"UPDATE run SET status", path.read_text())
    ]
    assert found == ["endings.py"]


@pytest.mark.rule("T-037", "T-036")
@pytest.mark.parametrize("commits", range(1, 9))
async def test_the_end_the_job_and_the_hook_that_is_owed_are_one_commit(
    commits: int, clock: object
) -> None:
    async with opened() as test:
        me = await top(test)
        test.faults.die_after(commits)
        with trio.move_on_after(1):
            try:
                await me.run_agent_tool(Kid, [["durable"], ["say", "x"]], run_id="r")
            except Exception as error:
                assert test.faults.dead, error
        await test.crash()
        await test.reopen()
        test.faults.heal()
        seen = []
        tree = await test.kernel.host.open_root(tree_key(), create=True)
        seen = rows(tree, "SELECT status FROM run")
        owed = rows(tree, "SELECT kind FROM job WHERE what = 'r'")
        assert (seen, owed) in (
            ([], []), ([("running",)], [("turn",)]),
            ([("completed",)], [("hook",)]), ([("completed",)], []),
        )  # fmt: skip


def tree_key() -> Any:
    from culet.kernel.ports import TreeKey

    return TreeKey("Top", "a")


@pytest.mark.rule("T-031")
async def test_what_comes_late_reads_who_was_first(clock: object) -> None:
    async with opened() as test:
        me = await top(test)
        run = await me.run_agent_tool(Kid, [["say", "x"]], run_id="done")
        assert (await me.runs.cancel("done", "late")).status == "completed"
        async with trio.open_nursery() as nursery:
            ask(nursery, me, Kid, [["sleep", 99]], run_id="gone")
            await test.advance(1)
            await me.runs.cancel("gone", "first")
            await me.dynamic_agents.delete(Kid, "gone")
        await me.durable()
        me = await again(test)
        assert me.runs.get("done") == run
        assert (me.runs.get("gone").status, me.runs.get("gone").reason) == (
            "aborted", "first",
        )  # fmt: skip


@pytest.mark.rule("T-039", "W-216")
def test_a_client_knows_no_run_that_has_not_started() -> None:
    event = {"kind": "started", "runId": "r", "agentType": "Kid", "order": 0}
    frame = {"type": "agent-tool-event", "sequence": 0, "event": event}
    state = apply_agent_tool_event(AgentToolEvents.empty(), frame)
    assert state.runs_by_id["r"]["status"] == "running"
