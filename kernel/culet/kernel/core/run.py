"""Runs as facts: their record, their ids, and what is told about them to whom.

A run is one row of its parent's: why it exists and how it ended. All that is shown of
it (frames, hooks, the model's view) is derived from that row, so that it is the same
live, in replay and after a crash. Three parties see three different things. *Clients*
get a preview of the input that tells its shape and never its text, unless the caller
chose otherwise. *Hooks* get the record. The *model* gets the result, or an envelope
that says plainly that there is none: never an empty success.

The id of a tool call's run is derived from two ids that are durable before the
dispatch, so a turn that is resumed after a crash finds its run instead of making a
second one. Laws: `derive_run_id` is a function, injective up to SHA-256, and safe as
an agent's name and in a URL; `shape_preview` fits its bound and holds no text of the
input; of the progress reports of a run at most one in `progress_s` is stored and the
last one always is (`coalesce`).
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Final, Literal, Protocol

import msgspec

from culet.kernel.core.budget import Spent
from culet.kernel.core.limits import DEFAULT, ERROR_CHARS

Status = Literal["running", "completed", "error", "aborted", "interrupted"]
_KEYS_SHOWN: Final = 64  # of one mapping, then `…`
_KEY_LENGTH: Final = 64  # of one key, then `…`
_DEPTH_SHOWN: Final = 6


class AgentToolRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run as its row tells it; `status` is always the row's.

    `n` is the length of its stream, known with the end. `preview` is what clients see
    of the input. Instants are epoch milliseconds. `usage` is the child's own word, `total`
    what it and all below it have spent by their accounts (see `Budget`), None for nothing.
    `may_return`, of one that was refused for its budget: others hold what would be enough.
    `error_id`, of one that raised: what clients are told instead of `error`, and what the
    log has the traceback under.
    """

    run_id: str
    agent_type: str
    status: Status = "running"
    parent_tool_call_id: str | None = None
    order: int = 0
    display: Any = None
    preview: Any = None
    output: Any = None
    summary: str | None = None
    error: str | None = None
    reason: str | None = None
    usage: Any = None
    n: int | None = None
    started_at: int = 0
    completed_at: int | None = None
    total: Spent | None = None
    may_return: bool = False
    error_id: str | None = None

    @property
    def retryable(self) -> bool:
        """Whether asking again may help: interrupted, out of capacity, still running.

        Of a run that was refused for its budget: whether what others hold may come back.
        """
        if self.reason == "budget":
            return self.may_return
        return self.status in {"interrupted", "running"} or self.reason == "capacity"


class Result(Protocol):
    """What `model_value` needs of a run."""

    @property
    def status(self) -> Status: ...  # noqa: D102
    @property
    def output(self) -> Any: ...  # noqa: D102
    @property
    def summary(self) -> str | None: ...  # noqa: D102
    @property
    def error(self) -> str | None: ...  # noqa: D102
    @property
    def reason(self) -> str | None: ...  # noqa: D102
    @property
    def retryable(self) -> bool: ...  # noqa: D102


def derive_run_id(message_id: str, tool_call_id: str) -> str:
    """Return the run id of a tool call of an assistant message: 36 safe characters.

    Both ids may hold anything; the same pair always gives the same id.
    """
    pair = msgspec.json.encode([message_id, tool_call_id])
    digest = hashlib.sha256(b"culet.run\0" + pair).digest()[:20]
    return "run-" + base64.b32encode(digest).decode().lower()


def steady_json(value: Any) -> bytes:
    """Return a value as JSON, its sets in an order that each process gives them.

    As they come where they cannot be sorted. Raises as `msgspec.json.encode` does.
    """
    try:
        return msgspec.json.encode(value, order="deterministic")
    except TypeError:  # a set of mixed kinds, keys that are no text, or no JSON at all
        return msgspec.json.encode(value)


def input_digest(value_json: bytes) -> str:
    """Return a digest of an input's JSON, to tell a known run id with other input.

    The order of keys and white space do not count. Raises `msgspec.DecodeError` for
    what is no JSON.
    """
    value = msgspec.json.decode(value_json)
    plain = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(plain).hexdigest()


