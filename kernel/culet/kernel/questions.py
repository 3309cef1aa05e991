"""The questions of runs: calls that wait for a person or a client, at every level.

A turn that parks says which calls it waits for. What it says goes up, in the same step,
into the streams of the runs that wait for it, so whoever watches the topmost run sees
all that is asked below, with the id of the run that asks; and everybody above may
answer it by that id. The first answer stands, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import trio

from .calls import stored_json
from .core import clientframes as client
from .core.questions import Policy, check_policy, decide, shown
from .endings import BELOW, Subject
from .errors import CuletError, NotFound, UsageError
from .milestones import PROGRESS, Progress
from .node import State

if TYPE_CHECKING:
    from .node import Node
    from .tree import Tree
    from .turn import Turn

RunAnswer = client.ToolResult | client.ToolApproval
_RUN: Final = "SELECT owner, asker FROM run WHERE child = ? AND id = ?"
_FIBER: Final = "SELECT asker FROM fiber WHERE owner = ? AND id = ?"
_PAYLOAD: Final = (
    "SELECT payload FROM job WHERE owner = ? AND kind = 'turn' AND what = ?"
)
_NAMED: Final = (
    f"{BELOW}SELECT child, status FROM run WHERE id = ?"
    " AND owner IN (SELECT slot FROM sub) ORDER BY born"
)
WAITING: Final = "waiting"
_ANSWERED: Final = "answered"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One call that waits for an answer. `path`: of the agent whose run asks.

    `state` is `approval-requested` where a yes or a no is wanted, else the call waits
    for the result of a client that carries it out. `uncertain`: it may have been carried
    out already, and a yes carries it out once more.
    """

    run_id: str
    path: str
    tool_call_id: str
    tool_name: str
    state: str
    input: Any = None
    uncertain: bool = False


