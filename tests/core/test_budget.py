"""Accounts: tables for what is refused and returned, a Hypothesis machine for the laws."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from culet.kernel.core import budget as core
from culet.kernel.core.budget import (
    MEASURES,
    Account,
    Amount,
    Budget,
    Left,
    Line,
    Short,
    Spent,
    checked,
)
from culet.kernel.core.limits import AMOUNT_MAX
from culet.kernel.errors import OverBudget, UsageError

NOW = 1_800_000_000_000


def account(number: int = 1, parent: int | None = None, **lines: Line) -> Account:
    return Account(number, parent, lines=tuple(lines.get(m, Line()) for m in MEASURES))


def tokens(limit: int | None, spent: int = 0, held: int = 0) -> Line:
    return Line(limit, spent, held)


# ---- tables


def test_what_is_asked_beyond_what_is_left_is_refused_and_changes_nothing() -> None:
    chain = [account(tokens=tokens(10, 3, 4))]
    assert core.charge(chain, Amount(tokens=4), NOW) == Short("tokens", 4, 3, True)
    assert core.charge(chain, Amount(tokens=9), NOW) == Short("tokens", 9, 3, False)
    assert core.grant(chain, Budget(tokens=4), NOW) == Short("tokens", 4, 3, True)
    (after,) = core.charge(chain, Amount(tokens=3), NOW)
    assert after.of("tokens") == Line(10, 6, 4)


def test_one_measure_that_is_short_refuses_all() -> None:
    chain = [account(tokens=tokens(10), calls=tokens(0))]
    asked = Amount(tokens=5, calls=1)
    assert core.charge(chain, asked, NOW) == Short("calls", 1, 0, False)
    assert core.grant(chain, Budget(tokens=5, calls=1), NOW) == Short(
        "calls", 1, 0, False
    )


def test_a_bill_beyond_a_reservation_takes_what_is_left_and_the_rest_is_told() -> None:
    chain = [account(tokens=tokens(10, 4), cost=tokens(3, 3))]
    (after,) = core.overspend(chain, Amount(tokens=9, cost=2, calls=1))
    assert after.lines == (Line(10, 10, 0, 3), Line(3, 3, 0, 2), Line(None, 1))
    over = Amount(tokens=3, cost=2)
    assert core.spent(after) == Spent(tokens=13, cost=5, calls=1, over=over)


def test_what_is_under_way_may_come_back() -> None:
    chain = [account(tokens=tokens(10, 8))]
    under_way = [Amount(tokens=5)]
    asked = Amount(tokens=7)
    assert core.charge(chain, asked, NOW, under_way) == Short("tokens", 7, 2, True)
    asked = Amount(tokens=8)
    assert core.charge(chain, asked, NOW, under_way) == Short("tokens", 8, 2, False)


def test_a_spend_of_a_child_moves_what_is_held_to_what_is_spent() -> None:
    top = account(tokens=tokens(100))
    granted = core.grant([top], Budget(tokens=40), NOW)
    assert not isinstance(granted, Short)
    child, (top,) = granted
    assert top.of("tokens") == Line(100, 0, 40)
    child, top = core.charge([child, top], Amount(tokens=15), NOW)
    assert (child.of("tokens"), top.of("tokens")) == (Line(40, 15), Line(100, 15, 25))
    child, top = core.close(core.refund([child, top], Amount(tokens=5)))
    assert (child.of("tokens"), top.of("tokens")) == (Line(10, 10), Line(100, 10, 0))
    assert core.close([child, top]) == [child, top]


def test_what_is_settled_late_goes_to_the_purse_above() -> None:
    """Its own account is closed: who gave it has the rest."""
    top = account(1, tokens=tokens(100))
    granted = core.grant([top], Budget(tokens=40), NOW)
    assert not isinstance(granted, Short)
    child, above = granted
    chain = core.charge([child, *above], Amount(tokens=40), NOW)
    assert not isinstance(chain, Short)
    child, top = core.refund(core.close(chain), Amount(tokens=30))
    assert (child.of("tokens"), top.of("tokens")) == (Line(10, 10), Line(100, 10, 0))


@pytest.mark.parametrize(
    ("own", "above", "child"),
    [(None, None, None), (3, None, 3), (None, 3, 2), (3, 1, 0), (0, 4, 0)],
)
def test_depth_goes_down_with_each_level(
    own: int | None, above: int | None, child: int | None
) -> None:
    chain = [account()._replace(depth=above)]
    granted = core.grant(chain, Budget(depth=own), NOW)
    assert not isinstance(granted, Short)
    assert granted[0].depth == child
    assert core.drawing(chain[0]).depth == (None if above is None else above - 1)


def test_depth_and_time_that_are_used_up_refuse() -> None:
    flat = [account()._replace(depth=0)]
    assert core.grant(flat, None, NOW) == Short("depth", 1, 0, False)
    late = [account()._replace(deadline_at=NOW)]
    assert core.grant(late, None, NOW) == Short("seconds", 0, 0, False)
    assert core.charge(late, Amount(), NOW) == Short("seconds", 0, 0, False)
    assert core.left(late, NOW + 5) == Left(seconds=0)
    assert core.left(late, NOW - 5_000) == Left(seconds=5)


def test_a_child_has_the_earlier_deadline() -> None:
    chain = [account()._replace(deadline_at=NOW + 5_000)]
    for own, deadline_at in ((None, 5_000), (2, 2_000), (9, 5_000), (1e-9, 1)):
        granted = core.grant(chain, Budget(seconds=own), NOW)
        assert not isinstance(granted, Short)
        assert granted[0].deadline_at == NOW + deadline_at


@pytest.mark.parametrize(
    ("short", "text"),
    [
        (Short("tokens", 9, 5, False), "over budget: 9 tokens asked for, 5 left"),
        (
            Short("cost", 9, 5, True),
            (
                "over budget: 9 cost (millionths of a dollar) asked for, 5 left;"
                " what others have reserved may come back"
            ),
        ),
        (Short("depth", 1, 0, False), "the budget allows no run below this one"),
        (Short("seconds", 0, 0, False), "the time of the budget is over"),
    ],
)
def test_a_refusal_is_a_sentence_and_an_error(short: Short, text: str) -> None:
    error = short.error()
    assert isinstance(error, OverBudget)
    assert str(error) == short.text() == text
    assert (error.what, error.left, error.retryable) == (
        short.what,
        short.left,
        short.may_return,
    )


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), 1e300, True, "9"])
def test_seconds_are_a_number_within_a_bound_that_is_told(bad: Any) -> None:
    with pytest.raises(UsageError, match=r"above 0 and at most 1e\+10, not"):
        checked(Budget(seconds=bad))


@pytest.mark.parametrize("bad", [-1, 0.5, True, "9", AMOUNT_MAX + 1])
@pytest.mark.parametrize("measure", MEASURES)
def test_amounts_are_whole_numbers_within_a_bound(measure: str, bad: Any) -> None:
    with pytest.raises(UsageError, match=measure):
        checked(Budget(**{measure: bad}))
    assert checked(None) is None
    fine = Budget(**{measure: AMOUNT_MAX})
    assert checked(fine) is fine


# ---- laws

amounts = st.integers(0, 30)
some_budget = st.builds(
    Budget, tokens=st.none() | amounts, cost=st.none() | amounts,
    calls=st.none() | amounts,
)  # fmt: skip
some_amount = st.builds(Amount, tokens=amounts, cost=amounts, calls=amounts)


class Books(RuleBasedStateMachine):
    """A tree of accounts, and beside it what a plain count of every spend comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[int, Account] = {}
        self.bills: list[
            tuple[int, Amount, Amount | None]
        ] = []  # whose, reserved, used
        self.refused = 0

    def chain(self, number: int | None) -> list[Account]:
        found: list[Account] = []
        while number is not None:
            found.append(self.all[number])
            number = self.all[number].parent
        return found

    def write(self, accounts: list[Account]) -> None:
        self.all.update((one.id, one) for one in accounts)

    def pick(self, data: st.DataObject, *states: str) -> int:
        numbers = [n for n, one in self.all.items() if one.state in states]
        return data.draw(st.sampled_from(numbers))

    def below(self, number: int) -> list[Account]:
        return [one for one in self.all.values() if one.parent == number]

    @rule(budget=some_budget)
    @precondition(lambda self: not self.all)
    def open_top(self, budget: Budget) -> None:
        granted = core.grant((), budget, NOW)
        assert not isinstance(granted, Short)
        self.all[1] = granted[0]._replace(id=1)

    @rule(data=st.data(), budget=some_budget)
    @precondition(lambda self: any(a.state != "closed" for a in self.all.values()))
    def open(self, data: st.DataObject, budget: Budget) -> None:
        parent = self.pick(data, "open")
        chain = self.chain(parent)
        if len(chain) > 4:
            return
        granted = core.grant(chain, budget, NOW)
        if isinstance(granted, Short):
            self.refused += 1
            assert granted.asked > granted.left
            return
        number = max(self.all) + 1
        self.write([*granted[1], granted[0]._replace(id=number)])

    @rule(data=st.data(), amount=some_amount)
    @precondition(lambda self: self.all)
    def reserve(self, data: st.DataObject, amount: Amount) -> None:
        number = self.pick(data, "open", "ended", "closed")
        chain = self.chain(number)
        after = core.charge(chain, amount, NOW)
        if isinstance(after, Short):
            place = core.purse(chain, after.what)  # type: ignore[arg-type]
            assert place is not None
            assert chain[place].of(after.what).left == after.left  # type: ignore[arg-type]
            assert after.asked > after.left
            return
        self.write(after)
        self.bills.append((number, amount, None))

    @rule(data=st.data(), used=some_amount)
    @precondition(lambda self: any(b[2] is None for b in self.bills))
    def settle(self, data: st.DataObject, used: Amount) -> None:
        open_bills = [n for n, b in enumerate(self.bills) if b[2] is None]
        at = data.draw(st.sampled_from(open_bills))
        number, reserved, _ = self.bills[at]
        less = {m: max(0, reserved.of(m) - used.of(m)) for m in MEASURES}
        more = {m: max(0, used.of(m) - reserved.of(m)) for m in MEASURES}
        after = core.refund(self.chain(number), Amount(**less))
        self.write(core.overspend(after, Amount(**more)))
        self.bills[at] = number, reserved, used

    @rule(data=st.data())
    @precondition(lambda self: any(a.state == "open" for a in self.all.values()))
    def end(self, data: st.DataObject) -> None:
        number: int | None = self.pick(data, "open")
        assert number is not None
        self.all[number] = self.all[number]._replace(state="ended")
        while number is not None and self.all[number].state == "ended":
            chain = self.chain(number)
            if any(core.draws(child, chain) for child in self.below(number)):
                return
            after = core.close(chain)
            assert core.close(after) == after
            self.write(after)
            number = self.all[number].parent

    @invariant()
    def never_more_than_the_limit(self) -> None:
        for one in self.all.values():
            for line in one.lines:
                assert min(line.spent, line.held, line.over) >= 0
                assert line.limit is None or line.spent + line.held <= line.limit

    @invariant()
    def held_is_what_those_below_have_unspent(self) -> None:
        for number, one in self.all.items():
            for at, line in enumerate(one.lines):
                lines = [child.lines[at] for child in self.below(number)]
                assert line.held == sum(
                    i.held if i.limit is None else i.limit - i.spent for i in lines
                )

    @invariant()
    def spent_is_the_sum_of_all_bills_of_the_subtree(self) -> None:
        for number, one in self.all.items():
            for measure in MEASURES:
                billed = sum(
                    (reserved if used is None else used).of(measure)
                    for whose, reserved, used in self.bills
                    if number in {a.id for a in self.chain(whose)}
                )
                told = core.spent(one)
                assert told.over.of(measure) == one.of(measure).over
                assert getattr(told, measure) == billed

    @invariant()
    def who_goes_on_finds_its_purse_open(self) -> None:
        for number, one in self.all.items():
            chain = self.chain(number)
            for measure in MEASURES if one.state == "open" else ():
                place = core.purse(chain, measure)
                assert place is None or chain[place].state != "closed"

    @invariant()
    def what_is_closed_keeps_nothing_for_itself(self) -> None:
        for one in self.all.values():
            if one.state == "closed":
                assert not any(line.left for line in one.lines)

    def teardown(self) -> None:
        """When all has ended nothing is held any more, in whatever order it was."""
        for number in sorted(self.all, key=lambda n: (n * 7919) % 13):
            self.all[number] = self.all[number]._replace(state="ended")
        for _ in self.all:
            for number, one in list(self.all.items()):
                chain = self.chain(number)
                if one.state == "ended" and not any(
                    core.draws(child, chain) for child in self.below(number)
                ):
                    self.write(core.close(chain))
        assert all(one.state == "closed" for one in self.all.values())
        assert all(line.held == 0 for one in self.all.values() for line in one.lines)


def test_the_books_of_a_tree_are_right_whatever_happens() -> None:
    run_state_machine_as_test(Books, settings=settings(stateful_step_count=30))
