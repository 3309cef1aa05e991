"""A chat turn whose process ended: what it finds again, what becomes of what it had said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.peer import Client, connected, fetch, user
from culet.adapters import AIChatAgent, ChatRecovery, ChatRecoveryOptions
from culet.adapters.chat import ChatResponse
from culet.kernel import Agent, AgentToolRun, Chunk, Limits, Turn
from culet.kernel.ports import TreeKey
from culet.kernel.testing import Harness, open_test_kernel

ME = ("Teller", "a")
SEEN: list[dict[str, Any]] = []  # what each attempt was given
LOG: list[str] = []
RECOVERIES: list[ChatRecovery] = []
RESPONSES: list[ChatResponse] = []


@pytest.fixture(autouse=True)
def fresh() -> None:
    for kept in (SEEN, LOG, RECOVERIES, RESPONSES):
        kept.clear()


def given(turn: Turn) -> dict[str, Any]:
    return {
        "request": turn.request_id, "run": turn.run_id, "body": dict(turn.body),
        "tools": turn.client_tools, "trigger": turn.trigger,
        "continuation": turn.continuation, "message": turn.message_id,
        "identity": turn.identity,
        "messages": [m["id"] for m in turn.messages],
    }  # fmt: skip


class Teller(AIChatAgent):
    """Says its chunks; at `hold` the first request stands still in its first attempts.

    What it has said is not said again.
    """

    said: ClassVar[list[Any]] = []
    holds: ClassVar[int] = 1  # attempts that stand still
    choice: ClassVar[ChatRecoveryOptions | Exception | float | None] = None

    async def on_start(self, props: Any = None) -> None:
        LOG.append("start")

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[Chunk]:
        SEEN.append(given(turn))
        if turn.attempt == 1:
            turn.stash({"plan": "b"})
        done = len([c for c in turn.chunks() if c["type"] != "start"])
        for chunk in self.said:
            if chunk == "hold":
                if turn.attempt <= self.holds and turn.request_id in ("r1", "r"):
                    await trio.sleep_forever()
            elif chunk["type"] == "start" or done <= 0:
                yield chunk
            else:
                done -= 1

    async def on_chat_recovery(self, ctx: ChatRecovery) -> ChatRecoveryOptions | None:
        LOG.append("recovery")
        RECOVERIES.append(ctx)
        if isinstance(self.choice, Exception):
            raise self.choice
        if isinstance(self.choice, float):
            await trio.sleep(self.choice)
            return None
        return self.choice

    async def on_chat_response(self, result: ChatResponse) -> None:
        RESPONSES.append(result)
        raise RuntimeError("what a hook raises changes nothing")

    async def goes_on(self) -> None:
        await self.continue_last_turn()

    async def fill(self, count: int, size: int) -> None:
        for number in range(count):
            role = "assistant" if number % 2 else "user"
            part = {"type": "text", "text": "x" * size}
            await self.add_messages(
                [{"id": f"m{number}", "role": role, "parts": [part]}]
            )


def word(text: str) -> Chunk:
    return {"type": "text-delta", "id": "t", "delta": text}


START = {"type": "text-start", "id": "t"}
CALL = {"type": "tool-input-available", "toolCallId": "c", "toolName": "x", "input": {}}
RESULT = {"type": "tool-output-available", "toolCallId": "c", "output": 7}
HALF = [START, word("half ")]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what the teller says, and its class attributes."""

    def set_all(*said: Any, **more: Any) -> None:
        for name, value in {"said": list(said), **more}.items():
            monkeypatch.setattr(Teller, name, value)

    return set_all


async def history(test: Harness, *path: tuple[str, str]) -> list[dict[str, Any]]:
    answer = await fetch(test.kernel, *(path or (ME,)), leaf="/get-messages")
    assert isinstance(answer.body, bytes)
    return list(msgspec.json.decode(answer.body))


def shown(messages: list[dict[str, Any]]) -> list[Any]:
    """Return (id, text or state of a call) of each part."""
    return [
        (message["id"], part.get("text", part.get("state")))
        for message in messages
        for part in message["parts"]
        if part["type"] != "step-start"
    ]


