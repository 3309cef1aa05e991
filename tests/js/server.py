"""A small server for the published clients and the page; prints its URL, then serves.

python tests/js/server.py [--demo DOCS] [--plain]

`--plain`: under hypercorn as anybody starts it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, ClassVar

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve
from quart import websocket

from culet.adapters import AIChatAgent, ScriptedModel, Think, tool
from culet.adapters.model import (
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    Usage,
)
from culet.adapters.scripted import step_number
from culet.kernel import (
    Agent,
    ChildRef,
    ConnectContext,
    Connection,
    Final,
    Request,
    Response,
    Turn,
    agent_tool,
    current_agent,
    open_kernel,
    rpc,
)
from culet.kernel.errors import UserError
from culet.web import create_app, route_sub_agent_socket, serve
from culet.web.demo.agents import demo_classes
from culet.web.demo.corpus import corpora
from culet.web.demo.pages import add_pages

PACE_S = 0.03
DEMO_PACE_S = 0.15  # slow enough to be stopped by hand


class ChatBot(AIChatAgent):
    async def on_chat_message(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        said = len(turn.text.split())
        if not said:
            yield {"type": "start-step"}
            yield {"type": "text-start", "id": "t"}
        asked = [part.get("text") for part in turn.messages[-1]["parts"]]
        for i in range(said, 40):
            await trio.sleep(PACE_S)
            if i == 5 and asked == ["fail"]:
                raise UserError("out of words")
            yield {
                "type": "text-delta",
                "id": "t",
                "delta": f"w{i}" if i == 0 else f" w{i}",
            }
        yield {"type": "text-end", "id": "t"}
        yield {"type": "finish-step"}
        yield {"type": "finish", "finishReason": "stop"}


class Mood(ChatBot):
    """A chat bot that shows how it feels, in data parts."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        if not turn.text:
            yield {"type": "data-mood", "id": "m", "data": {"feels": "well"}}
            yield {"type": "data-blink", "data": 1, "transient": True}
        async for chunk in super().on_chat_message(turn):
            yield chunk


class Held(ChatBot):
    """A chat bot that stops after four words, until it is let go on."""

    doors: ClassVar[dict[str, trio.Event]] = {}

    @rpc
    async def release(self) -> None:
        self.doors.setdefault(self.name, trio.Event()).set()

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        async for chunk in super().on_chat_message(turn):
            yield chunk
            if chunk.get("delta") == " w3":
                await self.doors.setdefault(self.name, trio.Event()).wait()


