"""Submissions: accepted in one step, answered in order, once; looked at and forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import trio

from adapters.peer import connected, user
from adapters.test_aichat import DOORS, RESPONSES, Talker, texts
from culet.adapters import Submission
from culet.kernel import Limits
from culet.kernel.core.limits import SUBMISSIONS_MAX
from culet.kernel.errors import CapacityError, CuletError, StorageError, UsageError
from culet.kernel.testing import Harness, open_test_kernel

ME = ("Submitter", "a")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    DOORS.__init__()  # type: ignore[misc]
    RESPONSES.clear()
    Submitter.seen.clear()
    Submitter.woken.clear()
    yield
    DOORS.__init__()  # type: ignore[misc]
    RESPONSES.clear()


class Submitter(Talker):
    """Says each word of the last user message, and counts how often it was asked."""

    seen: ClassVar[list[tuple[str, int]]] = []
    woken: ClassVar[list[dict[str, str]]] = []  # what stood whenever it started

    async def on_start(self, props: Any = None) -> None:
        self.woken.append(standing(self))

    async def on_chat_message(self, turn: Any) -> Any:
        self.seen.append((texts(turn.messages)[-1], turn.attempt))
        async for chunk in super().on_chat_message(turn):
            yield chunk


def opened(**options: Any) -> Any:
    return open_test_kernel(roots=[Submitter], **options)


async def agent(test: Harness) -> Submitter:
    """Wake the agent and return its live instance."""
    await test.kernel.get_agent(Submitter, "a")
    node = test.find([ME])
    assert node is not None
    assert isinstance(node.agent, Submitter)
    return node.agent


async def again(test: Harness) -> Submitter:
    """Crash, open again, and wake it."""
    await test.crash()
    await test.reopen()
    return await agent(test)


async def submit(me: Submitter, name: str, text: str, **more: Any) -> Submission:
    """Submit one message whose id is `m-<name>`, as the submission `name`."""
    return await me.submit_messages(
        [user(f"m-{name}", text)], submission_id=name, **more
    )


def standing(me: Submitter) -> dict[str, str]:
    return {s.request_id: s.status for s in me.submissions.list()}


# ---- accepted, in order


@pytest.mark.rule("C-080", "C-081")
async def test_submissions_are_pending_then_run_one_by_one_in_order(
    clock: object,
) -> None:
    async with opened() as test:
        me = await agent(test)
        one = await submit(me, "one", "first wait:1")
        assert (one.accepted, one.status) == (True, "running")
        two = await submit(me, "two", "second wait:2", metadata={"from": "mail"})
        three = await submit(me, "three", "third fail")
        assert (two.status, three.status) == ("pending", "pending")
        assert two.metadata == {"from": "mail"}
        assert two.submitted_at > 0
        assert two.completed_at is None
        await DOORS.at("wait:1")
        DOORS.open("wait:1")
        await DOORS.at("wait:2")
        assert standing(me) == {
            "one": "completed",
            "two": "running",
            "three": "pending",
        }
        DOORS.open("wait:2")
        await test.advance(1)
        assert standing(me) == {
            "one": "completed",
            "two": "completed",
            "three": "error",
        }
        assert [word for word, _n in me.seen] == [
            "first wait:1", "second wait:2", "third fail",
        ]  # fmt: skip
        failed = me.submissions.get("three")
        assert failed is not None
        assert (failed.error, failed.accepted) == ("on purpose", None)
        assert failed.completed_at is not None


@pytest.mark.rule("C-080")
async def test_how_a_submission_ended_stands_for_good(clock: object) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first", idempotency_key="k")
        await test.advance(1)
        before = me.submissions.get("one")
        assert await me.submissions.cancel("one", "too late") == "completed"
        await submit(me, "one", "other")
        await submit(me, "other", "other", idempotency_key="k")
        assert me.submissions.get("one") == me.submissions.get(key="k") == before
        assert me.submissions.get("other") is None
        me = await again(test)
        assert me.submissions.get("one") == before
        assert me.seen == [("first", 1)]


@pytest.mark.rule("C-082")
async def test_a_known_id_or_key_is_that_submission_and_its_payload_is_ignored(
    clock: object,
) -> None:
    async with opened() as test:
        me = await agent(test)
        first = await submit(me, "one", "first wait:1", idempotency_key="k")
        await submit(me, "two", "second")
        by_id = await submit(me, "one", "other", metadata=5)
        by_key = await me.submit_messages([user("m", "other")], idempotency_key="k")
        for found in (by_id, by_key):
            assert (found.accepted, found.request_id) == (False, first.request_id)
            assert found.metadata is None
        pending = await submit(me, "two", "other")
        assert (pending.accepted, pending.status) == (False, "pending")
        assert texts(me.messages) == ["first wait:1", "second"]
        DOORS.open("wait:1")
        await test.advance(1)
        assert standing(me) == {"one": "completed", "two": "completed"}


@pytest.mark.rule("C-082")
async def test_what_names_two_submissions_or_nothing_is_refused(clock: object) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first", idempotency_key="k1")
        await submit(me, "two", "second", idempotency_key="k2")
        await me.fibers.start("work", me.durable, fiber_id="f", key="fk", wait=True)
        message = [user("m", "x")]
        for wrong, says in [
            ({"submission_id": "one", "idempotency_key": "k2"}, "two submissions"),
            ({"submission_id": "f"}, "'f' is the id of something else"),
            ({"idempotency_key": "fk"}, "'fk' is the key of something else"),
            ({"submission_id": ""}, "submission_id is a text"),
            ({"idempotency_key": ""}, "idempotency_key is a text"),
            ({"idempotency_key": "k" * 1025}, "1 to 1024"),
            ({"submission_id": "\ud800"}, "cannot be stored"),
            ({"metadata": object()}, "cannot be stored"),
        ]:
            with pytest.raises(UsageError, match=says):
                await me.submit_messages(message, **wrong)
        with pytest.raises(CapacityError, match="the metadata of a submission"):
            await me.submit_messages(message, metadata="x" * (17 << 10))
        with pytest.raises(UsageError, match="at least one message"):
            await me.submit_messages([])
        assert set(standing(me)) == {"one", "two"}
        assert len(me.messages) <= 4, "nothing of what was refused is stored"
        with pytest.raises(UsageError, match="give the id"):
            me.submissions.get()
        with pytest.raises(UsageError, match="no status"):
            me.submissions.list(status="done")  # type: ignore[arg-type]


# ---- a crash


@pytest.mark.rule("C-083", "C-081", "C-080")
@pytest.mark.parametrize("durable", [False, True])
async def test_a_submission_and_its_messages_are_there_together_or_not_at_all(
    durable: bool, clock: object
) -> None:
    async with opened() as test:
        me = await agent(test)
        await me.durable()
        await submit(me, "one", "first wait:1")
        await submit(me, "two", "second")
        if durable:
            await me.durable()
        me = await again(test)
        if durable:
            assert set(standing(me)) == {"one", "two"}
            assert texts(me.messages)[:2] == ["first wait:1", "second"]
        else:
            assert standing(me) == {}
            assert me.messages == []
        await submit(me, "one", "first wait:1")
        await submit(me, "two", "second")
        DOORS.open("wait:1")
        await test.advance(2)
        assert standing(me) == {"one": "completed", "two": "completed"}
        assert texts(me.messages) == [
            "first wait:1", "first wait:1", "second", "second",
        ]  # fmt: skip
        assert me.seen.count(("second", 1)) == 1


@pytest.mark.rule("C-083", "B-12")
async def test_what_has_begun_goes_on_as_the_same_turn_never_anew(
    clock: object,
) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first wait:1 last")
        await DOORS.at("wait:1")
        await me.durable()
        await test.crash()
        await test.reopen()
        me = await agent(test)
        DOORS.open("wait:1")
        await test.advance(1)
        assert me.woken == [{}, {"one": "recovering"}]
        assert standing(me) == {"one": "completed"}
        assert me.seen == [("first wait:1 last", 1), ("first wait:1 last", 2)]
        assert texts(me.messages) == ["first wait:1 last", "first wait:1 last"]


# ---- cancelled, cleared


@pytest.mark.rule("C-084")
async def test_one_that_is_cancelled_before_its_turn_leaves_no_message(
    clock: object,
) -> None:
    async with opened() as test, connected(test.kernel, ME) as tab:
        me = await agent(test)
        await me.add_messages([user("old", "what it was")])
        await submit(me, "one", "first wait:1")
        both = [user("old", "edited"), user("m-two", "second")]
        await me.submit_messages(both, submission_id="two")
        assert await me.submissions.cancel("two", "not needed") == "aborted"
        found = me.submissions.get("two")
        assert found is not None
        assert found.reason == "not needed"
        assert texts(me.messages) == ["edited", "first wait:1"]
        DOORS.open("wait:1")
        await test.advance(1)
        assert [word for word, _n in me.seen] == ["first wait:1"]
        assert texts(me.messages) == ["edited", "first wait:1", "first wait:1"]
        last = [f for f in tab.frames if f["type"] == "cf_agent_chat_messages"][-1]
        assert texts(last["messages"]) == texts(me.messages)
        me = await again(test)
        assert standing(me) == {"one": "completed", "two": "aborted"}
        assert texts(me.messages) == ["edited", "first wait:1", "first wait:1"]


@pytest.mark.rule("C-084")
@pytest.mark.parametrize("crash", [False, True])
async def test_one_that_runs_or_goes_on_after_a_crash_can_be_cancelled(
    crash: bool, clock: object
) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first wait:1 last")
        await submit(me, "two", "second")
        await DOORS.at("wait:1")
        await me.durable()
        if crash:
            me = await again(test)
        assert await me.submissions.cancel("one", "enough") == "aborted"
        await test.advance(1)
        assert standing(me) == {"one": "aborted", "two": "completed"}
        assert texts(me.messages) == ["first wait:1 last", "first", "second", "second"]
        assert await me.submissions.cancel("nobody") is None


@pytest.mark.rule("C-084")
async def test_a_message_that_another_one_asks_about_as_well_stays(
    clock: object,
) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first wait:1")
        await DOORS.at("wait:1")
        brought = [
            user("shared", "shared"),
            user("asked", "asked"),
            user("mine", "mine"),
        ]
        await me.submit_messages(brought, submission_id="two")
        parts: list[Any] = [{"type": "text", "text": "hm"}]
        between = {"id": "between", "role": "assistant", "parts": parts}
        again = [user("shared", "shared"), between, user("m-three", "third")]
        await me.submit_messages(again, submission_id="three")
        me.spawn(me.save_messages, [user("asked", "asked")])
        await test.advance(0.1)
        assert await me.submissions.cancel("two") == "aborted"
        left = {m["id"] for m in me.messages}
        assert {"shared", "asked", "m-three"} <= left
        assert "mine" not in left
        DOORS.open("wait:1")
        await test.advance(1)
        assert standing(me)["three"] == "completed"


@pytest.mark.rule("C-084")
async def test_a_word_of_the_kernel_as_a_reason_is_no_lie(clock: object) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first wait:1")
        await submit(me, "two", "second")
        assert await me.submissions.cancel("two", "skipped") == "aborted"
        assert me.submissions.get("two").reason == '"skipped"'  # type: ignore[union-attr]


@pytest.mark.rule("C-085", "C-080")
async def test_clearing_the_chat_skips_what_has_not_begun_at_once(
    clock: object,
) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first wait:1")
        await submit(me, "two", "second")
        await DOORS.at("wait:1")
        me._chat.clear()
        assert standing(me) == {"one": "aborted", "two": "skipped"}, "no await between"
        await test.advance(1)
        assert [word for word, _n in me.seen] == ["first wait:1"]
        known = await submit(me, "two", "second")
        assert (known.accepted, known.status) == (False, "skipped")
        me = await again(test)
        await test.advance(1)
        assert standing(me) == {"one": "aborted", "two": "skipped"}
        assert me.messages == []
        assert [s.request_id for s in me.submissions.list(status="skipped")] == ["two"]


async def test_who_waits_for_a_turn_that_is_skipped_is_told_so(clock: object) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first wait:1")
        told = []

        async def wait() -> None:
            told.append(await me.ask("second"))

        me.spawn(wait)
        await test.advance(0.1)
        await me.clear_messages()
        await test.advance(0.1)
        assert [result.status for result in told] == ["skipped"]


async def test_a_withdrawal_that_is_half_stored_restarts_the_tree(
    clock: object,
) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "one", "first wait:1")
        await submit(me, "two", "second")
        await me.durable()
        test.faults.fail_commit(2)  # the first one takes the message back
        with pytest.raises(StorageError):
            await me.submissions.cancel("two")
        await test.advance(5)
        me = await agent(test)
        assert standing(me)["two"] == "pending"
        assert texts(me.messages)[:2] == ["first wait:1", "second"]


@pytest.mark.rule("C-083", "C-084", "C-085")
@pytest.mark.parametrize("what", ["submit", "cancel", "clear", "delete"])
async def test_a_process_that_dies_in_a_step_leaves_all_of_it_or_nothing(
    what: str, clock: object
) -> None:
    async def act(me: Submitter) -> None:
        match what:
            case "submit":
                await submit(me, "three", "third")
            case "cancel":
                await me.submissions.cancel("two")
            case "clear":
                await me.clear_messages()
            case _:
                me.submissions.delete("zero")
        await me.durable()

    seen = set()
    for commits in range(7):
        DOORS.__init__()  # type: ignore[misc]
        async with opened() as test:
            me = await agent(test)
            await submit(me, "zero", "wait:0")
            DOORS.open("wait:0")
            await test.advance(1)
            await submit(me, "one", "wait:1")
            await submit(me, "two", "second")
            await DOORS.at("wait:1")
            await me.durable()
            test.faults.die_after(commits)
            with suppress(CuletError, trio.TooSlowError), trio.fail_after(5):
                await act(me)
            me = await again(test)
            stands = standing(me)
            brought = {m["id"] for m in me.messages}
            for name in ("two", "three"):
                is_open = stands.get(name) in ("pending", "running", "recovering")
                assert (f"m-{name}" in brought) == is_open, (commits, stands)
            seen.add(tuple(sorted(stands.items())))
            DOORS.open("wait:1")
            await test.advance(5)
            assert not {"pending", "running", "recovering"} & {*standing(me).values()}
    assert len(seen) == 2, "before the step, and after it"


# ---- listed and forgotten


@pytest.mark.rule("C-086")
async def test_only_what_has_ended_is_forgotten_and_only_its_row(clock: object) -> None:
    async with opened() as test:
        me = await agent(test)
        for name in ("a", "b", "c"):
            await submit(me, name, f"say {name}")
        await test.advance(1)
        await submit(me, "d", "wait:d")
        await submit(me, "e", "later")
        assert me.submissions.clear(status="pending") == 0
        assert me.submissions.delete("d") is me.submissions.delete("e") is False
        assert me.submissions.delete("b") is True
        assert me.submissions.delete("b") is me.submissions.delete("nobody") is False
        assert set(standing(me)) == {"a", "c", "d", "e"}
        assert me.submissions.clear(older_than=0) == 0
        assert me.submissions.clear(limit=1) == 1
        assert me.submissions.clear() == 1
        assert standing(me) == {"d": "running", "e": "pending"}
        assert len(texts(me.messages)) == 8, "what was said stays"
        fresh = await submit(me, "b", "say b")
        assert fresh.accepted, "a forgotten id is new"


@pytest.mark.rule("C-086")
async def test_a_page_has_a_hundred_and_never_more_than_five_hundred(
    clock: object,
) -> None:
    async with opened() as test:
        me = await agent(test)
        await submit(me, "first", "wait:x")
        names = [f"s{number:03}" for number in range(120)]
        for name in names:
            await submit(me, name, "x")
        page = me.submissions.list()
        assert [s.request_id for s in page] == ["first", *names[:99]]
        rest = me.submissions.list(after=page[-1].request_id, limit=SUBMISSIONS_MAX)
        assert [s.request_id for s in rest] == names[99:]
        assert [s.request_id for s in me.submissions.list(status="running")] == [
            "first"
        ]
        for limit in (0, SUBMISSIONS_MAX + 1, True, 2.0):
            with pytest.raises(UsageError, match="1 to 500"):
                me.submissions.list(limit=limit)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="1 to 500"):
                me.submissions.clear(limit=limit)  # type: ignore[arg-type]


@pytest.mark.rule("C-082")
async def test_a_given_id_is_known_as_long_as_nobody_forgets_it(clock: object) -> None:
    async with opened(limits=Limits(retained_turns=2)) as test:
        me = await agent(test)
        await submit(me, "named", "x")
        await me.submit_messages([user("m-key", "x")], idempotency_key="key")
        unnamed = await me.submit_messages([user("m-un", "x")])
        await test.advance(1)
        for number in range(4):
            await me.ask(f"more {number}")
        assert me.submissions.get(unnamed.request_id) is None, "nobody can ask for it"
        assert (await submit(me, "named", "x")).accepted is False
        again = await me.submit_messages([user("m", "x")], idempotency_key="key")
        assert again.accepted is False
