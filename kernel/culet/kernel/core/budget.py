"""Budgets as accounts: reserve or refuse before anything is spent, return what is not.

Each run, and each turn of an agent's own, may have an account. An account that was
given an *amount of its own* of a measure (tokens, cost, calls) has a `limit` there: it
was reserved from the account above when the run was asked for. An account without one
*draws on the account above*, so siblings share. What pays for a spend is therefore the
first limited account on the way up, the *purse*; what is above a purse has promised
the whole of it already.

Three numbers a measure, and what they mean at every moment, in every account:

- `spent`: all that was spent in the subtree, whoever paid. A spend that is under way
  counts from the moment it is reserved, so one that a crash cut counts as spent; to
  settle it only gives back what was not needed.
- `held`: what accounts below have reserved from here and have not spent.
- `limit`: what may be spent here at most, or None.

Laws, each with a test: `spent + held <= limit` where there is a limit; a spend moves
the same sum in all accounts above (`spent` up, and `held` down above the purse), so the
`spent` of an account is the sum of its subtree; `held` is the sum of what the accounts
directly below have unspent (of a purse), or hold themselves; to close a purse returns
what is unused to the purse above, once; whatever the order in which accounts are closed,
in the end nothing is held. `over` stands beside them: what somebody outside has billed
beyond its reservation when there was no room left. It is told, and cannot be refused.

Depth and time are not spent. `depth` is how many levels of runs may still be below an
account, `deadline_at` the instant when its time is over; each child has the smaller of
its own and what its parent has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from culet.kernel.core.limits import AMOUNT_MAX, DELAY_MAX_S, DEPTH_MAX
from culet.kernel.errors import OverBudget, UsageError

Measure = Literal["tokens", "cost", "calls"]
State = Literal["open", "ended", "closed"]
MEASURES: Final[tuple[Measure, ...]] = get_args(Measure)


class Budget(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True,
    forbid_unknown_fields=True,
):  # fmt: skip
    """What a run, and all below it, may use up. None: as its asker may.

    `tokens`, `calls` and `cost` are whole numbers, `cost` in millionths of a dollar, so
    that sums are exact: 500_000 is $0.50. `depth`: levels of runs below it (0: it may ask
    for none). `seconds` of wall time from the dispatch on.
    """

    tokens: int | None = None
    cost: int | None = None
    calls: int | None = None
    depth: int | None = None
    seconds: float | None = None


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """So much of each measure; `cost` in millionths of a dollar."""

    tokens: int = 0
    cost: int = 0
    calls: int = 0

    def of(self, measure: Measure) -> int:
        """Return one of them."""
        return int(getattr(self, measure))


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What a run and all below it have spent, spends that are under way included.

    `over` of it was billed beyond what had been reserved, when nothing was left.
    """

    tokens: int = 0
    cost: int = 0
    calls: int = 0
    over: Amount = Amount()


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What may still be used up; None: there is no bound."""

    tokens: int | None = None
    cost: int | None = None
    calls: int | None = None
    depth: int | None = None
    seconds: float | None = None


class Line(NamedTuple):
    """One measure of one account."""

    limit: int | None = None
    spent: int = 0
    held: int = 0
    over: int = 0

    @property
    def left(self) -> int | None:
        """What may still be reserved of it here; None where it is not limited."""
        return None if self.limit is None else self.limit - self.spent - self.held


class Account(NamedTuple):
    """One account. `ended`: its turn is over and a run that draws on it is not."""

    id: int
    parent: int | None = None
    state: State = "open"
    depth: int | None = None
    deadline_at: int | None = None  # epoch ms
    lines: tuple[Line, ...] = (Line(),) * len(MEASURES)

    def of(self, measure: Measure) -> Line:
        """Return the line of a measure."""
        return self.lines[MEASURES.index(measure)]


Chain: TypeAlias = Sequence[Account]  # from one account up to the top, never empty


class Short(NamedTuple):
    """Refused: there is less left than is asked for. Nothing was changed."""

    what: str  # a measure, depth or seconds
    asked: int
    left: int
    may_return: bool  # whether what others have reserved would be enough

    def text(self) -> str:
        """Return a sentence that a model understands."""
        if self.what == "depth":
            return "the budget allows no run below this one"
        if self.what == "seconds":
            return "the time of the budget is over"
        what = "cost (millionths of a dollar)" if self.what == "cost" else self.what
        more = "; what others have reserved may come back" if self.may_return else ""
        return f"over budget: {self.asked} {what} asked for, {self.left} left{more}"

    def error(self) -> OverBudget:
        """Return it as what code that spends gets."""
        return OverBudget(
            self.text(), what=self.what, asked=self.asked, left=self.left,
            retryable=self.may_return,
        )  # fmt: skip


def checked(budget: Any) -> Budget | None:
    """Return a budget that can be kept. Raises `UsageError`."""
    if budget is None:
        return None
    if not isinstance(budget, Budget):
        msg = f"a budget is a Budget(...), not {budget!r:.100}"
        raise UsageError(msg)
    for measure in MEASURES:
        check_count(measure, getattr(budget, measure))
    check_count("depth", budget.depth, DEPTH_MAX)
    seconds = budget.seconds
    if seconds is not None and not (
        isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and 0 < seconds <= DELAY_MAX_S
    ):
        most = f"{DELAY_MAX_S:.0e}"
        msg = f"seconds of a budget are above 0 and at most {most}, not {seconds!r}"
        raise UsageError(msg)
    return budget


def check_count(name: str, value: Any, most: int = AMOUNT_MAX) -> None:
    """Raise `UsageError` for what is no amount; None is one that is not given."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        unit = " (millionths of a dollar)" if name == "cost" else ""
        msg = f"{name}{unit} is a whole number from 0 to {most}, not {value!r}"
        raise UsageError(msg)


