"""What `kernel.subscribe` tells of agents: the payloads, and what each channel carries.

A listener is called as `fn(channel, tree, subject, detail)`, in the step in which it
happened: what is told may still be lost by a crash, what a client is told may not.

channel               subject         detail
spawn                 slot            Whereabouts: a facet was made
start                 slot            Whereabouts: a life begins
stop                  slot            Stopped: a life is over, whatever ended it
abort                 list of slots   the reason, or None; the stops follow
delete                slot            Whereabouts: it is gone for good; the stops follow
destroy               slot            path of who destroys itself; a delete follows
upgrade               slot            Upgraded
restart               slot            Restarted: it broke before. Of a tree: (key, None)
failure               node or None    Failure: something raised, and was contained
stuck                 list of nodes   None: the kernel closes, and they do not stop
root:open             TreeKey         whether it was made
run:ask               slot            name of the class that is asked for
run:start, run:end    Subject         None; Ending
run:reattach          Subject         seconds of silence that this waiter bears
run:transition        Subject         Transition: asked, begun, resumed, or how it ended
run:reattached        Subject         how a waiter that joined it left: the status that it
                                      got, no-progress, or lost
run:many_detached     slot            how many: so many nobody waits for go on
run:many_retained     slot            how many: so many runs of it are kept
run:give_up           Subject         the reason: its budget or its silence is over
run:undelivered       Subject         Undelivered: who was to hear of it raised
turn:begin, turn:end  Subject         number of the attempt
turn:chunk            Stream          type of the chunk
fiber:start           Subject         FiberTold
fiber:progress        Subject         FiberProgress; None: a sign of life
fiber:interrupted     Subject         FiberTold: its task ended, and not by its own end
fiber:recovery:detected, :attempt     Subject, FiberTry: found so; its hook is called
fiber:recovery:handled                Subject, FiberTry: the hook has said how it ends
fiber:recovery:failed                 Subject, FiberTry: the hook raised
fiber:recovery:skipped                Subject, FiberTry: ended, deadline or max-age
fiber:end             Subject         FiberEnded: completed, failed or ended by others
schedule:create, queue:create         slot, Owed: one was stored
schedule:execute, queue:execute       slot, Owed: a call begins
schedule:skip         slot            Owed: a tick came too late for its policy
schedule:duplicate_warning            slot, Crowd: many calls of one method are due
schedule:retry, queue:retry           slot, Owed: a try failed, another one follows
schedule:error, queue:error           slot, Owed: attempts are used up
schedule:cancel, queue:cancel         slot, Owed: it was taken back, or its owner deleted
effect:begin, effect:end              slot, EffectTold: an intent; an outcome
effect:uncertain      slot            EffectTold: a person is to decide
connect, disconnect   slot            {"connectionId", …}; …, "code", "reason"
rpc, rpc:error        slot            {"method", "streaming"}; …, "error"
state:update          slot            {}
"""

from __future__ import annotations

from typing import Final, NamedTuple

CHANNEL_OF: Final = {"call": "schedule", "queue": "queue"}
"""The first half of the channels of a kind of job."""


class Whereabouts(NamedTuple):
    """Which agent: `path` is `Class/name` of each step, joined by "/"."""

    path: str
    class_name: str
    name: str


class Stopped(NamedTuple):
    """A life that is over. `reason` None: it ended by itself."""

    path: str
    reason: str | None


class Upgraded(NamedTuple):
    """The class that a slot had, and the class that it has; `path` by the new one."""

    path: str
    before: str
    after: str


class Restarted(NamedTuple):
    """How often an agent that broke was started again in a row, this time included."""

    path: str
    restarts: int


class Failure(NamedTuple):
    """Something raised. `error_id` is in the log and is what clients were told.

    `what` says where: broken, job, hook, turn, fiber, rpc, message, storage, …; `name`
    is the method, callback or hook.
    """

    error_id: str
    what: str
    name: str
    error: BaseException


class Transition(NamedTuple):
    """A run has come from one state to the next.

    `to`: `asked`, `begun`, `resumed` (its turn goes on in a new attempt), or the status
    that it ended with, and `reason`. `depth`: in how many runs it was asked for, of which
    `parent_run_id` is the nearest. `elapsed_s` since it was asked for. `attempt`: of the
    turn, 0 before the first.
    """

    run_id: str
    parent_run_id: str | None
    depth: int
    agent_type: str
    to: str
    reason: str | None
    elapsed_s: float
    attempt: int


class FiberTold(NamedTuple):
    """Which fiber. `managed`: its row outlives it."""

    name: str
    managed: bool


class FiberEnded(NamedTuple):
    """How a fiber ended, and how long after its start (seconds)."""

    name: str
    managed: bool
    status: str
    reason: str | None
    error: str | None
    elapsed_s: float


class FiberTry(NamedTuple):
    """One try to recover a fiber: how many without a stash, and what came of it."""

    name: str
    managed: bool
    attempt: int
    outcome: str | None = None


class EffectTold(NamedTuple):
    """Which effect, the number of its attempt, and its status by now."""

    id: str
    name: str
    key: str
    attempt: int
    status: str


class Undelivered(NamedTuple):
    """Something of a detached run that its asker was not told, in this try.

    `callback` is the method's name; `milestone` None: it is the end, which `status` says.
    """

    callback: str
    milestone: str | None
    status: str
    attempts: int
    error: str


class Crowd(NamedTuple):
    """Calls of one method that are due at once, suspiciously many: at least `calls`."""

    callback: str
    calls: int
    type: str = "one-shot"


class Owed(NamedTuple):
    """One schedule or queued call: its method, its id, and how its tries went."""

    callback: str
    id: str
    attempts: int = 0
    error: str | None = None
