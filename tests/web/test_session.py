"""Sessions without a transport: the gate, the bound, replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from culet.kernel.core.limits import Limits
from culet.kernel.ports import Blob
from culet.web.session import Session


class Gate:
    """An output gate that is moved by hand."""

    def __init__(self) -> None:
        self.durable = 0
        self.held: list[Callable[[int], None]] = []

    def hold(self, waiter: Callable[[int], None]) -> None:
        self.held.append(waiter)

    def record(self, durable: int) -> None:
        if durable >= 0:
            self.durable = durable
        held, self.held = self.held, []
        for waiter in held:
            waiter(durable)


class Pages:
    """A kernel connection that has pages to replay."""

    def __init__(self, pages: int, size: int) -> None:
        self.left, self.size = pages, size
        self.ended: list[tuple[int, str, bool]] = []

    @property
    def behind(self) -> bool:
        return self.left > 0

    def pull(self) -> Blob | None:
        self.left -= 1
        return Blob("p" * self.size)

    def received(self, message: str | bytes) -> None:
        raise AssertionError("not used")

    def closed(self, code: int, reason: str, *, was_clean: bool) -> None:
        self.ended.append((code, reason, was_clean))


def new(limits: Limits | None = None) -> tuple[Session, Gate, list[str]]:
    gate, notes = Gate(), []
    session = Session(
        gate, limits or Limits(), lambda: notes.append("ready"), notes.append
    )
    return session, gate, notes


def texts(session: Session) -> list[str | bytes]:
    return [text for blob in session.take() for text in blob.texts]


@pytest.mark.rule("I-15", "W-052")
def test_nothing_leaves_before_its_stamp_is_durable() -> None:
    session, gate, notes = new()

    session.push(Blob("a"), 2)
    session.push(Blob("b"), 0)  # durable already, and still behind "a"
    session.push(Blob("c"), 3)
    assert (texts(session), notes, len(gate.held)) == ([], [], 1)

    gate.record(2)
    assert texts(session) == ["a", "b"]
    assert len(gate.held) == 1, "it waits on for the rest"
    gate.record(3)
    assert texts(session) == ["c"]


def test_a_fence_drops_what_was_held_for_good() -> None:
    session, gate, _ = new()
    session.push(Blob("safe"), 0)
    session.push(Blob("void"), 1)

    gate.record(-1)
    session.close(1011, "restart", 0)

    assert texts(session) == ["safe"]
    assert session.closing == (1011, "restart")


def test_a_fence_releases_a_close_that_waited() -> None:
    session, gate, notes = new()
    session.push(Blob("void"), 1)
    session.close(1011, "restart", 2)
    assert (session.closing, notes, len(gate.held)) == (None, [], 1)

    gate.record(-1)

    assert texts(session) == []
    assert session.closing == (1011, "restart")
    assert notes == ["ready"]


@pytest.mark.rule("W-060")
def test_an_end_waits_for_what_was_pushed_before_it() -> None:
    session, gate, notes = new()
    session.close(1000, "bye", 1)
    assert (session.closing, len(gate.held)) == (None, 1)

    gate.record(1)

    assert session.closing == (1000, "bye")
    assert notes == ["ready"]


def test_what_the_gate_or_the_kernel_says_after_the_end_is_not_heard() -> None:
    session, gate, notes = new()
    session.push(Blob("late"), 1)
    session.lost(1006, "", was_clean=False)

    gate.record(1)
    session.close(1000, "bye", 0)

    assert notes == []
    assert session.closing is None


def test_a_page_of_replay_may_be_empty() -> None:
    class Skipping(Pages):
        def pull(self) -> Blob | None:
            super().pull()
            return None

    session, _, _ = new()
    session.connection = Skipping(1, 1)
    assert texts(session) == []
    assert not session.hungry


@pytest.mark.limit("outbox_bytes")
@pytest.mark.rule("I-43", "W-069")
def test_a_client_whose_outbox_is_full_is_cut_once() -> None:
    session, _, notes = new(Limits(outbox_bytes=10))
    session.push(Blob("123456"), 0)
    session.push(Blob("1234"), 0)
    assert notes == ["ready", "ready"], "it is just full"
    session.push(Blob("1"), 0)
    session.push(Blob("1"), 0)

    assert notes == ["ready", "ready", "outbox full"]


@pytest.mark.limit("write_bytes")
def test_at_once_a_client_is_written_write_bytes() -> None:
    session, _, _ = new(Limits(write_bytes=400))
    for letter in "abcde":
        session.push(Blob(letter * 100), 0)
    assert [text[0] for text in texts(session)] == ["a", "b", "c", "d"]
    assert session.waiting
    assert [text[0] for text in texts(session)] == ["e"]
    assert not session.waiting


def test_replay_is_pulled_only_while_there_is_room() -> None:
    session, _, notes = new(Limits(outbox_bytes=400))
    pages = Pages(5, 60)
    session.connection = pages

    taken = len(session.take()) + len(session.take()) + len(session.take())

    assert taken == 2, "a quarter of the outbox, then no more"
    assert not session.hungry
    assert not session.live, "replay does not make a client slow"
    session.landed()
    assert session.hungry
    assert "outbox full" not in notes


def test_live_traffic_counts_until_it_has_landed() -> None:
    session, _, _ = new()
    session.push(Blob("a"), 0)
    session.take()
    assert session.live
    session.landed()
    assert not session.live


def test_the_end_is_told_once() -> None:
    session, _, notes = new()
    pages = Pages(0, 0)
    session.connection = pages

    session.lost(1006, "", was_clean=False)
    session.lost(1000, "", was_clean=True)
    session.push(Blob("late"), 0)
    session.wake()

    assert pages.ended == [(1006, "", False)]
    assert notes == []
