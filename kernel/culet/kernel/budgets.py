"""The accounts of one tree: reserve or refuse, settle, and return what is unused.

`core.budget` decides, the table `account` remembers. Every step here is a part of a
commit in `tree.db`: the one that inserts a run reserves for it, the one that ends a run
returns what it has not used. So a crash at any place leaks nothing, and there is nothing
to recover: a spend counts from the moment it is reserved, and one that was never settled
stays as it is.

Who pays is who asked: a run's account stands below the account of the run or turn whose
code dispatched it, detached or not; a call from one agent to another is paid by whoever
called, and so is a turn that it asks for. Any other own turn is a top: its budget is its
class's `turn_budget`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from .core import budget as core
from .core.budget import (
    MEASURES,
    Account,
    Amount,
    Budget,
    Left,
    Line,
    Short,
    Spent,
)
from .endings import BELOW, Subject
from .node import Node, Payer, ambient

if TYPE_CHECKING:
    from .tree import Tree

_LINES: Final = ", ".join(f"{m}_limit, {m}_spent, {m}_held, {m}_over" for m in MEASURES)
_UP: Final = (
    "WITH RECURSIVE up (id, n) AS (SELECT ?, 0 UNION ALL SELECT account.parent, up.n + 1"
    " FROM account JOIN up ON account.id = up.id WHERE account.parent IS NOT NULL)"
    f" SELECT account.id, parent, state, depth, deadline_at, {_LINES}"
    " FROM account JOIN up ON account.id = up.id ORDER BY up.n"
)
_BELOW: Final = (
    f"SELECT id, parent, state, depth, deadline_at, {_LINES} FROM account"
    " WHERE parent = ? AND state <> 'closed'"
)
_IDENTIFY: Final = "SELECT id FROM account WHERE slot = ? AND what = ?"
_WHOSE: Final = "SELECT slot, what FROM account WHERE id = ?"
_INSERT: Final = (
    "INSERT INTO account (slot, what, parent, state, depth, deadline_at,"
    " tokens_limit, cost_limit, calls_limit) VALUES (?, ?, ?, 'open', ?, ?, ?, ?, ?)"
    " RETURNING id"
)
_SETS: Final = ", ".join(
    f"{m}_limit = ?, {m}_spent = ?, {m}_held = ?, {m}_over = ?" for m in MEASURES
)
_UPDATE: Final = f"UPDATE account SET state = ?, {_SETS} WHERE id = ?"
_END: Final = (
    "UPDATE account SET state = 'ended' WHERE slot = ? AND what = ?"
    " AND state = 'open' RETURNING id, deadline_at"
)
_OPEN_BELOW: Final = BELOW + (
    "SELECT account.slot, what FROM account"
    " WHERE account.slot IN (SELECT slot FROM sub) AND state <> 'closed'"
    " ORDER BY id DESC"
)
_ASKERS: Final = (
    "SELECT owner, asker FROM run WHERE child = ? AND id = ?",
    "SELECT owner, asker FROM fiber WHERE owner = ? AND id = ?",
)
_TIME: Final = "time:"  # key of the look at a run when its time is over
_TURN_TIME: Final = "turn-time:"


@final
class Spend:
    """What was reserved for one call of a model, or of anything else that is paid.

    It counts as spent until `settle` says what it was. A crash, or code that is stopped
    before it says so, leaves it wholly spent.
    """

    __slots__ = ("_account", "_node", "_settled", "_way", "amount")

    def __init__(
        self, node: Node, account: int | None, amount: Amount, way: Sequence[int]
    ) -> None:
        self.amount = amount
        self._node, self._account = node, account
        self._way = way  # the accounts in which it is counted as under way
        self._settled = False

    def settle(
        self, *, tokens: int | None = None, cost: int | None = None,
        calls: int | None = None,
    ) -> bool:  # fmt: skip
        """Say what was used; the rest is given back. Never blocks.

        What is not said stays as it was reserved. More than was reserved is taken from
        what is left; beyond that it is told as `over`. False: settled before, or nobody
        pays for it any more; then nothing changes.
        """
        self._node.check()
        given = {"tokens": tokens, "cost": cost, "calls": calls}
        for name, value in given.items():
            core.check_count(name, value)
        if self._settled or self._account is None:
            return False
        self._settled = True
        said = {name: value for name, value in given.items() if value is not None}
        used = msgspec.structs.replace(self.amount, **said)
        return self._node.tree.budgets.settle(self, self._account, used)


@final
class Budgets:
    """The accounts of one tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db
        # of each account and measure: what is under way in this life and may come back
        self._under_way: Counter[tuple[int, int]] = Counter()
        self._spends: dict[int, set[Spend]] = {}  # that an account has under way itself

    # ---- reading

    def identify(self, slot: str, what: str) -> int | None:
        """Return the account of a run or own turn that has one."""
        rows = self.db.execute(_IDENTIFY, (slot, what))
        return int(rows[0][0]) if rows else None

    def chain(self, account: int | None) -> list[Account]:
        """Return an account and all that are above it; empty when there is none."""
        if account is None:
            return []
        return [_account(row) for row in self.db.execute(_UP, (account,))]

    def spent(self, payer: Payer | None) -> Spent:
        """Return what a run or own turn and all below it have spent."""
        account = None if payer is None else self.identify(*payer)
        chain = self.chain(account)
        return core.spent(chain[0]) if chain else Spent()

    def left(self, payer: Payer | None) -> Left:
        """Return what a payer may still use up."""
        chain = self.chain(self._paying(payer))
        return core.left(chain, self.tree.now()) if chain else Left()

    def _ways(self, chain: list[Account]) -> list[Amount]:
        return [
            Amount(**{m: self._under_way[a.id, n] for n, m in enumerate(MEASURES)})
            for a in chain
        ]

    # ---- who pays

    def _paying(self, payer: Payer | None) -> int | None:
        """Return the account of a payer that has one, or of whom it works for."""
        while payer is not None:
            account = self.identify(*payer)
            if account is not None:
                return account
            payer = self._above(payer)
        return None

    def _above(self, payer: Payer) -> Payer | None:
        """Return who waits for a run or fiber."""
        for sql in _ASKERS:
            rows = self.db.execute(sql, payer)
            if rows:
                return None if rows[0][1] is None else (rows[0][0], rows[0][1])
        return None

    def _made(self, payer: Payer | None) -> int | None:
        """Return the account of a payer, made if need be; in a transaction."""
        if payer is None:
            return None
        account = self.identify(*payer)
        if account is not None:
            return account
        above = self._above(payer)
        subject = self.tree.endings.subject(*payer)
        if subject is None or subject.kind == "fiber":
            return self._made(above)
        if self.tree.endings.status(subject) != "running":
            return None  # code that goes on after its turn: nobody pays for it
        chain = self.chain(self._made(above))
        return self._insert(payer, core.drawing(chain[0] if chain else None))

    def _insert(self, of: Payer, account: Account) -> int:
        limits = [line.limit for line in account.lines]
        params = (*of, account.parent, account.depth, account.deadline_at, *limits)
        return int(self.db.execute(_INSERT, params)[0][0])

    def _write(self, before: Sequence[Account], after: Sequence[Account]) -> None:
        """Store what has changed; in a transaction."""
        for old, new in zip(before, after, strict=True):
            if new != old:
                numbers = [number for line in new.lines for number in line]
                self.db.execute(_UPDATE, (new.state, *numbers, new.id))

    # ---- runs

    def refusal(self, payer: Payer | None, budget: Budget | None) -> Short | None:
        """Say why a run may not be dispatched; the step that inserts it reserves."""
        chain = self.chain(self._paying(payer))
        if not chain:
            return None
        granted = core.grant(chain, budget, self.tree.now(), self._ways(chain))
        return granted if isinstance(granted, Short) else None

    def open_run(
        self, subject: Subject, payer: Payer | None, budget: Budget | None, *,
        loose: bool,
    ) -> None:  # fmt: skip
        """Open the account of a run and reserve what it is given; in its transaction.

        A run that is given nothing and whose asker has no account gets one when it spends;
        a `loose` one gets it now, for its row does not say who has asked.
        """
        bare = budget is None and not (loose and payer is not None)
        if bare and self._paying(payer) is None:
            return
        chain = self.chain(self._made(payer))
        granted = core.grant(chain, budget, self.tree.now())
        if isinstance(granted, Short):
            raise granted.error()  # it was not refused in this very step: our bug
        made, above = granted
        self._write(chain, above)
        self._insert((subject.slot, subject.id), made)
        own = budget is not None and budget.seconds is not None
        if made.deadline_at is not None and (loose or own):
            self._owe_look(subject.owner, _TIME, subject.id, made.deadline_at)

    def ask_turn(self, node: Node, turn_id: str) -> None:
        """Code of somebody's turn asks for an own turn: that pays; in its transaction.

        Raises `OverBudget`. A turn that an own turn of the same agent asks for is a top.
        """
        here = ambient.get()
        payer = None if here is None else here.pays
        account = self._paying(payer)
        if account is None or payer is None:
            return
        chain, budget = self.chain(account), node.kind.cls.turn_budget
        above = self.db.execute(_WHOSE, (account,))[0]
        subject = self.tree.endings.subject(*above)
        if subject is None or (subject.kind == "turn" and subject.slot == node.slot):
            return
        granted = core.grant(chain, budget, self.tree.now(), self._ways(chain))
        if isinstance(granted, Short):
            raise granted.error()
        made, after = granted
        self._write(chain, after)
        self._insert((node.slot, turn_id), made)
        if made.deadline_at is not None:
            self._owe_look(node.slot, _TURN_TIME, turn_id, made.deadline_at)

    def open_turn(self, subject: Subject, budget: Budget | None) -> None:
        """Open the account of an own turn that begins, unless it has one."""
        if budget is None or subject.kind != "turn":
            return
        if self.identify(subject.slot, subject.id) is not None:
            return
        granted = core.grant((), budget, self.tree.now())
        assert not isinstance(granted, Short)  # nobody has to give it
        made, _above = granted
        with self.tree.transaction():
            self._insert((subject.slot, subject.id), made)
            if made.deadline_at is not None:
                at = made.deadline_at
                self._owe_look(subject.slot, _TURN_TIME, subject.id, at)

    def _owe_look(self, owner: str, key: str, what: str, at: int) -> None:
        lane, key = f"limit:{what}", f"{key}{what}"
        self.tree.jobs.add(owner, "limit", what, at=at, lane=lane, key=key)

    def out_of_time(self, owner: str, what: str, key: str | None) -> Subject | None:
        """Return whose time a `limit` job is about; None: it is about something else."""
        if key == f"{_TURN_TIME}{what}":
            return Subject("turn", owner, what, owner)
        if key == f"{_TIME}{what}":
            return self.tree.runs.subject(owner, what)
        return None

    # ---- ends

    def end(self, subject: Subject) -> None:
        """A run or own turn ends: what it has not used returns; in the ending's commit."""
        rows = self.db.execute(_END, (subject.slot, subject.id))
        if not rows:
            return
        account, deadline_at = rows[0]
        if subject.kind == "turn" and deadline_at is not None:
            owed = "owner = ? AND kind = 'limit' AND key = ?"
            self.tree.jobs.drop(owed, (subject.slot, f"{_TURN_TIME}{subject.id}"))
        for spend in self._spends.pop(account, ()):  # will not come back of themselves
            self._uncount(spend)
        self._settle_up(account)

    def _settle_up(self, account: int | None) -> None:
        """Close an account whose turn is over once nothing draws on it; and so on upwards."""
        while account is not None:
            chain = self.chain(account)
            if not chain or chain[0].state != "ended":
                return
            below = map(_account, self.db.execute(_BELOW, (account,)))
            if any(core.draws(child, chain) for child in below):
                return
            self._write(chain, core.close(chain))
            account = chain[0].parent

    def forget(self, slot: str, what: str) -> None:
        """The row of a run is about to go: nothing stays reserved for it; in a transaction."""
        chain = self.chain(self.identify(slot, what))
        if chain and chain[0].state != "closed":
            self._write(chain, core.close(chain))
            self._settle_up(chain[0].parent)

    def forget_below(self, slot: str) -> None:
        """A subtree is deleted: so for all that its agents have asked for or spent."""
        for one, what in self.db.execute(_OPEN_BELOW, (slot,)):
            self.forget(one, what)

    # ---- spending

    def reserve(self, node: Node, payer: Payer | None, amount: Amount) -> Spend:
        """Reserve a spend of code of `node`. Raises `OverBudget`."""
        if payer is None:
            return Spend(node, None, amount, ())
        with self.tree.transaction():
            chain = self.chain(self._made(payer))
            if not chain:
                return Spend(node, None, amount, ())
            after = core.charge(chain, amount, self.tree.now(), self._ways(chain))
            if isinstance(after, Short):
                raise after.error()
            self._write(chain, after)
        spend = Spend(node, chain[0].id, amount, [account.id for account in chain])
        self._spends.setdefault(chain[0].id, set()).add(spend)
        self._count(spend, 1)
        return spend

    def settle(self, spend: Spend, account: int, used: Amount) -> bool:
        """Give back what of a reservation was not used; count what was beyond it."""
        spends = self._spends.get(account, set())
        if spend in spends:
            spends.remove(spend)
            self._uncount(spend)
        if not spends:
            self._spends.pop(account, None)
        with self.tree.transaction():
            chain = self.chain(account)
            if not chain:
                return False
            rest, more = _apart(spend.amount, used)
            self._write(chain, core.overspend(core.refund(chain, rest), more))
        return True

    def _uncount(self, spend: Spend) -> None:
        self._count(spend, -1)

    def _count(self, spend: Spend, sign: int) -> None:
        for account in spend._way:
            for n, measure in enumerate(MEASURES):
                self._under_way[account, n] += sign * spend.amount.of(measure)
                if not self._under_way[account, n]:
                    del self._under_way[account, n]