class Slow(ChatBot):
    """A chat bot that thinks for a while before its first word."""

    async def on_chat_message(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        if not turn.text:
            await trio.sleep(1.5)
        async for chunk in super().on_chat_message(turn):
            yield chunk


class Climber(Agent):
    """Tells how far it is, and that it has reached the camp."""

    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        for step in range(4):
            await self.report_progress(
                fraction=step / 4, message=f"step {step}", phase="up"
            )
            yield {"type": "text-delta", "id": "t", "delta": f"{step} "}
            await trio.sleep(0.25)
        await self.report_progress(milestone="camp", data={"metres": 4800})
        yield {"type": "text-delta", "id": "t", "delta": "there"}


class Worker(Agent):
    async def on_turn(self, turn: Turn) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-start", "id": "t"}
        for i in range(8):
            await trio.sleep(PACE_S)
            yield {"type": "text-delta", "id": "t", "delta": f"d{i} "}
        yield {"type": "text-end", "id": "t"}


class Asked(Think):
    """Is asked with a text, as a run as well."""

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return str(input["do"])


class Clerk(Asked):
    """Asks for what it is told to, `name …` a call, then says how often it has paid."""

    initial_state = {"paid": 0}

    def get_model(self) -> Any:
        return ScriptedModel(self.play, pace_s=PACE_S)

    def play(self, request: ModelRequest) -> list[Any]:
        if request.messages[-1].role == "user":
            names = request.messages[-1].content.split()
            stamp = len(request.messages)
            return [
                ToolCall(id=f"call-{stamp}-{i}", name=name, input={})
                for i, name in enumerate(names)
            ]
        results = [m.content for m in request.messages if m.role == "tool"]
        words = f"paid {self.state['paid']} times; {'; '.join(results)}".split(" ")
        return [word if i == 0 else f" {word}" for i, word in enumerate(words)]

    def get_tools(self) -> dict[str, Any]:
        return {
            "pay": tool(self.pay, needs_approval=True),
            "where": tool(self.where, client=True),
        }

    async def pay(self) -> str:
        """Pay."""
        self.set_state({"paid": self.state["paid"] + 1})
        return "paid"

    async def where(self) -> str:
        """Tell where the person is."""
        raise NotImplementedError


class Manager(Asked):
    """Hands its task down: the clerk is two levels below the chief."""

    below: ClassVar[type[Agent]] = Clerk

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> list[Any]:
            last = request.messages[-1]
            if last.role == "tool":
                return ["so: ", last.content]
            below = self.below.__name__.lower()
            return [ToolCall(id="down", name=below, input={"do": last.content})]

        return ScriptedModel(play, pace_s=PACE_S)

    def get_tools(self) -> dict[str, Any]:
        name = self.below.__name__.lower()
        return {name: agent_tool(self.below, description="does it")}

    async def on_before_sub_agent(self, request: Request, child: ChildRef) -> Any:
        if "refuse" in request.query:
            return Response("not you", 403)
        return await super().on_before_sub_agent(request, child)


class Chief(Manager):
    below = Manager


class Scribe(Think):
    """Says something of every kind that a model with tools says, in two steps."""

    def get_model(self) -> Any:
        steps: list[list[Any]] = [
            [
                ReasoningDelta("hm, "), ReasoningDelta("well"), TextDelta("I "),
                TextDelta("look"), ReasoningDelta("and"), TextDelta(" twice"),
                Usage(input_tokens=3, output_tokens=4),
                ToolCall(id="c1", name="pages", input={"to": 3}),
                ToolCall(id="c2", name="lost", input={}),
                ToolCall(id="c3", name="no such tool", input={"deep": [1, {"x": None}]}),
            ],
            [TextDelta("So "), TextDelta("it is."), Usage(input_tokens=1, output_tokens=1)],
        ]  # fmt: skip

        def play(request: ModelRequest) -> list[Any]:
            return steps[step_number(request)]

        return ScriptedModel(play, pace_s=PACE_S)

    def get_tools(self) -> dict[str, Any]:
        return {"pages": tool(self.pages), "lost": tool(self.lost)}

    async def pages(self, to: int) -> AsyncIterator[dict[str, int]]:
        """Tell the pages, one after the other."""
        for number in range(to):
            yield {"page": number}

    async def lost(self) -> None:
        """Find nothing."""
        raise UserError("it is lost")


class Note(Agent):
    initial_state = {"n": 0}

    @rpc
    async def where(self) -> list[str]:
        return [step.name for step in self.self_path]

    @rpc
    async def spell(self) -> AsyncIterator[Any]:
        for letter in self.name:
            yield letter
        yield Final(len(self.name))


class Supervisor(Agent):
    initial_state = {"n": 0}

    @rpc
    async def ping(self, text: str) -> str:
        return text

    @rpc
    async def count(self, n: int) -> AsyncIterator[Any]:
        for i in range(n):
            yield i
        yield Final(n)

    def should_connection_be_readonly(
        self, connection: Connection, ctx: ConnectContext
    ) -> bool:
        return "readonly" in ctx.request.query

    @rpc
    async def label(self) -> str:
        here = current_agent()
        assert here is not None
        assert here.connection is not None
        return here.connection.id

    @rpc
    async def nothing(self) -> None:
        pass

    @rpc
    async def wait(self) -> None:
        await trio.sleep(60)

    @rpc
    async def hang_up(self, code: int) -> None:
        for connection in self.sockets.list():
            connection.close(code, "as asked")

    @rpc
    async def talk(self, held: bool = False) -> str:
        kind = Held if held else ChatBot
        run = await self.run_agent_tool(kind, "go", parent_tool_call_id="call-3")
        return run.status

    @rpc
    async def forget(self) -> int:
        return await self.runs.clear()

    @rpc
    async def climb(self) -> str:
        run = await self.run_agent_tool(Climber, {}, parent_tool_call_id="call-2")
        return run.status

    @rpc
    async def fail(self) -> None:
        raise RuntimeError("words of the house")

    @rpc
    async def research(self, k: int) -> list[str]:
        out = [""] * k

        async def one(i: int) -> None:
            run = await self.run_agent_tool(
                Worker, {"i": i}, parent_tool_call_id="call-1", display_order=i
            )
            out[i] = run.status

        async with trio.open_nursery() as nursery:
            for i in range(k):
                nursery.start_soon(one, i)
        return out


class Hush(Agent):
    """Has a state, and does not say who it is."""

    initial_state = {"n": 0}
    send_identity_on_connect = False

    @rpc
    async def ping(self, text: str) -> str:
        return text


class Plain(Hush):
    """Says who it is, and has no state."""

    initial_state = None
    send_identity_on_connect = True


async def main(docs: str | None, data: str | None, plain: bool) -> None:
    roots: list[type[Agent]] = [
        Supervisor, ChatBot, Mood, Slow, Clerk, Chief, Hush, Plain, Scribe, Held,
    ]  # fmt: skip
    facets: list[type[Agent]] = [Worker, Climber, Note, Manager, Clerk, ChatBot, Held]
    if docs is not None:
        demo = demo_classes(corpora([docs]), DEMO_PACE_S)
        roots.append(demo.assistant)
        facets += [demo.researcher, demo.library]
    with tempfile.TemporaryDirectory(prefix="culet-js-") as folder:
        storage = f"sqlite:{data or folder}"
        async with (
            open_kernel(roots=roots, facets=facets, storage=storage) as kernel,
            trio.open_nursery() as nursery,
        ):
            app = create_app(kernel, origins="*")
            add_pages(app)

            @app.websocket("/desk/<name>/<path:rest>")
            async def desk(name: str, rest: str) -> None:
                parent = await kernel.get_agent(Supervisor, name)
                await route_sub_agent_socket(websocket, parent)

            url = await nursery.start(listen_plain if plain else listen, app)
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()


async def listen(app: Any, *, task_status: Any) -> None:
    await serve(app, bind="127.0.0.1:0", task_status=task_status)


async def listen_plain(app: Any, *, task_status: Any) -> None:
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.errorlog = None
    async with trio.open_nursery() as nursery:
        binds = await nursery.start(partial(hypercorn_serve, app, config))
        task_status.started(binds[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--demo", default=None)
    parser.add_argument("--data", default=None)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    trio.run(main, args.demo, args.data, args.plain)
