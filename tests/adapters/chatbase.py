"""A chat base that brings the five verbs: runs, chunks and tails of its own, on SQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import trio

from culet.adapters.contract import perform
from culet.kernel import Agent, Inspection, StoredChunk

NOW = "CAST(unixepoch('subsec') * 1000 AS INTEGER)"


class ChatBase(Agent):
    """Says what `perform` says; every word is one chunk, stored as it is said."""

    async def on_start(self, props: Any = None) -> None:
        self.sql(
            "CREATE TABLE IF NOT EXISTS mine (run TEXT PRIMARY KEY, input TEXT, status"
            " TEXT, error TEXT, started INTEGER, completed INTEGER)"
        )
        self.sql("CREATE TABLE IF NOT EXISTS said (run TEXT, n INTEGER, chunk TEXT)")
        self.at_work: dict[str, trio.CancelScope] = {}
        self.news = trio.Event()

    # ---- the verbs

    async def start_agent_tool_run(self, given: Any, *, run_id: str) -> Inspection:
        if self.look(run_id) is None:
            self.sql(
                f"INSERT INTO mine VALUES (?, ?, 'running', NULL, {NOW}, NULL)",
                run_id, msgspec.json.encode(given).decode(),
            )  # fmt: skip
        found = await self.inspect_agent_tool_run(run_id)
        assert found is not None
        return found

    async def inspect_agent_tool_run(self, run_id: str) -> Inspection | None:
        found = self.look(run_id)
        if found is not None and not found.over and run_id not in self.at_work:
            self.at_work[run_id] = trio.CancelScope()
            self.spawn(self.work, run_id)  # the first time, and after a crash
        return found

    async def cancel_agent_tool_run(
        self, run_id: str, reason: str | None = None
    ) -> Inspection | None:
        self.end(run_id, "aborted", reason)
        return self.look(run_id)

    async def agent_tool_chunks(
        self, run_id: str, after: int = -1
    ) -> list[StoredChunk]:
        rows = self.sql(
            "SELECT n, chunk FROM said WHERE run = ? AND n > ? ORDER BY n LIMIT 100",
            run_id, after,
        )  # fmt: skip
        return [StoredChunk(r.n, msgspec.json.decode(r.chunk)) for r in rows]

    async def tail_agent_tool_run(
        self, run_id: str, after: int = -1
    ) -> AsyncIterator[StoredChunk]:
        while True:
            news, found = self.news, self.look(run_id)
            for one in await self.agent_tool_chunks(run_id, after):
                after = one.sequence
                yield one
            if found is None or found.over:
                return
            if news is self.news:
                await news.wait()

    # ---- what they stand on

    def look(self, run_id: str) -> Inspection | None:
        rows = self.sql("SELECT * FROM mine WHERE run = ?", run_id)
        if not rows:
            return None
        _, _, status, error, started, completed = rows[0]
        return Inspection(
            status, error=error, started_at=started, completed_at=completed
        )

    def end(self, run_id: str, status: str, error: str | None = None) -> None:
        self.sql(
            f"UPDATE mine SET status = ?, error = ?, completed = {NOW}"
            " WHERE run = ? AND status = 'running'",
            status, error, run_id,
        )  # fmt: skip
        scope = self.at_work.get(run_id)
        if scope is not None:
            scope.cancel()
        self.tell()

    def say(self, run_id: str, n: int, word: str) -> None:
        chunk = {"type": "text-delta", "id": "t", "delta": f"{word} "}
        text = msgspec.json.encode(chunk).decode()
        self.sql("INSERT INTO said VALUES (?, ?, ?)", run_id, n, text)
        self.tell()

    def tell(self) -> None:
        self.news.set()
        self.news = trio.Event()

    async def work(self, run_id: str) -> None:
        [(text,)] = self.sql("SELECT input FROM mine WHERE run = ?", run_id)
        [(said,)] = self.sql("SELECT count(*) FROM said WHERE run = ?", run_id)
        with self.at_work[run_id]:
            try:
                async for word in perform(msgspec.json.decode(text), skip=said):
                    self.say(run_id, said, word)
                    said += 1
            except Exception as error:
                self.end(run_id, "error", str(error))
            else:
                self.end(run_id, "completed")
        del self.at_work[run_id]
