"""The agents of the crash scenarios: those of the run machine, and what else they need.

Whatever they do outside is noted in the model, unless the process is dead by then: what
happens in a dead process has not happened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
import trio

from adapters.peer import user
from culet.adapters import ScriptedModel, Think, tool
from culet.adapters.model import (
    Finish,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ToolCall,
)
from culet.adapters.tooling import ToolContext
from culet.kernel import (
    Agent,
    AgentToolRun,
    Chunk,
    Detached,
    Done,
    NotDone,
    Schedule,
    Turn,
    agent_tool,
    current_effect,
)
from culet.kernel.core.chunks import text_of
from machines.world import CLASSES, Actor, Model, Root, Worker


class Noting(Actor):
    """An agent that writes down what it is told."""

    async def on_start(self, props: Any = None) -> None:
        self.sql("create table if not exists note (id text primary key, text)")

    async def note(self, key: str, text: str) -> None:
        self.sql("insert or ignore into note values (?, ?)", key, text)

    async def pair(self, key: str) -> None:
        """Two rows that are there together or not at all."""
        with self.transaction():
            self.sql("insert or ignore into note values (?, 'left')", f"{key}-left")
            self.sql("insert or ignore into note values (?, 'right')", f"{key}-right")

    async def notes(self) -> list[str]:
        return [r.id for r in self.sql("select id from note order by id")]

    async def once(self, seconds: float, what: str) -> str:
        made = await self.schedule(seconds, "fire", {"what": what}, idempotent=True)
        return made.id

    async def send(self, run_id: str, program: list[Any]) -> str:
        """Start a run that nobody waits for."""
        run = await self.run_agent_tool(
            CLASSES["Worker"], program, run_id=run_id,
            detached=Detached(on_finish="heard"),
        )  # fmt: skip
        return run.status

    async def heard(self, run: AgentToolRun) -> None:
        """Called with the end of a detached run, beside the hook."""
        self.sql("insert or ignore into note values (?, ?)", run.run_id, run.status)

    async def fire(self, payload: Any, schedule: Schedule) -> None:
        self.sql("insert or ignore into note values (?, 'fired')", payload["what"])
        await super().fire(payload, schedule)


class Kid(Noting):
    async def below(self, name: str) -> list[str]:
        return await note_in(self, name)


class Heir(Kid):
    """What takes over the slot of a kid; its start is told so."""

    async def on_start(self, props: Any = None) -> None:
        await super().on_start(props)
        if self.upgraded_from is not None:
            await self.note(f"was {self.upgraded_from}", "x")


async def note_in(agent: Agent, name: str) -> list[str]:
    """Get a child, let it note something, and return what it has noted."""
    kid = await agent.dynamic_agents.get(Kid, name)
    await kid.note("made", "x")
    return await kid.notes()


class Frail(Worker):
    """A child whose code must not run twice."""

    resumable = False

    async def on_turn(self, turn: Turn) -> AsyncIterator[Chunk]:
        again = turn.request_id in self.model.begun
        self.model.need(not again, f"what cannot go on ran twice: {turn.request_id}")
        async with aclosing(super().on_turn(turn)) as chunks:
            async for chunk in chunks:
                yield chunk


class Boss(Noting, Root):
    async def kid(self, name: str) -> list[str]:
        return await note_in(self, name)

    async def grandkid(self, name: str, below: str) -> list[str]:
        return await (await self.dynamic_agents.get(Kid, name)).below(below)

    async def has(self, name: str) -> bool:
        return self.dynamic_agents.has(Kid, name)

    async def busy_kid(self, name: str) -> None:
        """Let a child owe something, and run something."""
        kid = await self.dynamic_agents.get(Kid, name)
        await kid.once(4, "ping")
        await kid.send("inner", [["emit"], ["sleep", 3]])

    async def succeed(self, name: str) -> list[str]:
        """Let a kid write and owe, then be followed by another class."""
        if not self.dynamic_agents.has(Heir, name):
            kid = await self.dynamic_agents.get(Kid, name)
            await kid.note("before", "x")
            await self.busy_kid(name)
            await self.dynamic_agents.upgrade(Kid, name, to=Heir)
        return await self.heir(name)

    async def heir(self, name: str) -> list[str]:
        return await (await self.dynamic_agents.get(Heir, name)).notes()

    async def kids(self) -> list[list[str]]:
        return [[c.class_name, c.name] for c in self.dynamic_agents.list()]

    async def once_only(self, run_id: str, program: list[Any]) -> str:
        run = await self.run_agent_tool(Frail, program, run_id=run_id)
        return run.status

    async def drop(self, name: str) -> None:
        await self.dynamic_agents.delete(Kid, name)

    async def stop(self, run_id: str) -> list[str]:
        """Abort the facet of a run: what it owes brings it back."""
        if not self.dynamic_agents.has("Worker", run_id):
            return []
        receipt = await self.dynamic_agents.abort(CLASSES["Worker"], run_id)
        return [state for _path, state in receipt.nodes]

    async def put(self, value: Any) -> None:
        self.set_state(value)

    async def look(self) -> Any:
        return self.state

    async def walk(self, key: str, steps: int) -> str:
        """Start a fiber that is known by its key, and wait for its end."""

        async def fn() -> None:
            await self._steps(steps, 0)

        fiber = await self.fibers.start(str(steps), fn, key=key, wait=True)
        return fiber.status

    async def clear(self) -> int:
        return await self.runs.clear()

    async def shown(self) -> list[tuple[str, str]]:
        return [(r.run_id, r.status) for r in self.runs.list()]

    async def pay(self, how: str) -> str:
        """Pay outside, with writes and a record in the middle of it."""
        check = self._was_paid if how == "check" else None
        found: str = await self.effects.call(
            "pay", self._pay, how, key=how, on_uncertain=how, check=check  # type: ignore[arg-type]
        )  # fmt: skip
        return found

    async def _pay(self, how: str) -> str:
        token, paid = outside()
        again = self.model.fired[paid] > 0
        self.model.need(how == "repeat" or not again, f"{how} paid twice: {token}")
        self.model.fired[paid] += 1
        kinds = [p for p in self.model.fired if p.startswith("paid")]
        self.model.need(len(kinds) <= len(PAID), f"too many tokens: {kinds}")
        self.sql("insert or ignore into note values (?, 'paying')", f"paying {how}")
        await self.durable()
        self.sql("insert or ignore into note values (?, 'paid')", f"paid {how}")
        return f"paid {how}"

    async def _was_paid(self, how: str) -> Any:
        _token, paid = outside()
        if not self.model.fired[paid]:
            return NotDone()
        await self.note(f"paid {how}", "as the check found")
        return Done(f"paid {how}")

    async def decide(self) -> None:
        """See that every payment is in the ledger; decide what nobody knows."""
        found = {f"paid {e.token}": e for e in self.effects.list()}
        paid = {p for p in self.model.fired if p.startswith("paid")}
        self.model.need(paid <= found.keys(), f"lost intents: {paid - found.keys()}")
        listed = {e.id for e in self.effects.list(uncertain=True)}
        for key, effect in found.items():
            over = effect.status == "completed"
            self.model.need(over or effect.id in listed, f"not listed: {effect}")
            wrote = f"paid {effect.key}" in await self.notes()
            self.model.need(over == wrote, f"{effect} without what it wrote")
            if effect.policy == "ask" and not over:
                if self.model.fired[key]:
                    self.effects.resolve(effect.id, result=f"paid {effect.key}")
                    await self.note(f"paid {effect.key}", "by hand")
                else:
                    self.effects.resolve(effect.id, repeat=True)


PAID = ("ask", "repeat", "check")


def outside() -> tuple[str, str]:
    """Return the token of the effect that is done, and its name in the model's count."""
    here = current_effect()
    assert here is not None
    return here.token, f"paid {here.token}"


