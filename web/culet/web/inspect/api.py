"""What the inspector shows and does, as JSON. Every list is a page with a bound.

Looking wakes no agent. What is shown of people's work is what the kernel's own lists
show: names, ids, numbers, the preview of an input. Inputs, outputs, messages, state and
payloads stay where they are, and of an error its class alone is shown: its text is in
the log.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import msgspec

from culet.kernel import Operator, RunRow
from culet.kernel.core.status import ended_by
from culet.kernel.errors import UsageError
from culet.kernel.http import Request
from culet.kernel.kernel import Kernel
from culet.kernel.ports import TreeKey

_CLASS: Final = re.compile(r"[A-Za-z_][\w.]{0,79}(?=\W|$)", re.ASCII)
_HOURS: Final = 24.0 * 7
_PREVIEW_MAX: Final = 200  # characters
_REASON: Final = "inspector"  # of what is cancelled here

Page = dict[str, Any]


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be done: `cancel_run` to run `id` (its number), else to job `id`."""

    root: tuple[str, str]
    act: Literal[
        "cancel_run", "cancel", "run_now", "pause", "resume", "replay", "redeliver"
    ]
    id: int


def error_class(error: str | None) -> str | None:
    """Return the class that an error's text begins with; the text may be somebody's."""
    if error is None:
        return None
    found = _CLASS.match(error)
    name = found.group() if found else ""
    return name if name.endswith(("Error", "Exception")) else "error"


def preview(value: Any) -> str | None:
    """Return the beginning of what clients see of a run's input, as JSON."""
    if value is None:
        return None
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _PREVIEW_MAX else f"{text[:_PREVIEW_MAX]}…"


def key_of(request: Request) -> TreeKey:
    """Return the root that a request asks for. Raises `UsageError`."""
    try:
        return TreeKey(request.query["class"], request.query["name"])
    except KeyError as missing:
        msg = f"say which root: {missing} is missing"
        raise UsageError(msg) from None


