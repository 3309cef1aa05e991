"""The command line `culet`: the composition root of what is run from a shell."""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, TextIO

import trio
from quart_trio import QuartTrio

from culet.kernel import Kernel
from culet.kernel.errors import ChildDidNotStop, CuletError, UsageError
from culet.kernel.logs import JsonLines, PlainLines, WhoLogs, log_runs
from culet.kernel.node import Node
from culet.storage import doctor, offline

from .app import create_app, gateways_of
from .demo.cli import add_demo
from .hosts import Hosts
from .serve import serve, serve_told
from .signals import stop_signals
from .terminal import add_chat, add_watch

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_STUCK = 70  # code that would not stop was left behind
EXIT_UNREAD = 141  # as of a process that SIGPIPE ends
LINGER_S: Final = 1.0  # for code that has not stopped in its time, until it is left


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(prog="culet", description="Durable agents.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except CuletError as error:
        return _told(error)
    except BaseExceptionGroup as group:
        for kind in (KeyboardInterrupt, CuletError):
            leaf = _leaf(group, kind)
            if leaf is not None:
                return _told(leaf)
        raise
    except KeyboardInterrupt as error:
        return _told(error)


def _leaf(group: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the first error of that kind inside a group."""
    if isinstance(group, BaseExceptionGroup):
        found = (_leaf(error, kind) for error in group.exceptions)
        return next((leaf for leaf in found if leaf is not None), None)
    return group if isinstance(group, kind) else None


def _told(error: BaseException) -> int:
    """Say in one line what is wrong; return the exit status."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    print(f"culet: {error}", file=sys.stderr, flush=True)
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_STUCK if isinstance(error, ChildDidNotStop) else EXIT_ERROR


# ---- serve


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve an app or a kernel's agents")
    parser.add_argument(
        "target",
        metavar="MODULE:NAME",
        help="an app (create_app, or yours with install), or an opener: a function that returns"
        " open_kernel(…)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8787,
        help="port to listen on (default %(default)s), 0 for any free one",
    )
    parser.add_argument(
        "--log", choices=("text", "json"), default="text",
        help="json: one object a line, with the agent and the run that logs",
    )  # fmt: skip
    parser.add_argument(
        "--hosts", type=_names, metavar="NAME[,NAME…]",
        help="the names in `Host` to answer to, as behind a proxy; * for any. Of an opener:"
        " an app has its own",
    )  # fmt: skip
    parser.set_defaults(run=_serve)


def _names(text: str) -> Hosts:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        msg = "give at least one name"
        raise argparse.ArgumentTypeError(msg)
    return "*" if names == ("*",) else names


def _serve(args: argparse.Namespace) -> int:
    handler = logging.StreamHandler()
    handler.addFilter(WhoLogs())
    handler.setFormatter(JsonLines() if args.log == "json" else PlainLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    target = _load(args.target)
    host = f"[{args.host}]" if ":" in args.host else args.host
    bind = f"{host}:{args.port}"
    if isinstance(target, QuartTrio):
        if args.hosts is not None:
            msg = f"{args.target} is an app: give its names to create_app(hosts=…)"
            raise UsageError(msg)
        trio.run(_run_server, target, bind)
    else:
        trio.run(_run_opener, _opened(target, args.target), bind, args.hosts)
    return 0


def _opened(target: Any, name: str) -> AbstractAsyncContextManager[Kernel]:
    """Return what the opener gives, if that is a kernel to be entered."""
    if callable(target) and not inspect.isclass(target):
        made = target()
        if isinstance(made, AbstractAsyncContextManager):
            return made
        if inspect.iscoroutine(made):
            made.close()
    msg = f"{name} is neither an app nor an opener: give a function that returns open_kernel(…)"
    raise UsageError(msg)


async def _run_opener(
    opened: AbstractAsyncContextManager[Kernel], bind: str, hosts: Hosts
) -> None:
    async with stop_signals() as told, opened as kernel:
        told.hastens(kernel.hasten)
        _look_after(kernel)
        await serve_told(create_app(kernel, hosts=hosts), told, bind=bind)


async def _run_server(app: QuartTrio, bind: str) -> None:
    for gateway in gateways_of(app):
        gateway.watch(_look_after)
    await serve(app, bind=bind)


def _look_after(kernel: Kernel | None) -> None:
    if kernel is not None:
        log_runs(kernel)
        _leave_the_stuck(kernel)


def _leave_the_stuck(kernel: Kernel) -> None:
    """End the process although code of an agent does not: trio cannot drop a task.

    By then all is durable and every file is closed. Other kernels of the process get a
    moment, and what they have not finished in it is recovered as after a crash.
    """

    def leave(_channel: str, _tree: Any, nodes: list[Node], _detail: Any) -> None:
        told = ChildDidNotStop([node.path_text() for node in nodes])
        waiting = threading.Timer(LINGER_S, lambda: os._exit(_told(told)))
        waiting.daemon = True
        waiting.start()

    kernel.subscribe("stuck", leave)


def _load(target: str) -> Any:
    module_name, colon, name = target.partition(":")
    if not colon:
        raise UsageError(f"{target!r}: give MODULE:NAME")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"cannot load {target}: {error}") from error
    if not callable(found):
        raise UsageError(f"{target} is neither an app nor an opener")
    return found


# ---- doctor


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check a folder that nobody has open")
    doctor.add_arguments(parser)
    parser.set_defaults(run=partial(_printed, doctor.run))


def _printed(
    run: Callable[[argparse.Namespace, TextIO, TextIO], int], args: argparse.Namespace
) -> int:
    """Run a command that only prints; who reads it may have seen enough, as `head`."""
    try:
        status = run(args, sys.stdout, sys.stderr)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    return status


# ---- tree and runs


def _add_tree(commands: Any) -> None:
    text = "tell who is in a folder that nobody has open"
    parser = commands.add_parser("tree", help=text)
    offline.add_arguments(parser, runs=False)
    parser.set_defaults(run=partial(_printed, offline.run_tree))


def _add_runs(commands: Any) -> None:
    text = "tell of the runs in a folder that nobody has open"
    parser = commands.add_parser("runs", help=text)
    offline.add_arguments(parser, runs=True)
    parser.set_defaults(run=partial(_printed, offline.run_runs))


# Each adds one command, whose `run` default takes the parsed arguments.
COMMANDS: Final[tuple[Callable[[Any], None], ...]] = (
    _add_serve,
    _add_doctor,
    _add_tree,
    _add_runs,
    add_demo,
    add_chat,
    add_watch,
)


if __name__ == "__main__":
    sys.exit(main())