def shape_preview(value: Any, max_bytes: int = DEFAULT.preview_bytes) -> Any:
    """Return the shape of a JSON value: keys, types and lengths, never its text.

    Its JSON has at most `max_bytes` bytes: a deep or wide value is shown less deeply.
    """
    for depth in range(_DEPTH_SHOWN, -1, -1):
        shape = _shape(value, depth)
        if len(msgspec.json.encode(shape)) <= max_bytes:
            return shape
    return _shape(value, 0)


def model_value(run: Result) -> Any:
    """Return what the model is told: the output or summary, else a failure envelope.

    A run that still goes on after a waiter gave up says so with `childStillRunning`.
    """
    if run.status == "completed":
        return run.output if run.output is not None else run.summary or ""
    told: dict[str, Any] = {"ok": False, "status": run.status}
    if run.status != "running":
        told["error"] = run.error or default_error(run.status, run.reason)
    told["retryable"] = run.retryable
    if run.reason is not None and run.status != "running":
        told["reason"] = run.reason
    if run.status == "running":
        told["childStillRunning"] = True
    return told


def cut_bytes(text: str, most: int) -> str:
    """Return as much of a text as has at most so many bytes in UTF-8."""
    if len(text) * 4 <= most:
        return text
    return text.encode(errors="surrogatepass")[:most].decode(errors="ignore")


def storable(text: str | None, most: int | None = None) -> str | None:
    """Return a text as a row can hold it: at most so many characters, all of them Unicode.

    What an error says must not keep alive what it ends.
    """
    return text if text is None else text[:most].encode(errors="replace").decode()


def error_text(error: BaseException) -> str:
    """Return what a row keeps of an error, with its class; its own `__str__` may fail."""
    return storable(f"{type(error).__name__}: {_said(error)}", ERROR_CHARS) or ""


def error_words(error: BaseException) -> str:
    """Return what an error says, or its class where it says nothing."""
    return storable(_said(error), ERROR_CHARS) or type(error).__name__


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


def default_error(status: str, reason: str | None) -> str:
    """Return the text for a run that ended without one of its own."""
    texts = {
        "error": "the run failed",
        "aborted": "the run was cancelled",
        "interrupted": "the run was interrupted",
    }
    text = texts.get(status, f"the run is {status}")
    return f"{text} ({reason})" if reason else text


def public_error(
    status: str, reason: str | None, error: str | None, error_id: str | None
) -> str:
    """Return what clients are told of a run or turn that ended so: never empty.

    What has an error id says nothing else.
    """
    if error_id is not None:
        return f"{default_error(status, None)} (error {error_id})"
    return error or default_error(status, reason)


def as_told(run: AgentToolRun) -> AgentToolRun:
    """Return a run as clients may read it: without what its code has raised."""
    if run.error_id is None:
        return run
    told = public_error(run.status, run.reason, run.error, run.error_id)
    return msgspec.structs.replace(run, error=told)


Coalesced = Literal["store", "hold"]


def coalesce(
    last_stored_ms: int | None,
    now_ms: int,
    *,
    last: bool = False,
    progress_s: float = DEFAULT.progress_s,
) -> Coalesced:
    """Decide about a progress report: store it, or hold it as the newest so far.

    One in `progress_s` is stored. A held report replaces the one held before; it is
    stored when its time comes (ask again) or with `last`, which is a milestone, a
    fraction of 1 or the end of the run. A clock that went back does not hold longer.
    """
    if last or last_stored_ms is None:
        return "store"
    waited_ms = now_ms - last_stored_ms
    return "hold" if 0 <= waited_ms < progress_s * 1000 else "store"


def _shape(value: Any, depth: int) -> Any:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return f"string({len(value)})"
        case bytes() | bytearray():
            return f"bytes({len(value)})"
        case dict():
            if depth == 0:
                return f"object({len(value)})"
            shown = list(value.items())[:_KEYS_SHOWN]
            out = {_short(key): _shape(inner, depth - 1) for key, inner in shown}
            if len(value) > len(shown):
                out["…"] = f"{len(value) - len(shown)} more"
            return out
        case list() | tuple():
            if depth == 0 or not value:
                return f"array({len(value)})"
            return {f"array({len(value)})": _shape(value[0], depth - 1)}
    return type(value).__name__


def _short(key: Any) -> str:
    text = key if isinstance(key, str) else str(key)
    return text if len(text) <= _KEY_LENGTH else text[: _KEY_LENGTH - 1] + "…"