# ---- what is left


def purse(chain: Chain, measure: Measure) -> int | None:
    """Return the place of the account that pays; None: nothing bounds that measure."""
    for place, account in enumerate(chain):
        if account.of(measure).limit is not None:
            return place
    return None


def left(chain: Chain, now: int) -> Left:
    """Return what the first account of a chain may still use up."""
    found: dict[str, int | None] = {}
    for measure in MEASURES:
        place = purse(chain, measure)
        found[measure] = None if place is None else chain[place].of(measure).left
    deadline_at = chain[0].deadline_at
    return Left(
        **found, depth=chain[0].depth,
        seconds=None if deadline_at is None else max(0, deadline_at - now) / 1000,
    )  # fmt: skip


def spent(account: Account) -> Spent:
    """Return what the subtree of an account has spent."""
    over = Amount(**{m: account.of(m).over for m in MEASURES})
    return Spent(
        **{m: account.of(m).spent + account.of(m).over for m in MEASURES}, over=over
    )


# ---- spending


def charge(
    chain: Chain, amount: Amount, now: int, under_way: Sequence[Amount] = ()
) -> list[Account] | Short:
    """Reserve a spend: it counts as spent from now on. Refused, nothing has changed.

    `under_way`: of each account, how much of its `spent` may yet be given back.
    """
    deadline_at = chain[0].deadline_at
    if deadline_at is not None and deadline_at <= now:
        return Short("seconds", 0, 0, may_return=False)
    for measure in MEASURES:
        short = _short(chain, measure, amount.of(measure), under_way)
        if short is not None:
            return short
    return _moved(chain, amount, 1)


def refund(chain: Chain, amount: Amount) -> list[Account]:
    """Take back a part of what was charged: the purse has it again, or who it is from."""
    accounts = _moved(chain, amount, -1)
    for at, measure in enumerate(MEASURES):
        place = purse(chain, measure)
        if place is not None and chain[place].state == "closed":
            _release(accounts, place, at, amount.of(measure))
    return accounts


def overspend(chain: Chain, amount: Amount) -> list[Account]:
    """Count what was billed beyond a reservation: as far as there is room, as spent."""
    there: dict[str, int] = {}
    beyond: dict[Measure, int] = {}
    for measure in MEASURES:
        place = purse(chain, measure)
        asked = amount.of(measure)
        room = asked if place is None else chain[place].of(measure).left
        there[measure] = min(asked, room or 0)
        beyond[measure] = asked - there[measure]
    accounts = _moved(chain, Amount(**there), 1)
    for at, measure in enumerate(MEASURES):
        if beyond[measure]:
            for place in range(len(accounts)):
                line = accounts[place].lines[at]
                line = line._replace(over=line.over + beyond[measure])
                accounts[place] = _with(accounts[place], at, line)
    return accounts


# ---- runs