def _apart(reserved: Amount, used: Amount) -> tuple[Amount, Amount]:
    """Return what was not used of a reservation, and what was used beyond it."""
    pairs = [(m, reserved.of(m) - used.of(m)) for m in MEASURES]
    rest = Amount(**{m: max(0, difference) for m, difference in pairs})
    return rest, Amount(**{m: max(0, -difference) for m, difference in pairs})


def _account(row: tuple[Any, ...]) -> Account:
    lines = tuple(Line(*row[at : at + 4]) for at in range(5, 5 + 4 * len(MEASURES), 4))
    return Account(row[0], row[1], row[2], row[3], row[4], lines)


@final
class BudgetNoun:
    """What the code of one agent may spend, in the turn that it works for."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def left(self) -> Left:
        """Return what may still be used up; None where nothing bounds it."""
        return self._node.tree.budgets.left(self._payer())

    def spent(self) -> Spent:
        """Return what this turn and all below it have spent so far."""
        return self._node.tree.budgets.spent(self._payer())

    async def reserve(self, *, tokens: int = 0, cost: int = 0, calls: int = 0) -> Spend:
        """Reserve before a call that is paid; once this returns it is durable.

        Settle it with what it was. Raises `OverBudget`, and then nothing was reserved;
        `UsageError` for what is no amount (`cost` is in millionths of a dollar).
        """
        spend = self.reserve_nowait(tokens=tokens, cost=cost, calls=calls)
        await self._node.tree.durable()
        return spend

    def reserve_nowait(
        self, *, tokens: int = 0, cost: int = 0, calls: int = 0
    ) -> Spend:
        """Reserve, for code that awaits `durable()` itself before it calls. Never blocks."""
        node = self._node
        node.check()
        given = {"tokens": tokens, "cost": cost, "calls": calls}
        for name, value in given.items():
            core.check_count(name, value)
        return node.tree.budgets.reserve(node, self._payer(), Amount(**given))

    def _payer(self) -> Payer | None:
        here = ambient.get()
        return None if here is None or here.node is not self._node else here.pays
