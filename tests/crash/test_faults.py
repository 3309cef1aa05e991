"""A record that is under way when the process dies is on the disk, or it is not."""

from __future__ import annotations

import pytest
import trio

from crash.agents import Boss
from culet.kernel.errors import StorageError
from culet.kernel.testing import open_test_kernel
from machines.world import Actor, Model


@pytest.mark.parametrize("landed", [False, True], ids=["lost", "landed"])
async def test_a_record_is_lost_or_landed(landed: bool, clock: object) -> None:
    Actor.model = Model()
    async with open_test_kernel(roots=[Boss]) as test:
        died = trio.Event()
        test.faults.on_death = died.set
        boss = await test.kernel.get_agent(Boss, "a")
        await boss.note("before", "x")
        test.faults.die_in_record(landed=landed)
        with pytest.raises(StorageError):
            await boss.note("after", "x")
        assert test.faults.dead
        assert died.is_set()
        await test.crash()
        await test.reopen()
        boss = await test.kernel.get_agent(Boss, "a")
        assert ("after" in await boss.notes()) is landed
        assert "before" in await boss.notes()