def _number(request: Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None or text == "":
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        msg = f"{name} is a number, not {text[:40]!r}"
        raise UsageError(msg)
    return int(text)


def _limit(kernel: Kernel, request: Request) -> int:
    most = kernel.limits.inspect_rows
    return max(1, min(_number(request, "limit") or most, most))


async def roots(kernel: Kernel, request: Request) -> Page:
    """Return roots by name, the open ones and those that sleep; `find`: by their path."""
    after = request.query.get("after")
    limit, find = _limit(kernel, request), request.query.get("find", "")
    begin = TreeKey(*after.split("/", 1)) if after and "/" in after else None
    found = await kernel.roots(find=find, limit=limit + 1, after=begin)
    rows = [
        {
            "class": row.class_name, "name": row.name, "state": row.state,
            "agents": row.agents, "due_at": row.due_at,
        }
        for row in found[:limit]
    ]  # fmt: skip
    last = rows[-1] if len(found) > limit else None
    return {
        "now": kernel.clock.now_ms(),
        "rows": rows,
        "counts": kernel.metrics(),
        "after": None if last is None else f"{last['class']}/{last['name']}",
    }


@asynccontextmanager
async def _seen(kernel: Kernel, request: Request) -> AsyncIterator[Operator | None]:
    """Give the root that is asked for; None when it sleeps, unless it is to be opened."""
    key = key_of(request)
    found = kernel.trees.get(key)
    if (found is None or found.closed) and request.query.get("open") != "1":
        yield None
        return
    async with kernel.operator(*key) as operator:
        yield operator


def _asleep(kernel: Kernel) -> Page:
    return {"now": kernel.clock.now_ms(), "rows": [], "after": None, "asleep": True}


async def tree(kernel: Kernel, request: Request) -> Page:
    """Return the agents of an open root, remnants last; none when it sleeps."""
    key, limit = key_of(request), _limit(kernel, request)
    async with _seen(kernel, request) as operator:
        if operator is None:
            return _asleep(kernel)
        rows = kernel.tree(*key, limit=limit, after=request.query.get("after") or None)
    full = len([r for r in rows if r["state"] != "remnant"]) >= limit
    return {"rows": rows, "after": rows[limit - 1]["slot"] if full else None}


async def runs(kernel: Kernel, request: Request) -> Page:
    """Return the runs of an open root, the newest first."""
    limit, before = _limit(kernel, request), _number(request, "after")
    async with _seen(kernel, request) as operator:
        if operator is None:
            return _asleep(kernel)
        page = await operator.runs(before=before, limit=limit)
    rows = [_run(row) for row in page]
    more = len(page) == limit
    after = str(page[-1].number) if more else None
    return {"now": kernel.clock.now_ms(), "rows": rows, "after": after}


def _run(row: RunRow) -> Page:
    run = row.run
    return {
        "number": row.number, "run_id": run.run_id, "class": run.agent_type,
        "path": row.path, "status": run.status, "phase": row.phase,
        "cause": ended_by(run),
        "detached": row.detached, "attempt": row.attempt, "chunks": row.chunks,
        "started_at": run.started_at, "completed_at": run.completed_at,
        "elapsed_s": row.elapsed_s, "preview": preview(run.preview),
        "error": error_class(run.error),
    }  # fmt: skip


async def due(kernel: Kernel, request: Request) -> Page:
    """Return what a root owes in the days to come and why it fires then."""
    limit, after = _limit(kernel, request), request.query.get("after") or None
    hours = _number(request, "hours")
    page = await kernel.due(
        _HOURS if hours is None else hours,
        root=key_of(request), limit=limit, after=after,
    )  # fmt: skip
    rows = []
    for found in page.rows:
        kind = "call" if found.kind in {"once", "every", "cron"} else found.kind
        row = msgspec.to_builtins(found)
        row["error"] = error_class(found.error)
        row["acts"] = sorted(
            Operator.acts(kind)
            & ({"cancel", "run_now"} | {"resume" if found.why == "paused" else "pause"})
        )
        rows.append(row)
    return {"now": kernel.clock.now_ms(), "rows": rows, "after": page.after}


async def fibers(kernel: Kernel, request: Request) -> Page:
    """Return the fibers and own turns of an open root, as `kernel.fibers`."""
    key, limit = key_of(request), _limit(kernel, request)
    slot, _, fiber_id = request.query.get("after", "").partition("/")
    async with _seen(kernel, request) as operator:
        if operator is None:
            return _asleep(kernel)
        found = kernel.trees.get(key)
        last = found.fibers.get(slot, fiber_id, None) if found and slot else None
        page = kernel.fibers(*key, limit=limit, after=last)
    rows = [
        {
            "id": f.id, "kind": f.kind, "name": f.name, "path": f.path,
            "status": f.status, "error": error_class(f.error), "attempts": f.attempts,
            "started_at": f.started_at, "completed_at": f.completed_at,
            "seen_at": f.seen_at, "deadline_at": f.deadline_at,
        }
        for f in page
    ]  # fmt: skip
    more = f"{page[-1].slot}/{page[-1].id}" if len(page) == limit else None
    return {"now": kernel.clock.now_ms(), "rows": rows, "after": more}


async def effects(kernel: Kernel, request: Request) -> Page:
    """Return effects of an open root about which a person is to decide."""
    limit, after = _limit(kernel, request), request.query.get("after") or None
    async with _seen(kernel, request) as operator:
        if operator is None:
            return _asleep(kernel)
        key = key_of(request)
        page = kernel.effects(*key, uncertain=True, limit=limit, after=after)
    rows = [
        {
            "id": e.id, "name": e.name, "path": e.path, "status": e.status,
            "attempt": e.attempt, "error": error_class(e.error), "began_at": e.began_at,
        }
        for e in page
    ]  # fmt: skip
    return {"rows": rows, "after": page[-1].id if len(page) == limit else None}


async def dead(kernel: Kernel, request: Request) -> Page:
    """Return what rests in an open root because no try of it succeeded."""
    limit, after = _limit(kernel, request), str(_number(request, "after") or 0)
    async with _seen(kernel, request) as operator:
        if operator is None:
            return _asleep(kernel)
        page = operator.dead(after=after, limit=limit)
    rows = []
    for letter in page:
        row = msgspec.to_builtins(letter)
        row["error"] = error_class(letter.error)
        rows.append(row)
    return {"rows": rows, "after": page[-1].id if len(page) == limit else None}


READS: Final[dict[str, Callable[[Kernel, Request], Awaitable[Page]]]] = {
    "roots": roots, "tree": tree, "runs": runs, "due": due, "fibers": fibers,
    "effects": effects, "dead": dead,
}  # fmt: skip


async def act(kernel: Kernel, request: Request) -> Page:
    """Do what the body says (`Act`), durably; `done`: whether it applied.

    Raises `UsageError` for another body, `NotFound` for a root that is not there.
    """
    wanted: Act = msgspec.json.decode(
        await request.read(max_bytes=kernel.limits.inspect_body_bytes), type=Act
    )
    async with kernel.operator(*wanted.root) as operator:
        if wanted.act != "cancel_run":
            return {"done": await operator.act(str(wanted.id), wanted.act)}
        receipt = await operator.cancel_run(wanted.id, _REASON)
    if receipt is None:
        return {"done": False}
    return {
        "done": receipt.ended, "status": receipt.status,
        "runs": len(receipt.runs), "fibers": len(receipt.fibers),
        "calls": len(receipt.calls),
    }  # fmt: skip
