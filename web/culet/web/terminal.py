"""`culet chat URL` and `culet watch URL`: an agent in the terminal.

`chat` writes answers to stdout as they stream and what its runs do to stderr. Ctrl-C
stops an answer; once more, or when there is none, it leaves. `watch` shows state, runs
and everything else as it happens. `--json` writes the events, one JSON object a line.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, Final, final

import trio

from culet.kernel.core.chunks import text_of
from culet.kernel.errors import CallFailed, CuletError, UsageError

from . import client_events as told
from .client import RemoteAgent, connect
from .client_answer import Answer
from .client_events import Events
from .terminal_events import as_json, print_common, print_event, summary
from .terminal_screen import Screen, Style, clean

PAINT_S: Final = 0.1  # between two drawings of the status line
HISTORY: Final = 4  # messages that are shown of a chat that has some
EXIT_ERROR: Final = 1
EXIT_STOPPED: Final = 130
_INPUT_BYTES: Final = 64 << 10
_HINT: Final = "Ctrl-C stops an answer · Ctrl-D leaves · /clear forgets the chat"


def add_chat(commands: Any) -> None:
    """Add the `chat` command to the parser's sub-commands."""
    parser = commands.add_parser("chat", help="talk to a chat agent in the terminal")
    _add_target(parser)
    parser.add_argument("--ask", metavar="TEXT", help="ask this, print the answer, end")
    parser.set_defaults(run=lambda args: _run(args, _chat))


def add_watch(commands: Any) -> None:
    """Add the `watch` command to the parser's sub-commands."""
    parser = commands.add_parser("watch", help="show what an agent does, live")
    _add_target(parser)
    parser.set_defaults(run=lambda args: _run(args, _watch))


def _add_target(parser: Any) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        help="ws://HOST:PORT/agents/CLASS/NAME, http does as well; CLASS in kebab case",
    )
    parser.add_argument(
        "--sub", metavar="CLASS:NAME", action="append", default=[],
        help="an agent below it (repeatable, outermost first)",
    )  # fmt: skip
    parser.add_argument(
        "--header", metavar="'NAME: VALUE'", action="append", default=[],
        help="a header of the handshake, for example a token (repeatable)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object an event")


Command = Callable[[argparse.Namespace, RemoteAgent, Screen], Awaitable[int]]


def _run(args: argparse.Namespace, command: Command) -> int:
    sub = [_pair(text, ":", "--sub CLASS:NAME") for text in args.sub]
    headers = [_pair(text, ":", "--header 'NAME: VALUE'") for text in args.header]
    screen = Screen(sys.stdout, sys.stderr)

    async def main() -> int:
        async with connect(args.url, sub=sub, headers=headers) as agent:
            try:
                return await command(args, agent, screen)
            finally:
                with suppress(BrokenPipeError):
                    screen.close()

    try:
        return trio.run(main)
    except BrokenPipeError:
        return _nobody_reads()
    except BaseExceptionGroup as group:
        known, others = group.split((CuletError, BrokenPipeError))
        if others is not None or known is None:
            raise
        error = next(_leaves(known))
        if isinstance(error, BrokenPipeError):
            return _nobody_reads()
        raise error from None