async def cut(test: Harness, *asked: Any, **fields: Any) -> None:
    """Ask; let the turn say what it says until it stands still; then crash and reopen."""
    async with connected(test.kernel, ME) as tab:
        tab.chat("r1", *(asked or (user("u1", "go"),)), **fields)
        await trio.sleep(5)
        await test.crash()
    await test.reopen()


async def ended(test: Harness, request_id: str = "r1") -> Client:
    """Wait for the end of a turn; return a client that comes then and has all of it."""
    await test.kernel.get_agent(Teller, "a")
    sql = "SELECT 1 FROM fiber WHERE id = ? AND status = 'running'"
    with trio.fail_after(60):
        while await rows(test, sql, request_id):
            await trio.sleep(0.1)
    async with connected(test.kernel, ME) as late:
        late.send("cf_agent_stream_resume_ack", id=request_id)
        await late.ended(request_id)
        return late


async def rows(test: Harness, sql: str, *params: Any) -> list[Any]:
    tree = await test.kernel.host.open_root(TreeKey(*ME))
    return list(tree.db.execute(sql, params))


# ---- what is kept of a turn, and when it goes


@pytest.mark.rule("C-030", "W-101")
async def test_a_turn_finds_again_all_that_it_was_asked_with(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", word("whole"))
    tools = [{"name": "click", "parameters": {}}]
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test, clientTools=tools, colour="red")
        await ended(test)
        first, again = SEEN
        assert first == again
        assert first["tools"] == tools
        assert first["body"] == {"colour": "red"}
        assert (first["request"], first["message"]) == ("r1", "msg-r1")
        assert RECOVERIES[0].snapshot == {"plan": "b"}
        assert RECOVERIES[0].request_id == "r1"


@pytest.mark.rule("C-030", "C-053")
@pytest.mark.parametrize("how", ["completed", "error", "aborted", "declined"])
async def test_nothing_is_owed_for_a_turn_that_has_ended(
    how: str, clock: object, says: Any
) -> None:
    said = [*HALF, "hold"]
    if how == "error":
        said.append({"type": "error", "errorText": "bad"})
    choice = ChatRecoveryOptions(go_on=False) if how == "declined" else None
    says(*said, choice=choice, holds=2 if how == "aborted" else 1)
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test)
        turns = "SELECT what, snapshot FROM job WHERE kind = 'turn'"
        [[what, snapshot]] = await rows(test, turns)
        assert (what, msgspec.json.decode(snapshot)) == ("r1", {"plan": "b"})
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            await trio.sleep(1)
            if how == "aborted":
                late.send("cf_agent_chat_request_cancel", id="r1")
            await late.ended("r1")
        assert await rows(test, "SELECT kind FROM job") == []
        sql = "SELECT count(*) FROM culet_value WHERE key LIKE 'chat:turn:%'"
        node = test.find([ME])
        assert node is not None
        assert node.db.execute(sql) == [(0,)]


# ---- the order in which it comes back


@pytest.mark.rule("C-031")
async def test_its_hook_is_asked_when_the_agent_has_started(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold")
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test)
        await ended(test)
        assert LOG == ["start", "start", "recovery"]


@pytest.mark.rule("C-032", "C-034")
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ([], "retry"),
        ([{"type": "start"}, {"type": "start-step"}], "retry"),
        (HALF, "continue"),
        ([CALL], "continue"),
    ],
)
async def test_whether_it_is_begun_again_or_goes_on_is_told_by_what_was_stored(
    said: list[Any], kind: str, clock: object, says: Any
) -> None:
    says(*said, "hold", *HALF)
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test)
        await ended(test)
        [told] = RECOVERIES
        assert (told.kind, told.attempt) == (kind, 2 if said else 1 + len(SEEN) - 1)
        assert (told.partial_text, len(told.partial_parts)) == (
            ("half ", 1) if said is HALF else ("", int(kind == "continue"))
        )


@pytest.mark.rule("C-032")
async def test_a_hook_that_raises_ends_the_turn_and_the_partial_stays(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", choice=ValueError("in the hook"))
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test)
        late = await ended(test)
        assert late.of("cf_agent_use_chat_response")[-1]["outcome"] == "error"
        sql = "SELECT status, reason, error FROM fiber"
        assert await rows(test, sql) == [("error", "failed", "in the hook")]
        assert shown(await history(test))[-1] == ("msg-r1", "half ")
        for _ in range(2):  # it is over: no wake asks the hook once more
            await test.crash()
            await test.reopen()
            await history(test)
        assert len(RECOVERIES) == 1