class Scribe(Think):
    """A child that says its input back."""

    def get_model(self) -> Any:
        return ScriptedModel(lambda r: [r.messages[-1].content])

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return str(input["text"])


class Thinker(Think):
    """A chat whose script asks a child, then a tool that may be asked again."""

    model: ClassVar[Model]

    def get_model(self) -> Any:
        if text_of(self.messages[0]["parts"]) == "Pay.":
            pay = ToolCall(id="p1", name="pay", input={"n": 5})
            return ScriptedModel([["Paying. ", pay], ["It is ", "paid."]])
        return ScriptedModel(
            [
                ["Asking. ", ToolCall(id="c1", name="scribe", input={"text": "seven"})],
                ["Adding. ", ToolCall(id="c2", name="add", input={"a": 3, "b": 4})],
                ["It is ", "seven."],
            ]
        )

    def get_tools(self) -> dict[str, Any]:
        return {
            "scribe": agent_tool(Scribe, description="writes"),
            "add": tool(self.add, on_uncertain="repeat"),
            "pay": tool(self.pay),
        }

    async def pay(self, ctx: ToolContext, n: int) -> str:
        token, paid = outside()
        self.model.need(token == ctx.idempotency_key, f"two tokens: {token} {ctx}")
        self.model.need(not self.model.fired[paid], f"paid twice: {token}")
        self.model.fired[paid] += 1
        self.sql("create table if not exists paid (n)")
        await self.durable()
        self.sql("insert into paid values (?)", n)
        return f"paid {n}"

    async def decide(self) -> bool:
        """Decide as a person would who can look outside; whether there was a doubt."""
        doubts = self.effects.list(uncertain=True)
        listed = {f"paid {e.token}" for e in self.effects.list()}
        paid = {p for p in self.model.fired if p.startswith("paid")}
        self.model.need(paid <= listed, f"lost intents: {paid - listed}")
        over = {
            chunk["toolCallId"]
            for chunk in await self.told()
            if chunk["type"] == "tool-output-available"
        }
        for doubt in doubts:
            known = doubt.tool_call_id in over
            self.model.need(not known, f"said and not written down: {doubt}")
            if self.model.fired[f"paid {doubt.token}"]:
                self.effects.resolve(doubt.id, result="paid 5")
            else:
                self.effects.resolve(doubt.id, repeat=True)
        return bool(doubts)

    async def busy(self) -> bool:
        return bool(self._chat.turns())

    async def add(self, ctx: ToolContext, a: int, b: int) -> int:
        await self.durable()
        done = "tool-output-available"
        finished = any(
            chunk["type"] == done and chunk["toolCallId"] == ctx.tool_call_id
            for chunk in await self.told()
        )
        self.model.need(not finished, f"a finished call was repeated: {ctx}")
        self.model.fired[f"add {a} {b}"] += 1
        return a + b

    async def told(self) -> list[dict[str, Any]]:
        """Return the chunks of all turns that are stored by now."""
        slot = self._node.slot
        rows = self._node.tree.store.agent(slot).execute(
            "SELECT body FROM main.culet_entry"
        )
        return [msgspec.json.decode(row[0]) for row in rows]

    async def submit(self, key: str, text: str) -> str:
        message = user(f"u-{key}", text)
        made = await self.submit_messages([message], idempotency_key=key)
        return made.request_id

    async def ended(self, key: str) -> str:
        """Wait for the end of a turn that was submitted."""
        while True:
            fiber = self.fibers.inspect(key=key)
            assert fiber is not None
            if fiber.status != "running":
                return fiber.status
            await trio.sleep(0.5)

    async def history(self) -> list[Any]:
        return [shown(m) for m in self.messages]

    async def asked(self) -> list[tuple[str, str]]:
        return [(r.agent_type, r.status) for r in self.runs.list()]


class Hesitant(Thinker):
    """Its model falls silent behind the first word, each time until that is stored."""

    stall_s = 5.0

    def get_model(self) -> Any:
        return Halting()

    def get_tools(self) -> dict[str, Any]:
        return {}


class Halting:
    async def stream(self, request: ModelRequest, /) -> AsyncIterator[ModelEvent]:
        if not request.partial:
            yield TextDelta("One, ")
            await trio.sleep_forever()
        yield TextDelta("two.")
        yield Finish("stop")


def shown(message: dict[str, Any]) -> list[Any]:
    """Return the parts of a message, short."""
    out: list[Any] = [message["role"]]
    for part in message["parts"]:
        if "toolCallId" in part:
            out.append([part["toolName"], part["state"], part.get("output")])
        elif "text" in part:
            out.append(part["text"])
    return out


ROOTS: list[type[Agent]] = [Boss, Thinker, Hesitant]
FACETS: list[type[Agent]] = [Worker, Frail, Kid, Heir, Scribe]