def _nobody_reads() -> int:
    """Whoever read our output has left: end quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _pair(text: str, separator: str, form: str) -> tuple[str, str]:
    left, found, right = text.partition(separator)
    if not found or not left.strip() or not right.strip():
        raise UsageError(f"{text!r}: give {form}")
    return left.strip(), right.strip()


# ---- chat


async def _chat(args: argparse.Namespace, agent: RemoteAgent, screen: Screen) -> int:
    await agent.caught_up()
    if not agent.is_chat:
        raise UsageError("this agent is no chat; `culet watch` shows what it does")
    talk = _Talk(agent, screen, json=args.json)
    async with trio.open_nursery() as nursery:
        if args.json:
            await nursery.start(talk.print_json)
        else:
            await nursery.start(_print_runs, agent, screen)
            nursery.start_soon(_paint, agent, screen)
        await nursery.start(talk.hear_interrupts, nursery.cancel_scope)
        if args.ask is not None:
            await talk.ask(args.ask)
        else:
            await talk.converse()
        nursery.cancel_scope.cancel(reason="the chat is over")
    if args.ask is not None or not screen.out_is_tty:
        return talk.exit_status
    return 0


@final
class _Talk:
    """A conversation: one answer at a time."""

    def __init__(self, agent: RemoteAgent, screen: Screen, *, json: bool) -> None:
        self._agent, self._screen, self._json = agent, screen, json
        self._answer: Answer | None = None
        self._busy = self._stopping = False
        self._told: dict[str, None] = {}  # turns whose end was written as JSON
        self._tells = trio.Event()
        self.exit_status = 0

    async def converse(self) -> None:
        """Ask what is typed, line by line, until there is no more."""
        if sys.stdin.isatty() and not self._json:
            self._screen.line(_HINT, "dim")
        self._show_history()
        for request_id in self._agent.turns:  # one that was left in the middle
            answer = self._agent.follow(request_id)
            if answer is not None:
                self._stopping = False
                await self._show(answer)
        self._prompt()
        async for line in _lines():
            self._screen.entered()
            question = line.strip()
            if question == "/clear":
                await self._agent.clear()
            elif question:
                await self.ask(question)
            self._prompt()

    async def ask(self, question: str) -> None:
        """Ask and show the answer to its end."""
        self._busy, self._stopping = True, False
        try:
            answer = await self._agent.ask(question)
            if self._stopping:  # before it was on its way
                await _stop(answer)
            await self._show(answer)
        finally:
            self._busy = False

    async def _show(self, answer: Answer) -> None:
        self._answer = answer
        try:
            if self._json:
                while answer.request_id not in self._told:
                    await self._tells.wait()
            else:
                await self._show_text(answer)
        finally:
            self._answer = None
        if answer.outcome == "aborted":
            self.exit_status = EXIT_STOPPED
        elif answer.outcome != "completed":
            self.exit_status = EXIT_ERROR

    async def _show_text(self, answer: Answer) -> None:
        try:
            async for chunk in answer:
                if chunk.get("type") == "text-delta":
                    self._screen.text(str(chunk.get("delta", "")))
                elif chunk.get("type") == "text-end":
                    self._screen.end_text()
        except CallFailed as error:
            self._end(f"✗ the turn failed: {error}", "bad")
        else:
            if answer.outcome == "aborted":
                self._end("■ stopped", "warn")
            elif answer.outcome != "completed":
                self._end(f"✗ {answer.outcome}", "warn")
        finally:
            self._screen.end_text()

    async def print_json(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Write events; note the ends of turns that were written."""
        events = self._agent.events(known=True)
        task_status.started()
        async for event in events:
            self._screen.json(as_json(event))
            answer = self._answer
            if isinstance(event, told.ChatEnded):
                self._told[event.request_id] = None
            elif isinstance(event, told.Lagged) and answer and answer.outcome:
                self._told[answer.request_id] = None  # its end may have been dropped
            self._tells.set()
            self._tells = trio.Event()

    def _end(self, text: str, style: Style) -> None:
        if not self._json:
            self._screen.line(text, style)

    def _show_history(self) -> None:
        if self._json or not self._screen.out_is_tty:
            return
        for message in self._agent.messages[-HISTORY:]:
            text = clean(text_of(message["parts"]))
            if message.get("role") == "user":
                self._screen.line(f"> {text}", "bold")
            elif text:
                self._screen.text(text.rstrip() + "\n")

    def _prompt(self) -> None:
        if sys.stdin.isatty() and not self._json:
            self._screen.prompt("> ")

    async def hear_interrupts(
        self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Stop the answer at Ctrl-C; leave at the next one, or when there is none."""
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            task_status.started()
            async with trio.open_nursery() as nursery:
                async for _ in signals:
                    idle = self._answer is None and not self._busy
                    if idle or self._stopping:
                        self.exit_status = EXIT_STOPPED
                        scope.cancel(reason="interrupted")
                        return
                    self._stopping = True
                    self._end("stopping … (Ctrl-C again leaves)", "dim")
                    if self._answer is not None:
                        nursery.start_soon(_stop, self._answer)


async def _stop(answer: Answer) -> None:
    with suppress(CuletError):  # the answer itself tells what became of it
        await answer.stop()


async def _lines() -> AsyncIterator[str]:
    """Yield the lines of stdin. Read by hand: a thread that hangs in it does no harm."""
    descriptor = sys.stdin.fileno()
    rest = b""
    while True:
        data = await trio.to_thread.run_sync(
            os.read, descriptor, _INPUT_BYTES, abandon_on_cancel=True
        )
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
        if not data:
            if rest:
                yield rest.decode(errors="replace")
            return


# ---- watch


async def _watch(args: argparse.Namespace, agent: RemoteAgent, screen: Screen) -> int:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_interrupt, nursery.cancel_scope)
        if args.json:
            async for event in agent.events(known=True):
                screen.json(as_json(event))
        else:
            nursery.start_soon(_paint, agent, screen)
            turns: set[str] = set()
            async for event in agent.events(known=True):
                print_event(event, screen, turns)
    return 0


async def _until_interrupt(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel(reason="interrupted")
            return


# ---- both


async def _print_runs(
    agent: RemoteAgent, screen: Screen, *, task_status: trio.TaskStatus[None]
) -> None:
    events: Events = agent.events()
    task_status.started()
    async for event in events:
        old = isinstance(event, told.RunChanged) and event.replay
        if not old or agent.connections > 1:  # then it happened while we were away
            print_common(event, screen)


async def _paint(agent: RemoteAgent, screen: Screen) -> None:
    """Keep the status line true, drawing at most ten times a second."""
    while True:
        screen.status(summary(agent))
        await trio.sleep(PAINT_S)
        await agent.changed()
