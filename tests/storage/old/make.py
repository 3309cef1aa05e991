"""Record the folder of today's schema: `python -m storage.old.make v1`, in `tests`.

Once a schema is released its recording stays as it is; only a new schema gets a new
one. The folder is copied while the kernel lives, as a `kill -9` would leave it: the
database files are behind, only the log knows.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import trio

from culet.kernel import Limits, open_kernel
from culet.kernel.testing import VirtualClock
from culet.storage.doctor_folder import look
from storage.old.world import Frail, Keeper, Talker, Worker

HERE = Path(__file__).parent
LIMITS = Limits(segment_bytes=48 << 10)  # so that the recording is small
SAY = [["say", "one"], ["say", "two"]]


async def live(folder: Path, copy: Path) -> dict[str, Any]:
    """Let everything happen, copy the folder in the middle; return the frames."""
    async with open_kernel(
        roots=[Keeper, Talker],
        facets=[Worker, Frail],
        storage=f"sqlite:{folder}",
        clock=VirtualClock(),
        seed=1,
        limits=LIMITS,
    ) as kernel:
        talker = await kernel.get_agent(Talker, "t")
        await talker.hear("hello")
        keeper = await kernel.get_agent(Keeper, "k")
        await keeper.note("first")
        await keeper.begin(False, "done", [*SAY, ["output", {"score": 7}]])
        await keeper.begin(True, "failed", [["say", "x"], ["fail", "boom"]])
        await keeper.begin(False, "stopped", [*SAY, ["sleep", 9999]])
        await keeper.begin(False, "deleted", [*SAY, ["sleep", 9999]])
        await keeper.begin(False, "going", [*SAY, ["sleep", 9999]])
        await keeper.begin(True, "cut", [*SAY, ["sleep", 9999]])
        await keeper.plan()
        await keeper.dig()
        await trio.sleep(0.3)
        await keeper.stop("stopped")
        await keeper.count(3)
        await trio.sleep(0.3)
        frames = {run: await keeper.frames(run) for run in await ended(keeper)}
        for run in ("going", "cut"):
            frames[run] = await so_far(kernel, run)
        await keeper.note("second")
        tree = next(t for k, t in kernel.trees.items() if k.class_name == "Keeper")
        mark = tree.endings.delete

        def mark_then_copy(slot: str) -> None:
            """Copy right behind the record of the mark: the wipe is still owed."""
            mark(slot)
            tree.barrier.after.append(lambda: shutil.copytree(folder, copy))

        setattr(tree.endings, "delete", mark_then_copy)  # noqa: B010  # it is final
        await keeper.forget("deleted")
        await tree.durable()
        await trio.sleep(0.3)  # for the wipe
        frames["deleted"] = await keeper.frames("deleted")
    return frames


async def ended(keeper: Any) -> list[str]:
    return [run for run, how in (await keeper.statuses()).items() if how != "running"]


async def so_far(kernel: Any, run_id: str) -> list[Any]:
    """Return the frames of a run that goes on."""
    tree = next(t for k, t in kernel.trees.items() if k.class_name == "Keeper")
    found: list[Any] = []
    with trio.move_on_after(0.2):
        async for frame in tree.runs.replay(tree.root_slot, run_id, -1):
            found.append(frame)  # noqa: PERF401  # it is cut off
    return found


def pack(copy: Path, version: str, frames: dict[str, Any]) -> None:
    with tarfile.open(
        HERE / f"{version}.tar.xz", "w:xz", format=tarfile.USTAR_FORMAT
    ) as tar:
        for path in sorted(copy.rglob("*")):
            if path.is_file() and not path.name.endswith("-shm"):
                tar.add(path, str(path.relative_to(copy)), filter=nobody)
    text = json.dumps(frames, indent=1, sort_keys=True)
    (HERE / f"{version}.json").write_text(text + "\n")


def nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    version = sys.argv[1]
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        frames = trio.run(partial(live, Path(place, "data"), copy))
        report = look(str(copy), as_found=True)
        print(report)
        assert report.ok
        pack(copy, version, frames)
    print({run: len(found) for run, found in frames.items()})


if __name__ == "__main__":
    main()