def grant(
    chain: Chain | None,
    budget: Budget | None,
    now: int,
    under_way: Sequence[Amount] = (),
) -> tuple[Account, list[Account]] | Short:
    """Reserve what a run is given from its asker's account, or refuse the run.

    Returns the run's account (its id is the caller's to set) and the asker's as they are
    then. Without a chain nobody pays for it.
    """
    budget = budget or Budget()
    above = list(chain or ())
    parent = above[0] if above else None
    depth, deadline_at = budget.depth, None
    if budget.seconds is not None:
        deadline_at = now + max(1, round(budget.seconds * 1000))
    if parent is not None and parent.depth is not None:
        if parent.depth < 1:
            return Short("depth", 1, 0, may_return=False)
        depth = parent.depth - 1 if depth is None else min(depth, parent.depth - 1)
    if parent is not None and parent.deadline_at is not None:
        if parent.deadline_at <= now:
            return Short("seconds", 0, 0, may_return=False)
        deadline_at = min(deadline_at or parent.deadline_at, parent.deadline_at)
    for at, measure in enumerate(MEASURES):
        asked = getattr(budget, measure)
        if asked is None or not above:
            continue
        short = _short(above, measure, asked, under_way)
        if short is not None:
            return short
        place = purse(above, measure)
        for n in range(len(above) if place is None else place + 1):
            line = above[n].lines[at]
            above[n] = _with(above[n], at, line._replace(held=line.held + asked))
    lines = tuple(Line(limit=getattr(budget, m)) for m in MEASURES)
    made = Account(
        0, None if parent is None else parent.id, "open", depth, deadline_at, lines
    )
    return made, above


def drawing(parent: Account | None) -> Account:
    """Return an account that has nothing of its own (its id is the caller's to set)."""
    if parent is None:
        return Account(0)
    depth = None if parent.depth is None else max(0, parent.depth - 1)
    return Account(0, parent.id, depth=depth, deadline_at=parent.deadline_at)


def draws(child: Account, chain: Chain) -> bool:
    """Whether an account goes on drawing on what its parent, the first of `chain`, has.

    Its parent is not closed meanwhile: what it has reserved is still of use.
    """
    return child.state != "closed" and any(
        child.of(measure).limit is None and purse(chain, measure) is not None
        for measure in MEASURES
    )


def close(chain: Chain) -> list[Account]:
    """Close the first account: what it has not used returns. A second time, nothing."""
    accounts = list(chain)
    if accounts[0].state == "closed":
        return accounts
    accounts[0] = accounts[0]._replace(state="closed")
    for at, measure in enumerate(MEASURES):
        unused = accounts[0].of(measure).left
        if unused:
            _release(accounts, 0, at, unused)
    return accounts


# ---- parts


def _short(
    chain: Chain, measure: Measure, asked: int, under_way: Sequence[Amount]
) -> Short | None:
    place = purse(chain, measure)
    if place is None or not asked:
        return None
    line = chain[place].of(measure)
    assert line.limit is not None
    room = line.limit - line.spent - line.held
    if asked <= room:
        return None
    back = line.held + (under_way[place].of(measure) if under_way else 0)
    may_return = chain[place].state != "closed" and asked <= room + back
    return Short(measure, asked, room, may_return)


def _moved(chain: Chain, amount: Amount, sign: int) -> list[Account]:
    """Move a spend in or out: `spent` in every account, `held` above the purse."""
    accounts = list(chain)
    for at, measure in enumerate(MEASURES):
        delta = sign * amount.of(measure)
        if not delta:
            continue
        place = purse(chain, measure)
        for n, account in enumerate(accounts):
            line = account.lines[at]
            held = line.held - (delta if place is not None and n > place else 0)
            line = line._replace(spent=line.spent + delta, held=held)
            assert line.spent >= 0
            assert line.held >= 0
            accounts[n] = _with(account, at, line)
    return accounts


def _release(accounts: list[Account], place: int, at: int, unused: int) -> None:
    """Let a closed purse give back: to the purse above it, through those that are closed."""
    for n in range(place, len(accounts)):
        line = accounts[n].lines[at]
        if n > place:
            line = line._replace(held=line.held - unused)
        if line.limit is not None and accounts[n].state == "closed":
            line = line._replace(limit=line.limit - unused)
        assert line.held >= 0
        accounts[n] = _with(accounts[n], at, line)
        if n > place and line.limit is not None and accounts[n].state != "closed":
            return


def _with(account: Account, at: int, line: Line) -> Account:
    lines = (*account.lines[:at], line, *account.lines[at + 1 :])
    return account._replace(lines=lines)