@pytest.mark.rule("C-032")
async def test_a_hook_that_hangs_ends_the_turn_in_its_time(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", choice=1e9)
    limits = Limits(job_timeout_s=20)
    async with open_test_kernel(roots=[Teller], limits=limits) as test:
        await cut(test)
        await test.kernel.get_agent(Teller, "a")
        await trio.sleep(19)
        assert await rows(test, "SELECT status FROM fiber") == [("running",)]
        await trio.sleep(2)
        [[status, error]] = await rows(test, "SELECT status, error FROM fiber")
        assert status == "error"
        assert "on_chat_recovery took more than 20" in error


@pytest.mark.rule("C-032", "B-09")
async def test_a_turn_that_is_given_up_keeps_its_partial_and_its_hook_is_not_asked(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", holds=99)
    async with open_test_kernel(roots=[Teller], limits=Limits(attempts=2)) as test:
        await cut(test)
        await test.kernel.get_agent(Teller, "a")
        await trio.sleep(5)
        await test.crash()
        await test.reopen()
        await ended(test)
        assert len(RECOVERIES) == len(SEEN) - 1 == 1
        assert shown(await history(test)) == [("u1", "go"), ("msg-r1", "half ")]


# ---- what the hook may choose


@pytest.mark.rule("C-033")
@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (HALF, []),
        ([*HALF, CALL], []),
        ([*HALF, CALL, RESULT], ["half ", "output-available"]),
        ([CALL, {**RESULT, "type": "tool-output-error", "errorText": "no"}], ["output-error"]),
        ([CALL, {**RESULT, "preliminary": True}], []),
    ],
)  # fmt: skip
async def test_a_partial_that_is_not_wanted_goes_unless_tools_were_carried_out(
    said: list[Any], kept: list[str], clock: object, says: Any
) -> None:
    says(*said, "hold", choice=ChatRecoveryOptions(go_on=False, persist=False))
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test)
        await ended(test)
        found = [what for of, what in shown(await history(test)) if of == "msg-r1"]
        assert found == kept


@pytest.mark.rule("C-036")
async def test_a_turn_that_is_not_to_go_on_is_told_as_ended_to_all_and_for_good(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", choice=ChatRecoveryOptions(go_on=False))
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test)
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_ack", id="r1")
            assert (await late.ended("r1"))["outcome"] == "error"
        for _ in range(2):
            assert shown(await history(test)) == [("u1", "go"), ("msg-r1", "half ")]
            sql = "SELECT status, reason FROM fiber"
            assert await rows(test, sql) == [("interrupted", "not-resumed")]
            await test.crash()
            await test.reopen()
        assert len(SEEN) == 1


# ---- its message


@pytest.mark.rule("C-035")
@pytest.mark.parametrize(
    ("start", "message_id"),
    [({"type": "start", "messageId": "own"}, "own"), ({"type": "start"}, "msg-r1")],
)
async def test_a_turn_goes_on_in_the_message_that_it_began_and_in_no_other(
    start: Any, message_id: str, clock: object, says: Any
) -> None:
    says(start, *HALF, "hold", word("whole"))
    before = {
        "id": "old",
        "role": "assistant",
        "parts": [{"type": "text", "text": "o"}],
    }
    async with open_test_kernel(roots=[Teller]) as test:
        teller = await test.kernel.get_agent(Teller, "a")
        await teller.fill(2, 1)
        await cut(test, user("m0", "x"), {**before, "id": "m1"}, user("u1", "go"))
        await ended(test)
        assert SEEN[-1]["message"] == message_id  # so that its calls keep their names
        assert shown(await history(test))[1:] == [
            ("m1", "x"), ("u1", "go"), (message_id, "half whole"),
        ]  # fmt: skip


