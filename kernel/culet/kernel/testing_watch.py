"""Looking into a kernel under test: is it quiet, what do its rows say, what leaked,
who writes after its end.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import trio

from .errors import NotFound
from .node import State, ambient
from .testing import Harness

_OPEN: Final = (
    "SELECT 'run ' || id FROM run WHERE status = 'running'"
    " UNION ALL SELECT 'fiber ' || id FROM fiber WHERE status = 'running'"
    " UNION ALL SELECT kind || ' job ' || what FROM job"
    " WHERE dead = 0 AND paused = 0 AND every IS NULL AND due_at <= ?"
)
_STATUS: Final = (
    "SELECT status, completed_at FROM run WHERE child = ?1 AND id = ?2"
    " UNION ALL SELECT status, completed_at FROM fiber WHERE owner = ?1 AND id = ?2"
)
_FIRST_STEP_S: Final = 0.25
_LONGEST_STEP_S: Final = 30.0
_OURS: Final = ("culet.kernel", "culet.storage", "trio", "contextlib", "outcome")


def unfinished(harness: Harness, until_ms: int) -> list[str]:
    """Return what is owed until that instant: runs, fibers, jobs that do not repeat."""
    kernel = harness.kernel
    found = [
        f"{tree.key.class_name}/{tree.key.name}: {row[0]}"
        for tree in kernel.trees.values()
        if not tree.closed
        for row in tree.db.execute(_OPEN, (until_ms,))
    ]
    asleep = [
        f"{key.class_name}/{key.name} is to be woken"
        for key, due in kernel.host.sleeping.items()
        if due is not None and due <= harness.clock.now_ms()
    ]
    return found + asleep


async def quiet(harness: Harness, seconds: float) -> list[str]:
    """Let time pass until nothing is owed; return what is, after so many seconds."""
    until_ms = harness.clock.now_ms() + round(seconds * 1000)
    step = _FIRST_STEP_S
    while True:
        await harness.advance(step)
        if harness.faults.dead:
            return []
        left = unfinished(harness, until_ms)
        if not left or harness.clock.now_ms() >= until_ms:
            return left
        step = min(step * 2, _LONGEST_STEP_S)


async def statuses(harness: Harness) -> dict[str, str]:
    """Return the status of each run of all roots, by run id; roots that sleep wake."""
    for entry in harness.kernel.store.roots():
        with suppress(NotFound):  # nothing of it was durable
            await harness.kernel.host.open_root(entry.key, create=False)
    return {
        str(run_id): str(status)
        for tree in harness.kernel.trees.values()
        if not tree.closed
        for run_id, status in tree.db.execute("SELECT id, status FROM run")
    }


def late(harness: Harness, *, cleaning: bool = False) -> str | None:
    """Say why the code that calls this has no right to act any more; None: it has.

    An agent that is stopping or was cut off, a run or fiber that was ended by others,
    a life whose process is dead. With `cleaning` the instant in which a run is ended
    counts as before: what its code does as it is cancelled, without waiting.
    """
    here = ambient.get()
    if here is None:
        return None
    node = here.node
    if node.tree.kernel is not harness.kernel:
        return f"{node.path_text()} belongs to a former life"
    if node.fenced or node.state >= State.STOPPING:
        return f"{node.path_text()} was stopped before"
    if here.asker is None or node.tree.closed:
        return None
    rows = node.tree.db.execute(_STATUS, (node.slot, here.asker))
    if not rows or rows[0][0] in ("running", "completed"):
        return None
    if not cleaning or harness.clock.now_ms() > rows[0][1]:
        return f"{here.asker!r} of {node.path_text()} had ended: {rows[0][0]}"
    return None


def all_tasks() -> set[trio.lowlevel.Task]:
    """Return every task of this trio run."""
    root = trio.lowlevel.current_root_task()
    found: set[trio.lowlevel.Task] = set()
    todo = [] if root is None else [root]
    while todo:
        task = todo.pop()
        found.add(task)
        for nursery in task.child_nurseries:
            todo += nursery.child_tasks
    return found


def task_name(task: trio.lowlevel.Task) -> str:
    """Return what a task runs, and whose it was as far as it knows."""
    here = task.context.get(ambient)
    owner = "" if here is None else f" of {here.node.path_text()}"
    return f"{task.name}{owner}"


def place() -> str:
    """Return where the user's code is in this stack: `file.py:12 in buy`; else ours."""
    frame: Any = sys._getframe(1)
    ours = "the kernel"
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if not module.startswith(_OURS):
            return f"{where} in {frame.f_code.co_qualname}"
        if module.startswith("culet.kernel") and ".testing" not in module:
            if ours == "the kernel":
                ours = f"{module} in {frame.f_code.co_qualname}"
        elif module.startswith("trio") and frame.f_code.co_name == "unrolled_run":
            break
        frame = frame.f_back
    return ours
