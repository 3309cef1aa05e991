"""Agent frameworks that know only asyncio, played in a thread and a loop of their own.

    async with in_asyncio(play, durable=self.durable) as chunks:
        async for chunk in chunks:
            yield chunk

`play(bridge)` is an asyncio async generator. It runs in a thread and an event loop that
are made for it and gone when the block is left: the trio side leaving, for whatever
reason, cancels the asyncio task and waits for it; what the framework raises is raised
here. At most `buffer` items wait to be taken. Nothing of an agent may be touched in that
thread: `await bridge.call(fn, *args)` runs an async function of trio in the turn's own
task, where the agent is the ambient one, and `await bridge.durable()` waits until all
that the tree has committed is on the disk. It belongs before every effect outside.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast, final

import msgspec
import trio

from culet.kernel import Agent, Chunk, Turn
from culet.kernel.errors import CuletError, FacetAborted, FacetBroken

T = TypeVar("T")
log = logging.getLogger("culet.adapters")
BUFFER: Final = 64  # items of one framework that nobody has taken yet
THREADS: Final = 64  # frameworks at once, in one process
CANCEL_S: Final = 5.0  # to stop when cancelled; then its thread is given up
_LIMITER: Final[trio.lowlevel.RunVar[trio.CapacityLimiter]] = trio.lowlevel.RunVar(
    "culet_foreign_threads"
)


class ForeignCancelled(CuletError):
    """A framework was cancelled, and not by us."""


class Result(NamedTuple):
    """The last item of a player: what its turn came to. `output` is any JSON value."""

    output: Any = None
    summary: str | None = None
    usage: Any = None


class Bridge:
    """The way from a framework's loop back to the turn; used in that loop only."""

    def __init__(
        self, worker: _Worker[Any], durable: Callable[[], Awaitable[Any]]
    ) -> None:
        self._worker, self._durable = worker, durable

    async def call(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await `fn(*args)` in the turn's own task; one call after the other.

        Raises what it raises. Chunks wait meanwhile; so does whoever asked for them.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._worker.post(_Call(fn, args, loop, answer))
        return await answer

    async def durable(self) -> None:
        """Wait until what the agent has written is durable: before an effect outside."""
        await self.call(self._durable)


Player = Callable[[Bridge], AsyncIterator[T]]


class _Call(NamedTuple):
    fn: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]

    async def run(self) -> None:
        """Do it here, on trio, and answer there. Cancelled: nobody is answered."""
        try:
            value = await self.fn(*self.args)
        except Exception as error:
            self.reply(error, None)
        else:
            self.reply(None, value)

    def reply(self, error: Exception | None, value: Any) -> None:
        """Answer in the other loop, unless the question is gone."""

        def there() -> None:
            if self.answer.done():
                return
            if error is not None:
                self.answer.set_exception(error)
            else:
                self.answer.set_result(value)

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(there)


class _Item(NamedTuple):
    value: Any


@final
class _Worker(Generic[T]):
    """One thread with one loop that plays one player."""

    def __init__(self, player: Player[T], buffer: int) -> None:
        self._player, self._buffer = player, buffer
        self._token = trio.lowlevel.current_trio_token()
        # never more in it than `buffer` items and the calls of the tasks that wait for them
        self._in, self._out = trio.open_memory_channel[_Item | _Call](math.inf)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._room: asyncio.Semaphore | None = None
        self._stopped = False
        self._error: BaseException | None = None
        self.over = trio.Event()
        self.thread = threading.Thread(
            target=self._run, name="culet-asyncio", daemon=True
        )

    # ---- in the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._finished)

    async def _main(self) -> None:
        self._room = asyncio.Semaphore(self._buffer)
        with self._lock:
            if self._stopped:
                return
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        async with aclosing(self._player(self.bridge)) as items:  # type: ignore[type-var]
            async for item in items:
                await self._room.acquire()
                self.post(_Item(item))

    def post(self, what: _Item | _Call) -> None:
        """Hand something to the trio side."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._arrived, what)

    # ---- on trio

    bridge: Bridge

    def _arrived(self, what: _Item | _Call) -> None:
        if isinstance(what, _Call) and self._stopped:
            what.reply(FacetAborted("the turn is over"), None)
        elif not self.over.is_set():
            self._in.send_nowait(what)

    def _finished(self) -> None:
        self._in.close()
        self.over.set()

    async def items(self) -> AsyncIterator[T]:
        """Yield what the player yields; raise what it raises."""
        async for what in self._out:
            if isinstance(what, _Call):
                await what.run()
                continue
            yield what.value
            self._soon(cast(asyncio.Semaphore, self._room).release)
        error = self._error
        if isinstance(error, asyncio.CancelledError):
            msg = "the framework was cancelled from inside"
            raise ForeignCancelled(msg) from error
        if error is not None and not isinstance(error, Exception):
            msg = f"the framework raised {type(error).__name__}"
            raise FacetBroken(msg) from error
        if error is not None:
            raise error

    def _soon(self, fn: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(fn)

    def stop(self) -> None:
        """Cancel the player, and answer its questions no more."""
        with self._lock:
            self._stopped = True
            task = self._task
        if task is not None:
            self._soon(task.cancel)
        with suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                what = self._out.receive_nowait()
                if isinstance(what, _Call):
                    what.reply(FacetAborted("the turn is over"), None)


@asynccontextmanager
async def in_asyncio(
    player: Player[T],
    *,
    durable: Callable[[], Awaitable[Any]] = trio.lowlevel.checkpoint,
    buffer: int = BUFFER,
    cancel_s: float = CANCEL_S,
) -> AsyncIterator[AsyncIterator[T]]:
    """Play an asyncio async generator in a thread; iterate over its items on trio.

    Leaving the block cancels it and waits for its end, `cancel_s` at most: what does not
    stop then is logged and left behind, in a thread that dies with the process. More than
    `THREADS` at once wait for one that ends.
    """
    limiter = _limiter()
    worker = _Worker(player, buffer)
    worker.bridge = Bridge(worker, durable)
    await limiter.acquire_on_behalf_of(worker)
    worker.thread.start()
    items = worker.items()
    try:
        yield items
    finally:
        with trio.CancelScope(shield=True):
            await items.aclose()  # type: ignore[attr-defined]
            worker.stop()
            with trio.move_on_after(cancel_s):
                await worker.over.wait()
        if worker.over.is_set():
            worker.thread.join()  # it has said its last word
        else:
            log.error("a framework did not stop in %s s; its thread is left", cancel_s)
        limiter.release_on_behalf_of(worker)


def prompt_of(value: Any) -> str:
    """Return the input of a run as a text for a model: JSON if it is no text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _limiter() -> trio.CapacityLimiter:
    try:
        return _LIMITER.get()
    except LookupError:
        _LIMITER.set(trio.CapacityLimiter(THREADS))
        return _LIMITER.get()


class ForeignAgent(Agent):
    """An agent whose turn an asyncio framework plays: write `get_player`.

    Its turn cannot be resumed: the framework keeps what it knows in memory. A crash in a
    turn ends its run `interrupted`; what was said until then stays.
    """

    def get_player(self, turn: Turn) -> Player[Chunk | Result]:
        """Return what plays this turn: an async generator function for asyncio.

        It runs in another thread: look up here what it needs of the agent.
        """
        raise NotImplementedError

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        """Play the turn; what the agent has written is durable before it begins."""
        player = self.get_player(turn)
        await self.durable()
        async with in_asyncio(player, durable=self.durable) as items:
            async for item in items:
                if isinstance(item, Result):
                    turn.output, turn.summary, turn.usage = item
                else:
                    yield item
