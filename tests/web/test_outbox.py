"""The laws of the outbox, against a list as the model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.ports import Blob
from culet.web.outbox import Close, Outbox

# ("push", size, ahead) stamps `ahead` commits beyond what is durable now
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 40), st.integers(0, 4)),
        st.tuples(st.just("rise"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.just("land"), st.just(0), st.just(0)),
        st.tuples(st.just("close"), st.just(0), st.integers(0, 4)),
    ),
    max_size=60,
)


@pytest.mark.rule("I-15")
@given(OPS)
def test_what_leaves_is_a_durable_prefix_in_order(ops) -> None:
    outbox = Outbox(100)
    durable = 0
    pushed: list[tuple[int, Blob]] = []
    taken: list[Blob] = []
    landed = 0
    end: int | None = None
    for name, size, ahead in ops:
        match name:
            case "push":
                blob = Blob("x" * size)
                if outbox.fits(size):
                    outbox.push(blob, durable + ahead, durable)
                    if end is None:
                        pushed.append((durable + ahead, blob))
            case "rise":
                durable += size
                outbox.release(durable)
            case "take":
                taken += outbox.take()
            case "land":
                outbox.landed()
                landed = len(taken)
            case "close":
                outbox.close(Close(1000, ""), durable + ahead, durable)
                end = durable + ahead if end is None else end

        assert taken == [blob for _, blob in pushed[: len(taken)]]
        assert all(stamp <= durable for stamp, _ in pushed[: len(taken)])
        assert outbox.size == sum(blob.size for _, blob in pushed[landed:])
        if outbox.closing is not None:
            assert end is not None
            assert end <= durable
            assert all(stamp <= durable for stamp, _ in pushed)

    taken += outbox.take()
    due = 0
    while due < len(pushed) and pushed[due][0] <= durable:
        due += 1
    assert taken == [blob for _, blob in pushed[:due]], "all that may leave, leaves"


@given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 80))
def test_what_is_taken_at_once_is_bounded_and_nothing_is_left_out(sizes, most) -> None:
    outbox = Outbox(10_000)
    blobs = [Blob("x" * size) for size in sizes]
    for blob in blobs:
        outbox.push(blob, 0, 0)
    outbox.close(Close(1000, "bye"), 0, 0)

    taken: list[Blob] = []
    while outbox.waiting:
        assert outbox.closing is None, "the end comes after all that was pushed before"
        part = outbox.take(most)
        assert len(part) == 1 or sum(blob.size for blob in part) <= most
        if any(4 * blob.size > most for blob in part[1:]):
            raise AssertionError("what is large goes alone: it is shared, not copied")
        taken += part
        outbox.landed()

    assert taken == blobs
    assert outbox.size == 0
    assert outbox.closing == Close(1000, "bye")


def test_an_empty_outbox_takes_any_one_blob() -> None:
    outbox = Outbox(10)

    assert outbox.fits(1000)
    outbox.push(Blob("x" * 1000), 0, 0)
    assert not outbox.fits(1)
    outbox.take()
    assert not outbox.fits(1), "bytes in the transport's hands count"
    outbox.landed()
    assert outbox.fits(1)


def test_a_fence_drops_what_is_held_and_keeps_the_close() -> None:
    outbox = Outbox(100)
    outbox.push(Blob("safe"), 0, 0)
    outbox.push(Blob("void"), 5, 0)
    outbox.close(Close(1011, "restart"), 0, 0)

    assert outbox.closing is None
    assert outbox.void()

    assert [blob.texts for blob in outbox.take()] == [("safe",)]
    assert outbox.closing == Close(1011, "restart")
    outbox.landed()
    assert outbox.size == 0


def test_nothing_comes_after_a_close() -> None:
    outbox = Outbox(100)
    assert outbox.close(Close(4410, "deleted"), 0, 0)

    assert not outbox.push(Blob("late"), 0, 0)
    assert not outbox.close(Close(1000, "other"), 0, 0)
    assert outbox.take() == []
    assert outbox.closing == Close(4410, "deleted")