@pytest.mark.rule("C-034")
async def test_an_answer_whose_question_was_taken_back_is_skipped(
    clock: object, says: Any
) -> None:
    """Its process ended, and before it comes back somebody has edited the history."""
    says(*HALF, "hold", word("whole"))
    async with open_test_kernel(roots=[Teller]) as test:
        teller = await test.kernel.get_agent(Teller, "a")
        await teller.fill(2, 1)
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "first"))
            await trio.sleep(1)
            tab.chat("r2", user("u2", "second"))
            tab.chat("r3", user("m0", "third"))  # at an earlier place: the rest goes
            await trio.sleep(1)
            await test.crash()
        await test.reopen()
        assert [m["id"] for m in (await history(test))[:1]] == ["m0"]
        await ended(test, "r3")
        assert await rows(
            test, "SELECT id, status, reason FROM fiber ORDER BY born"
        ) == [
            ("r1", "aborted", "skipped"),
            ("r2", "aborted", "skipped"),
            ("r3", "completed", None),
        ]
        assert [s["request"] for s in SEEN] == ["r1", "r3"]
        assert shown(await history(test)) == [("m0", "third"), ("msg-r3", "half whole")]
        async with connected(test.kernel, ME) as late:
            assert late.of("cf_agent_stream_resuming") == []  # no error to be seen


@pytest.mark.rule("C-034")
async def test_a_question_that_came_later_supersedes_nothing(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", word("whole"))
    async with open_test_kernel(roots=[Teller]) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "first"))
            await trio.sleep(1)
            tab.chat("r2", user("u1", "first"), user("u2", "second"))
            await trio.sleep(1)
            await test.crash()
        await test.reopen()
        await ended(test, "r2")
        assert shown(await history(test)) == [
            ("u1", "first"), ("msg-r1", "half whole"),
            ("u2", "second"), ("msg-r2", "half whole"),
        ]  # fmt: skip


@pytest.mark.parametrize(
    "asked", [[], [user("", "x")], [user("u1", "a"), user("", "b")]]
)
async def test_a_request_that_names_no_question_is_answered_all_the_same(
    asked: list[Any], clock: object, says: Any
) -> None:
    says(*HALF)
    async with (
        open_test_kernel(roots=[Teller]) as test,
        connected(test.kernel, ME) as tab,
    ):
        tab.chat("r1", *asked)
        assert "outcome" not in await tab.ended("r1")
        assert tab.text("r1") == "half "


# ---- once, whatever happens


