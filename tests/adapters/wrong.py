"""Ten adapters that are wrong on purpose, each in one way; `LAW` says which law finds it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import trio

from adapters.chatbase import NOW, ChatBase
from culet.kernel import Agent, Inspection, StoredChunk


class SecondStartRunsAgain(ChatBase):
    async def start_agent_tool_run(self, given: Any, *, run_id: str) -> Inspection:
        known = self.look(run_id)
        found = await super().start_agent_tool_run(given, run_id=run_id)
        if known is not None and not known.over:
            self.spawn(self.work_again, msgspec.json.encode(given).decode())
        return found

    async def work_again(self, text: str) -> None:
        from culet.adapters.contract import perform

        async for _word in perform(msgspec.json.decode(text)):
            pass


class LateCancelRewrites(ChatBase):
    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        self.sql(
            "UPDATE mine SET status = 'running' WHERE run = ? AND status != 'aborted'",
            run_id,
        )
        return await super().cancel_agent_tool_run(run_id, reason)


class GapInChunks(ChatBase):
    def say(self, run_id: str, n: int, word: str) -> None:
        super().say(run_id, n if n < 2 else n + 1, word)


class TailCloseCancels(ChatBase):
    async def tail_agent_tool_run(
        self, run_id: str, after: int = -1
    ) -> AsyncIterator[StoredChunk]:
        try:
            async for one in super().tail_agent_tool_run(run_id, after):
                yield one
        finally:
            self.end(run_id, "aborted", "nobody listens")


class InspectCreates(ChatBase):
    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        if self.look(run_id) is None:
            self.sql(
                f"INSERT INTO mine VALUES (?, '\"\"', 'running', NULL, {NOW}, NULL)",
                run_id,
            )
            return None
        return await super().inspect_agent_tool_run(run_id)


class TerminalWithoutCompletedAt(ChatBase):
    def end(self, run_id: str, status: str, error: str | None = None) -> None:
        super().end(run_id, status, error)
        self.sql("UPDATE mine SET completed = NULL WHERE run = ?", run_id)


class ReportsInterrupted(ChatBase):
    def end(self, run_id: str, status: str, error: str | None = None) -> None:
        super().end(run_id, "interrupted" if status == "error" else status, error)


class ChunksAfterTerminal(ChatBase):
    def end(self, run_id: str, status: str, error: str | None = None) -> None:
        known = self.look(run_id)
        super().end(run_id, status, error)
        if known is not None and not known.over:
            self.spawn(self.one_more, run_id)

    async def one_more(self, run_id: str) -> None:
        await trio.sleep(0.003)
        [(n,)] = self.sql("SELECT count(*) FROM said WHERE run = ?", run_id)
        self.say(run_id, n, "afterthought")


class LosesTheErrorText(ChatBase):
    def end(self, run_id: str, status: str, error: str | None = None) -> None:
        super().end(run_id, status, None if status == "error" else error)


class CancelBlocks(ChatBase):
    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        found = self.look(run_id)
        if found is not None and not found.over:
            await trio.sleep_forever()
        return found


LAW: dict[type[Agent], str] = {
    SecondStartRunsAgain: "a_second_start_begins_nothing",
    LateCancelRewrites: "a_late_cancel_rewrites_nothing",
    GapInChunks: "chunks_are_dense",
    TailCloseCancels: "closing_a_tail_stops_nothing",
    InspectCreates: "inspecting_makes_nothing",
    TerminalWithoutCompletedAt: "an_end_is_told_truly",
    ReportsInterrupted: "an_end_is_told_truly",
    ChunksAfterTerminal: "nothing_is_said_after_the_end",
    LosesTheErrorText: "an_end_is_told_truly",
    CancelBlocks: "a_cancel_ends_it",
}