@final
class Questions:
    """The questions of the runs of one tree, in this life of it."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.db = tree.db
        # turns whose watchers see a question
        self._telling: set[tuple[str, str]] = set()

    # ---- a turn that asks

    def park(self, turn: Turn, calls: Sequence[Mapping[str, Any]]) -> None:
        """A turn waits for answers to these calls: whoever waits for it is told.

        Each is a mapping with `toolCallId`, `toolName`, `state`, `input`, and `uncertain`
        where it may have been carried out already. With none
        left it goes on.
        """
        turn.waits = [{"runId": turn.request_id, **call} for call in calls]
        if turn.waits:
            turn.park()
        else:
            turn.parked = False
        for one in self._upwards(turn):
            self.tell(one)

    def tell(self, turn: Turn) -> None:
        """Report what a run and all that it waits for ask, if that is news to anybody."""
        if turn.run_id is None or turn._node.kind.runs_itself:
            return  # what its adapter says is numbered by its adapter
        calls = self._below(turn)
        if calls:
            told = shown(calls, self.tree.kernel.limits)
            said = Progress(phase=WAITING, message="waits for an answer",
                            data={"calls": told})  # fmt: skip
        elif turn.says_waiting:
            said = Progress(phase=_ANSWERED)
        else:
            return
        with suppress(CuletError):  # it has just ended
            turn.report(said)
            if not calls:  # nobody would say it again, so it is not held back
                turn.keep_last()
            turn.says_waiting = bool(calls)
            place = turn._node.slot, turn.request_id
            (self._telling.add if calls else self._telling.discard)(place)

    def ended(self, above: Iterable[Turn]) -> None:
        """What had asked below these turns has ended: it is said in that very step."""
        for turn in above:
            self.tell(turn)
            with suppress(CuletError):
                turn._stream.flush()

    def above(self, ended: Iterable[Subject]) -> list[Turn]:
        """Return who waits for what is about to end, and has told what somebody asks.

        Once that has ended they have to `tell` anew: nobody can answer it any more.
        """
        live = self.tree.turns.live
        self._telling.intersection_update(live)
        if not self._telling:
            return []
        places = dict.fromkeys((one.slot, one.id) for one in ended)
        found = dict.fromkeys(up for place in places for up in self._chain(*place))
        return [live[up] for up in found if up in self._telling and up not in places]

    def _below(self, turn: Turn) -> list[dict[str, Any]]:
        subject = Subject("turn", turn._node.slot, turn.request_id, turn._node.slot)
        live, found = self.tree.turns.live, list(turn.waits)
        for one in self.tree.endings.asked_by(subject):
            other = live.get((one.slot, one.id))
            found += () if other is None else other.waits
        return found

    def _chain(self, slot: str, what: str) -> Iterator[tuple[str, str]]:
        """Yield a turn, the one that waits for it, and so on: (slot, id) each."""
        while True:
            yield slot, what
            rows = self.db.execute(_RUN, (slot, what))
            if not rows or rows[0][1] is None:
                return
            slot, what = rows[0]
            while fiber := self.db.execute(_FIBER, (slot, what)):
                if fiber[0][0] is None:
                    break
                what = fiber[0][0]

    def _upwards(self, turn: Turn) -> list[Turn]:
        live = self.tree.turns.live
        found = map(live.get, self._chain(turn._node.slot, turn.request_id))
        return [one for one in found if one is not None]

    def verdict(self, turn: Turn, state: str) -> str:
        """Return what becomes of a question of this turn: `ask`, `deny` or `approve`."""
        return decide(self._policies(turn), state)

    def _policies(self, turn: Turn) -> Iterator[Policy]:
        for place in self._chain(turn._node.slot, turn.request_id):
            rows = self.db.execute(_PAYLOAD, place)
            payload = stored_json(rows[0][0]) if rows else None
            said = payload.get("questions") if isinstance(payload, dict) else None
            if said is not None:
                yield check_policy(said)

    # ---- for those above

    def all(self, slot: str, run_id: str | None = None) -> list[Question]:
        """Return what the runs at and below an agent ask; or one of them and all below."""
        tops = [slot]
        if run_id is not None:
            tops = [child for child, _status in self._named(slot, run_id)]
        sub = f"{BELOW}SELECT child, id FROM run WHERE status = 'running' AND {{}} ORDER BY born"
        out = []
        for top in tops:
            where = "owner IN (SELECT slot FROM sub)"
            if run_id is not None:
                where = "child IN (SELECT slot FROM sub)"
            for child, what in self.db.execute(sub.format(where), (top,)):
                turn = self.tree.turns.live.get((child, what))
                out += [] if turn is None else self._questions(turn)
        return out

    def _questions(self, turn: Turn) -> list[Question]:
        path = turn._node.path_text()
        return [
            Question(
                run_id=turn.request_id, path=path, tool_call_id=call["toolCallId"],
                tool_name=call["toolName"], state=call["state"], input=call.get("input"),
                uncertain=call.get("uncertain", False),
            )
            for call in turn.waits
        ]  # fmt: skip

    def _named(self, slot: str, run_id: str) -> list[tuple[str, str]]:
        rows = self.db.execute(_NAMED, (slot, run_id))
        if not rows:
            msg = f"there is no run {run_id!r} below"
            raise NotFound(msg)
        return [(str(child), str(status)) for child, status in rows]

    def asks(self, slot: str, run_id: str, call_id: str) -> str | None:
        """Return the agent of the run below that is meant; None: it has ended.

        Raises `NotFound`, and `UsageError` where several runs of that id go on and not
        one of them alone has asked for this call.
        """
        found = [c for c, status in self._named(slot, run_id) if status == "running"]
        if len(found) > 1:
            live = self.tree.turns.live
            turns = [(child, live.get((child, run_id))) for child in found]
            found = [
                child
                for child, turn in turns
                if turn is not None
                and any(call["toolCallId"] == call_id for call in turn.waits)
            ]
            if len(found) != 1:
                msg = (
                    f"several runs {run_id!r} go on below, and not one asks {call_id!r}"
                )
                raise UsageError(msg)
        return found[0] if found else None

    async def answer(self, slot: str, run_id: str, answer: RunAnswer) -> bool:
        """Give an answer to a run at or below; whether it was taken: the first one is.

        It wakes the agent of that run and makes none.
        """
        child = self.asks(slot, run_id, answer.tool_call_id)
        if child is None:
            await trio.lowlevel.checkpoint_if_cancelled()
            return False
        node = await self.tree.wake(child)
        run = self.tree.runs.of_child(child, run_id)
        if run is None or run.status != "running" or node.state is not State.LIVE:
            return False
        return node.agent._answered(run_id, answer)


def says_waiting(chunks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last report of a turn so far is that it waits."""
    for chunk in reversed(chunks):
        if chunk.get("type") == PROGRESS:
            return (chunk.get("data") or {}).get("phase") == WAITING
    return False


def result(
    call_id: str, output: Any = None, error: str | None = None
) -> client.ToolResult:
    """Return the result of a call, or the error in which it ended."""
    if error is not None:
        return client.ToolResult(
            tool_call_id=call_id, state="output-error", error_text=error
        )
    try:
        plain = msgspec.json.decode(msgspec.json.encode(output))
    except (TypeError, ValueError, RecursionError) as wrong:
        msg = f"the result of a call cannot be copied: {wrong}"
        raise UsageError(msg) from None
    return client.ToolResult(tool_call_id=call_id, output=plain)


async def parent_answers(node: Node, run_id: str, answer: RunAnswer) -> bool:
    """An agent answers for its own runs, and for those below."""
    node.check()
    return await node.tree.questions.answer(node.slot, run_id, answer)
