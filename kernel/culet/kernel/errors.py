"""Every error that Culet raises, named by who can act on it.

A refusal that is normal (a late cancel, a run id that is known) is a value, never
an exception. What crosses the wire is a short public text and an error id; the
details stay in the log. There is no BaseException of our own: trio's `Cancelled`
already is the way to unwind a task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .stops import AbortReceipt


class CuletError(Exception):
    """Base of all errors of this package."""


class UsageError(CuletError):
    """The caller's mistake: a bad name, an unknown class, a value that cannot be copied.

    Nothing was changed. Repeating the call will fail in the same way.
    """


class NotFound(CuletError):
    """What was named does not exist; `lookup` and the web answer with it, never `get`."""


class Refused(CuletError):
    """A gate, a readonly connection or an origin rule said no.

    `status` is the HTTP status that tells a client so.
    """

    def __init__(self, message: str, *, status: int = 403) -> None:
        super().__init__(message)
        self.status = status


class UserError(CuletError):
    """What an agent says to its client: whoever asked can read its text and act on it.

    Raise it in a method, a turn, a tool or a hook of an agent. The text goes out as it
    is; that of an exception which is no Culet error never does. `status` is the HTTP
    status and, where connecting fails, 4000 + status the close code.
    """

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class CapacityError(CuletError):
    """A named bound is reached. Nothing was stored; trying again later may work."""


class OverBudget(CuletError):
    """There is less left of a budget than was asked for. Nothing was spent.

    `what` is a measure (`tokens`, `cost`, `calls`), `depth` or `seconds`; `left` is what
    was left of it. `retryable`: what others have reserved would be enough, and may come
    back.
    """

    def __init__(
        self,
        message: str,
        *,
        what: str = "",
        asked: int = 0,
        left: int = 0,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.what, self.asked, self.left = what, asked, left
        self.retryable = retryable


class FacetAborted(CuletError):
    """The agent was stopped while, or before, this call ran in it.

    `reason` is the text given to the abort. `get` makes the agent live again.
    """

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "aborted")
        self.reason = reason


class FacetBroken(CuletError):
    """The agent failed by itself: in `on_start` or in a background task.

    `__cause__` is the original error. The next `get` starts it again, with back-off.
    """


class ChildDidNotStop(CuletError):
    """An abort reached its deadline and code still runs; it is fenced and listed.

    `paths` names the nodes that did not stop; `receipt` is that of the abort, for the
    others: None where nobody asked for one.
    """

    def __init__(self, paths: list[str], receipt: AbortReceipt | None = None) -> None:
        super().__init__(f"did not stop, fenced: {', '.join(paths)}")
        self.paths = paths
        self.receipt = receipt


class Deleted(CuletError):
    """The slot is gone for good. A stub, job or frame that names it came too late."""


class EffectFailed(CuletError):
    """The recorded outcome of an effect is an error: what its function raised.

    `effect_id` names it in the ledger. Asking again gives the same error; doing it again
    takes another key.
    """

    def __init__(self, message: str, effect_id: str) -> None:
        super().__init__(message)
        self.effect_id = effect_id


class EffectUncertain(CuletError):
    """Nobody knows whether an effect was carried out. It is listed until it is decided.

    A function that does an effect raises it, too, when it cannot know (an answer that
    never came): then the effect's policy says what is done.
    """

    def __init__(self, message: str = "", effect_id: str | None = None) -> None:
        super().__init__(message or "nobody knows whether it was carried out")
        self.effect_id = effect_id


class StorageError(CuletError):
    """The store could not do it; the tree was restarted or refused, never half done."""


class StorageFull(StorageError):
    """The disk, or the quota of this agent's file, is full."""


class StorageCorrupt(StorageError):
    """A file is not what it must be. Run `culet doctor` on a copy."""


class StorageBusy(StorageError):
    """Another process holds the folder or the file."""


class SchemaTooNew(StorageError):
    """The folder was written by a newer version; use that version."""


class SqlError(StorageError):
    """A user's SQL statement was refused or failed. `query` is the statement."""

    def __init__(self, message: str, query: str) -> None:
        super().__init__(f"{message} in {query!r}")
        self.query = query


class Fenced(StorageError):
    """This node may no longer write: it was stopped, or its tree restarts."""


class ProtocolError(CuletError):
    """Somebody broke the wire protocol."""


class RemoteProtocolError(ProtocolError):
    """The other side sent what it must not; `close_code` is the fitting answer."""

    def __init__(self, message: str, *, close_code: int = 1002) -> None:
        super().__init__(message)
        self.close_code = close_code


class LocalProtocolError(ProtocolError):
    """Our side of a connection was used in a way that the protocol does not allow."""


class CallFailed(CuletError):
    """A method or turn that was asked for over a socket failed.

    The text is what the server told, and its log has the details.
    """


class ConnectionLost(CuletError):
    """The socket went before the answer came: it may have happened or not.

    `code` is the WebSocket close code, 1006 when there was none.
    """

    def __init__(self, message: str, *, code: int = 1006) -> None:
        super().__init__(message)
        self.code = code


class ConnectionEnded(CuletError):
    """The server ended the connection for good; connecting again would not help.

    `code` is 1008 or 4000-4999; a refusal by HTTP status 4xx is told as 4000 + status.
    """

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class InternalError(CuletError):
    """A bug of ours. Please report it with the error id."""


_TOLD: Final = (
    UserError, UsageError, NotFound, Refused, CapacityError, OverBudget, FacetAborted,
    Deleted,
)  # fmt: skip


def is_told(error: BaseException) -> bool:
    """Whether the text of an error is for clients; of any other they get an error id.

    A list of those that are: the others hold file names, queries, addresses, and what
    other code has raised.
    """
    return isinstance(error, _TOLD)