@pytest.mark.rule("C-037")
async def test_lives_that_end_before_they_begin_are_one_recovery(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", word("whole"))
    async with open_test_kernel(roots=[Teller]) as test:
        await cut(test)
        for _ in range(20):
            await test.crash()
            await test.reopen()
        assert len(await rows(test, "SELECT id FROM job")) == 1
        late = await ended(test)
        assert late.text("r1") == "half whole"
        assert len(RECOVERIES) == 1


@pytest.mark.rule("C-038")
async def test_it_goes_on_before_what_came_after_it_and_never_beside(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", word("whole"))
    async with open_test_kernel(roots=[Teller]) as test:
        async with connected(test.kernel, ME) as tab:
            for number in range(1, 4):
                tab.chat(f"r{number}", user(f"u{number}", "go"))
            await trio.sleep(1)
            await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            late.chat("r4", user("u4", "go"))
            await late.ended("r4")
        assert [s["request"] for s in SEEN] == ["r1", "r1", "r2", "r3", "r4"]
        assert len(RECOVERIES) == 1
        [_, *replies] = [m["id"] for m in await history(test)][::2]
        assert replies == ["u2", "u3", "u4"]


@pytest.mark.rule("C-039")
@pytest.mark.parametrize(
    "call",
    [
        [CALL],
        [{"type": "tool-input-start", "toolCallId": "c", "toolName": "x"}],
        [
            {"type": "tool-input-start", "toolCallId": "c", "toolName": "x"},
            {"type": "tool-input-delta", "toolCallId": "c", "inputTextDelta": '{"a'},
        ],
        [CALL, {**RESULT, "preliminary": True}],
    ],
)
@pytest.mark.parametrize("end", ["declined", "given up", "failed", "stopped"])
async def test_no_call_of_a_turn_that_was_cut_is_left_open(
    end: str, call: list[Any], clock: object, says: Any
) -> None:
    choice: Any = {
        "declined": ChatRecoveryOptions(go_on=False),
        "failed": ValueError("in the hook"),
    }.get(end)
    says(*HALF, *call, "hold", choice=choice, holds=99)
    async with open_test_kernel(roots=[Teller], limits=Limits(attempts=1)) as test:
        if end == "given up":
            await cut(test)
        elif end == "stopped":
            async with connected(test.kernel, ME) as tab:
                tab.chat("r1", user("u1", "go"))
                await trio.sleep(5)
                tab.send("cf_agent_chat_request_cancel", id="r1")
        else:
            await cut(test)
        await ended(test)
        [_, message] = await history(test)
        part = message["parts"][-1]
        assert part["state"] == "output-error"
        assert part["errorText"]
        assert "output" not in part


# ---- what counts as progress


@pytest.mark.rule("C-050")
async def test_who_looks_on_gives_a_turn_no_credit(clock: object, says: Any) -> None:
    """Replays, other people's messages and a turn that waits behind it are no progress."""
    says(*HALF, "hold", holds=99)
    async with open_test_kernel(roots=[Teller], limits=Limits(attempts=4)) as test:
        await cut(test)
        for number in range(8):
            async with connected(test.kernel, ME) as tab:
                tab.send("cf_agent_stream_resume_ack", id="r1")
                await trio.sleep(1)
                tab.send("cf_agent_chat_messages", messages=[user(f"n{number}", "!")])
                await trio.sleep(1)
                await test.crash()
            await test.reopen()
        await test.kernel.get_agent(Teller, "a")
        sql = "SELECT status, reason FROM fiber"
        assert await rows(test, sql) == [("error", "recovery-exhausted")]
        assert len(SEEN) == 4


@pytest.mark.rule("C-050")
async def test_progress_is_what_was_stored_and_no_compaction_takes_it_back(
    clock: object, says: Any
) -> None:
    """Each life says one word; the messages before it are edited away meanwhile."""
    lives = [w for n in range(6) for w in (word(f"{n} "), "hold")]
    says(START, *lives)

    async def stands(self: Teller, turn: Turn) -> AsyncIterator[Chunk]:
        SEEN.append(given(turn))
        if turn.attempt == 1:
            yield START
        if len(SEEN) <= 8:
            yield word(f"{len(SEEN)} ")
            await trio.sleep_forever()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Teller, "on_chat_message", stands)
        async with open_test_kernel(roots=[Teller], limits=Limits(attempts=2)) as test:
            await cut(test)
            for _ in range(8):
                await test.kernel.get_agent(Teller, "a")
                node = test.find([ME])
                assert node is not None
                node.agent._chat.transcript.delete(["u1"])  # type: ignore[attr-defined]
                node.agent._chat.transcript.put([user("u1", "go")])  # type: ignore[attr-defined]
                await trio.sleep(5)
                await test.crash()
                await test.reopen()
            late = await ended(test)
            assert late.text("r1") == "1 2 3 4 5 6 7 8 "
            assert await rows(test, "SELECT status FROM fiber") == [("completed",)]


# ---- giving up


class Boss(Agent):
    """Has a teller run as a tool, and is told of its end."""

    async def send(self) -> None:
        await self.run_agent_tool(Teller, "go", run_id="r", detached=True)

    async def on_agent_tool_finish(self, run: AgentToolRun) -> None:
        LOG.append(f"{run.status} {run.reason}")
        if len([line for line in LOG if line.startswith("error")]) == 1:
            raise RuntimeError("what a hook raises changes nothing")


@pytest.mark.rule("C-052")
@pytest.mark.parametrize("commits", range(10))
async def test_a_crash_while_a_turn_is_given_up_gives_it_up_again_and_harms_nothing(
    commits: int, clock: object, says: Any
) -> None:
    says(*HALF, "hold", holds=99)
    async with open_test_kernel(roots=[Teller], limits=Limits(attempts=1)) as test:
        await cut(test)
        test.faults.die_after(commits)
        with trio.move_on_after(5):
            try:
                await history(test)
                await trio.sleep(3)
            except Exception as error:
                assert test.faults.dead, error
        await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            await trio.sleep(1)
            late.send("cf_agent_stream_resume_request", probeId="p")
            offers = late.of("cf_agent_stream_resuming")
            assert {f["id"] for f in offers} == {"r1"}
            late.send("cf_agent_stream_resume_ack", id="r1")
            assert (await late.ended("r1"))["outcome"] == "error"
            assert late.text("r1") == "half "
        for _ in range(2):
            assert shown(await history(test)) == [("u1", "go"), ("msg-r1", "half ")]
            sql = "SELECT status, reason FROM fiber"
            assert await rows(test, sql) == [("error", "recovery-exhausted")]
            assert await rows(test, "SELECT kind FROM job") == []
            await test.crash()
            await test.reopen()
        assert len(SEEN) == 1, "the turn itself is not begun once more"


@pytest.mark.rule("C-052")
@pytest.mark.parametrize("commits", range(10))
async def test_a_run_that_is_given_up_is_told_to_its_parent_whatever_crashes(
    commits: int, clock: object, says: Any
) -> None:
    says(*HALF, "hold", holds=99)
    limits = Limits(attempts=1)
    async with open_test_kernel(roots=[Boss], facets=[Teller], limits=limits) as test:
        boss = await test.kernel.get_agent(Boss, "a")
        await boss.send()
        await trio.sleep(5)
        await test.crash()
        await test.reopen()
        test.faults.die_after(commits)
        with trio.move_on_after(5):
            try:
                await test.kernel.get_agent(Boss, "a")
                await trio.sleep(4)
            except Exception as error:
                assert test.faults.dead, error
        await test.crash()
        await test.reopen()
        await test.kernel.get_agent(Boss, "a")
        await trio.sleep(30)
        tree = test.tree("Boss", "a")
        assert tree is not None
        sql = "SELECT status, reason, summary FROM run"
        assert tree.db.execute(sql) == [("error", "recovery-exhausted", "half ")]
        assert tree.db.execute("SELECT kind FROM job WHERE dead = 0") == []
        told = [line for line in LOG if line.startswith("error")]
        assert set(told) == {"error recovery-exhausted"}
        assert len(SEEN) == 1


# ---- a history that is too large


@pytest.mark.limit("transcript_bytes")
@pytest.mark.rule("C-064")
async def test_a_history_that_is_too_large_is_loaded_in_part_and_said_to_be(
    clock: object, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    says(*HALF)
    limits = Limits(transcript_bytes=10_000)
    async with open_test_kernel(roots=[Teller], limits=limits) as test:
        teller = await test.kernel.get_agent(Teller, "a")
        await teller.fill(40, 1_000)
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "go"))
            await tab.ended("r1")
        loaded = SEEN[-1]["messages"]  # m31 would fit, but is no person's
        assert loaded == [f"m{n}" for n in range(32, 40)] + ["u1"]
        assert "32 older messages are not loaded" in caplog.text
        assert len(await history(test)) == 42  # it is all there


