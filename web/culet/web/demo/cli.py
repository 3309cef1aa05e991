"""`culet demo`: the assistant on a page, or one question answered in the terminal."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from culet.adapters.environment import model_from_environment
from culet.adapters.model import Model
from culet.kernel import Kernel, open_kernel
from culet.kernel.errors import UsageError
from culet.web import create_app, serve
from culet.web.demo.agents import Asked, DemoClasses, demo_classes
from culet.web.demo.corpus import corpora, default_corpora
from culet.web.demo.pages import add_pages

PAGE_PACE_S: Final = 0.03


def add_demo(commands: Any) -> None:
    """Add the `demo` command to the parser's sub-commands."""
    parser = commands.add_parser(
        "demo", help="an assistant over real documents, on a page or for one question"
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="where its data lies (default .demo; with --ask a temporary folder)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=int, default=8787, help="port to listen on (default 8787)"
    )
    parser.add_argument(
        "--docs",
        metavar="DIR",
        action="append",
        default=[],
        help="documents (repeatable)",
    )
    parser.add_argument("--ask", metavar="QUESTION", help="answer this and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--pace", type=float, default=None, metavar="S", help="seconds between pieces"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if args.json and args.ask is None:
        msg = "--json goes with --ask: the page has no use for it"
        raise UsageError(msg)
    found = corpora(args.docs) if args.docs else default_corpora()
    model = _model()
    if args.ask is not None:
        classes = demo_classes(found, args.pace or 0.0, model)
        with _folder(args.data) as folder:
            return trio.run(_ask, classes, folder, args.ask, args.json)
    pace_s = PAGE_PACE_S if args.pace is None else args.pace
    classes = demo_classes(found, pace_s, model)
    with _folder(args.data or ".demo") as folder:
        try:
            trio.run(_serve, classes, folder, args.host, args.port)
        except KeyboardInterrupt:
            return 130
    return 0


def _model() -> Callable[[], Model] | None:
    """Return the model that the environment names, made once; None: the embedded one."""
    model = model_from_environment()
    if model is None:
        return None
    sys.stderr.write(f"thinks with {model!r}\n")
    return lambda: model


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    """Yield the data folder; one that nobody named is temporary."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="culet-") as made:
            yield Path(made)
    else:
        yield Path(given)


def _open(classes: DemoClasses, folder: Path) -> Any:
    return open_kernel(
        roots=[classes.assistant],
        facets=[classes.researcher, classes.library],
        storage=f"sqlite:{folder}",
    )


async def _serve(classes: DemoClasses, folder: Path, host: str, port: int) -> None:
    async with _open(classes, folder) as kernel, trio.open_nursery() as nursery:
        app = create_app(kernel)
        add_pages(app)
        bound = await nursery.start(_listen, app, f"{host}:{port}")
        sys.stdout.write(f"Culet demo: {bound}  (data in {folder})\n")
        sys.stdout.flush()


async def _listen(app: Any, bind: str, *, task_status: Any) -> None:
    await serve(app, bind=bind, task_status=task_status)


async def _ask(classes: DemoClasses, folder: Path, question: str, as_json: bool) -> int:
    async with _open(classes, folder) as kernel:
        _watch(kernel)
        assistant = await kernel.get_agent(classes.assistant, "ask")
        asked: Asked = await assistant.ask(question)
    if as_json:
        told = {
            "answer": asked.answer.text,
            "citations": asked.answer.citations,
            "runs": asked.runs,
        }
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    else:
        sys.stdout.write(asked.answer.text + "\n")
    if asked.status != "completed":
        sys.stderr.write(f"the turn ended {asked.status}: {asked.error}\n")
        return 1
    return 0


def _watch(kernel: Kernel) -> None:
    """Tell on stderr what goes on."""

    def started(_channel: str, _tree: Any, subject: Any, _detail: Any) -> None:
        sys.stderr.write(f"run {subject.id} started\n")

    def ended(_channel: str, _tree: Any, subject: Any, ending: Any) -> None:
        sys.stderr.write(f"run {subject.id} {ending.status}\n")

    kernel.subscribe("run:start", started)
    kernel.subscribe("run:end", ended)
    sys.stderr.write("indexing …\n")