@pytest.mark.limit("transcript_least")
@pytest.mark.rule("C-064")
@pytest.mark.parametrize(("count", "least"), [(10, 4), (3, 4), (10, 2), (0, 4)])
async def test_the_last_messages_are_loaded_however_large_they_are(
    count: int, least: int, clock: object, says: Any
) -> None:
    says(*HALF)
    limits = Limits(transcript_bytes=10, transcript_least=least)
    async with open_test_kernel(roots=[Teller], limits=limits) as test:
        teller = await test.kernel.get_agent(Teller, "a")
        await teller.fill(count, 5_000)
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "go"))
            await tab.ended("r1")
        names = [f"m{n}" for n in range(count)] + ["u1"]
        assert SEEN[-1]["messages"] == names[-least:]


@pytest.mark.rule("C-064")
async def test_a_reply_that_cannot_be_read_keeps_no_agent_from_starting(
    clock: object, says: Any
) -> None:
    says(*HALF, "hold", holds=99)
    async with open_test_kernel(roots=[Teller], limits=Limits(attempts=1)) as test:
        async with connected(test.kernel, ME) as tab:
            tab.chat("r1", user("u1", "go"))
            await trio.sleep(5)
            node = test.find([ME])
            assert node is not None
            node.db.execute("DROP TRIGGER main.culet_entry_keeps")
            node.db.execute("UPDATE main.culet_entry SET body = '{' WHERE i = 1")
            node.tree.touched()
            await node.tree.durable()
            await test.crash()
        await test.reopen()
        await trio.sleep(5)
        async with connected(test.kernel, ME) as late:
            late.chat("r2", user("u2", "still here"))
            await late.ended("r2")
        assert SEEN[-1]["request"] == "r2"
        sql = "SELECT id, status, reason FROM fiber ORDER BY born"
        assert await rows(test, sql) == [
            ("r1", "error", "recovery-exhausted"), ("r2", "completed", None),
        ]  # fmt: skip
