"""What a run asks a person goes up to everybody above, and is answered from there, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.peer import Client, connected, user
from culet.adapters import ScriptedModel, Think, tool
from culet.adapters.model import ModelRequest, ToolCall
from culet.adapters.scripted import step_number
from culet.kernel import (
    Agent,
    AgentToolRun,
    CancelReceipt,
    Question,
    Request,
    Response,
    agent_tool,
)
from culet.kernel.errors import NotFound, SqlError, UsageError
from culet.kernel.testing import Harness, open_test_kernel
from culet.kernel.testing_scenario import Point, Scenario, Spec, run_scenario
from volume import Volume

CRASHES = Volume(12, 40, 10**6)
SCENE: Scenario | None = None  # of a crash test
DONE: list[str] = []
GATES: list[str] = []
DOOR = trio.Event()  # before which a leaf stands after a crash
ROOT = ("Boss", "a")
PAY: Any = [ToolCall(id="k1", name="pay", input={"n": 1})]


@pytest.fixture(autouse=True)
def fresh() -> None:
    global SCENE
    for seen in (DONE, GATES):
        seen.clear()
    SCENE = None
    DOOR.set()


class Base(Think):
    """Hands its task down, to the facet of the next level; the last one pays."""

    steps: ClassVar[Any] = None
    below: ClassVar[str] = ""
    questions: ClassVar[Any] = None

    def get_model(self) -> Any:
        def play(request: ModelRequest) -> Any:
            step = type(self).steps[step_number(request)]
            return [step] if isinstance(step, str) else step

        return ScriptedModel(play)

    def get_tools(self) -> dict[str, Any]:
        kinds = {"Mid": Mid, "Low": Low, "Leaf": Leaf}
        out: dict[str, Any] = {
            "pay": tool(self.pay, needs_approval=True, on_uncertain="fail"),
            "repay": tool(self.pay, needs_approval=True),
            "where": tool(self.where, client=True),
        }
        for name, kind in kinds.items():
            out[name] = agent_tool(
                kind, description="does it", questions=type(self).questions
            )
        return out

    async def pay(self, n: int) -> str:
        if SCENE is not None:
            SCENE.effect("pay", "k1")
        DONE.append(f"{type(self).__name__} {n}")
        if n == 13:
            await trio.sleep(100)
        return f"paid {n}"

    async def where(self) -> str:
        raise AssertionError("the client runs it")

    def format_agent_tool_input(self, input: Any, request: Any) -> str:  # noqa: A002
        return "go"

    async def all_runs(self) -> list[AgentToolRun]:
        return self.runs.list()

    async def asked(self) -> list[Question]:
        return self.runs.questions()

    async def approve(self, run_id: str, call_id: str, approved: bool) -> bool:
        return await self.runs.approve(run_id, call_id, approved=approved)

    async def answer(self, run_id: str, call_id: str, output: Any) -> bool:
        return await self.runs.answer(run_id, call_id, output)

    async def approved(self) -> bool:
        """Whether a call somewhere below was approved."""
        for child in self.dynamic_agents.list():
            kind = {"Mid": Mid, "Low": Low, "Leaf": Leaf}[child.class_name]
            facet = await self.dynamic_agents.lookup(kind, child.name)
            if facet is not None and await facet.approved():
                return True
        parts = [p for m in self.messages for p in m["parts"]]
        return any((p.get("approval") or {}).get("approved") for p in parts)

    async def stop(self, run_id: str) -> CancelReceipt:
        return await self.runs.cancel(run_id)

    async def run_below(self, questions: Any, detached: bool) -> AgentToolRun:
        return await self.run_agent_tool(
            Mid, None, run_id="m", questions=questions, detached=detached
        )

    async def on_before_sub_agent(self, request: Request, child: Any) -> Any:
        GATES.append(f"{type(self).__name__}>{child.class_name} {request.path}")
        if f"{type(self).__name__}>{child.class_name}" in REFUSED:
            return Response("no", 403)
        if "broken" in REFUSED:
            raise SqlError("secret-token-9", "select secret")
        return await super().on_before_sub_agent(request, child)

    def should_connection_be_readonly(self, connection: Any, ctx: Any) -> bool:
        return connection.id == "reader"


REFUSED: set[str] = set()


@pytest.fixture(autouse=True)
def open_gates() -> Any:
    REFUSED.clear()
    yield
    REFUSED.clear()


class Boss(Base):
    pass


class Mid(Base):
    pass


class Low(Base):
    pass


class Leaf(Base):
    async def on_chat_recovery(self, ctx: Any) -> None:
        await DOOR.wait()


class Plain(Agent):
    """A parent that has no chat: any agent may ask for runs, and answer for them."""

    async def begin(self) -> AgentToolRun:
        return await self.run_agent_tool(Leaf, None, run_id="r", detached=True)

    async def look(self) -> list[AgentToolRun]:
        return self.runs.list()

    async def make(self) -> None:
        await self.dynamic_agents.get(Leaf, "r")

    async def waits(self) -> list[str]:
        return [q.tool_call_id for q in self.runs.questions("r")]

    async def approve(self, run_id: str, call_id: str) -> bool:
        return await self.runs.approve(run_id, call_id)


def ask(name: str) -> Any:
    return [ToolCall(id=f"to-{name}", name=name, input={})]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_steps(**steps: Any) -> None:
        for kind in (Boss, Mid, Low, Leaf):
            given = steps.get(kind.__name__)
            if given is not None:
                monkeypatch.setattr(kind, "steps", given)

    set_steps(
        Boss=[ask("Mid"), "All done."],
        Mid=[ask("Low"), "Mid done."],
        Low=[ask("Leaf"), "Low done."],
        Leaf=[PAY, "Leaf done."],
    )
    return set_steps


def kernel(**options: Any) -> Any:
    return open_test_kernel(roots=[Boss, Plain], facets=[Mid, Low, Leaf], **options)


def asks(tab: Client) -> list[dict[str, Any]]:
    """Return what the newest report about waiting says, as this client has it."""
    found = progress(tab)
    told = [p for p in found if p.get("phase") in ("waiting", "answered")]
    if not told or told[-1]["phase"] == "answered":
        return []
    calls: list[dict[str, Any]] = told[-1]["data"]["calls"]
    return calls


def progress(tab: Client) -> list[dict[str, Any]]:
    out = []
    for frame in tab.of("agent-tool-event"):
        body = frame["event"].get("body")
        chunk = msgspec.json.decode(body) if body else {}
        if chunk.get("type") == "data-agent-progress":
            out.append(chunk["data"])
    return out


async def asked(tab: Client) -> dict[str, Any]:
    """Ask the root; return the one question that comes up from below."""
    tab.chat("r1", user("u1", "hi"))
    await tab.until(lambda c: bool(asks(c)))
    [question] = asks(tab)
    return question


async def run_ended(test: Harness, run_id: str | None = None) -> AgentToolRun:
    boss = await test.kernel.get_agent(Boss, "a")
    with trio.fail_after(600):
        while True:
            runs = [r for r in await boss.all_runs() if run_id in (None, r.run_id)]
            if runs and runs[0].status != "running":
                return runs[0]
            await trio.sleep(0.5)


# ---- up to people


@pytest.mark.rule("B-11", "W-187", "W-188", "W-189")
async def test_a_question_three_levels_down_is_answered_at_the_top(
    clock: object, script: Any
) -> None:
    async with kernel() as test, connected(test.kernel, ROOT) as tab:
        question = await asked(tab)
        leaf_run = question.pop("runId")
        assert question == {
            "toolCallId": "k1", "toolName": "pay", "state": "approval-requested",
            "input": {"n": 1},
        }  # fmt: skip
        boss = await test.kernel.get_agent(Boss, "a")
        [seen] = await boss.asked()
        assert (seen.run_id, seen.tool_name, seen.input) == (leaf_run, "pay", {"n": 1})
        assert seen.path.count("/") == 7
        assert seen.path.endswith(f"Leaf/{leaf_run}")
        await trio.sleep(100_000)  # nothing polls, nothing ends it
        tab.send(
            "cf_agent_tool_approval", toolCallId="k1", approved=True, runId=leaf_run
        )
        await tab.ended("r1")
        assert DONE == ["Leaf 1"]
        assert tab.text("r1") == "All done."
        [told] = tab.of("cf_agent_run_answer")
        assert told == {
            "type": "cf_agent_run_answer", "runId": leaf_run, "toolCallId": "k1",
            "accepted": True,
        }  # fmt: skip
        # the same turns went on: no run was asked for again
        runs = await boss.all_runs()
        assert [r.status for r in runs] == ["completed"]
        assert asks(tab) == []
        assert progress(tab)[-1]["phase"] == "answered"
        # the gates on the way down were asked, in the name of that client
        assert [g.partition(" ")[0] for g in GATES] == [
            "Boss>Mid",
            "Mid>Low",
            "Low>Leaf",
        ]
        assert GATES[0].endswith(f"/sub/leaf/{leaf_run}")


@pytest.mark.rule("B-11", "W-187", "W-188")
async def test_every_level_between_may_answer_and_the_first_one_stands(
    clock: object, script: Any
) -> None:
    async with kernel() as test, connected(test.kernel, ROOT) as tab:
        question = await asked(tab)
        boss = await test.kernel.get_agent(Boss, "a")
        [mid] = await boss.all_runs()
        told = {"toolCallId": "k1", "runId": question["runId"]}
        async with connected(test.kernel, ROOT, ("Mid", mid.run_id)) as between:
            await between.until(lambda c: bool(asks(c)))
            between.send("cf_agent_tool_approval", approved=False, **told)
            await between.until(lambda c: bool(c.of("cf_agent_run_answer")))
        tab.send("cf_agent_tool_approval", approved=True, **told)
        await tab.until(lambda c: bool(c.of("cf_agent_run_answer")))
        assert [f["accepted"] for f in tab.of("cf_agent_run_answer")] == [False]
        await tab.ended("r1")
        assert DONE == []
        assert not await boss.approve(question["runId"], "k1", True)


@pytest.mark.rule("W-190")
async def test_who_answers_at_the_child_s_own_address_is_as_good(
    clock: object, script: Any
) -> None:
    script(Boss=[ask("Leaf"), "All done."])
    async with kernel() as test, connected(test.kernel, ROOT) as tab:
        question = await asked(tab)
        async with connected(test.kernel, ROOT, ("Leaf", question["runId"])) as window:
            window.send("cf_agent_tool_approval", toolCallId="k1", approved=True)
            await window.until(lambda c: bool(c.of("cf_agent_message_updated")))
        tab.send(
            "cf_agent_tool_approval", toolCallId="k1", approved=False,
            runId=question["runId"],
        )  # fmt: skip
        await tab.until(lambda c: bool(c.of("cf_agent_run_answer")))
        assert not tab.of("cf_agent_run_answer")[0]["accepted"]
        await tab.ended("r1")
        assert DONE == ["Leaf 1"]


@pytest.mark.rule("W-187")
async def test_two_that_ask_at_once_are_told_apart(clock: object, script: Any) -> None:
    two = [ToolCall(id="to-1", name="Leaf", input={"a": 1}),
           ToolCall(id="to-2", name="Leaf", input={"a": 2})]  # fmt: skip
    where = [*PAY, ToolCall(id="k2", name="where", input={})]
    script(Boss=[ask("Mid"), "All done."], Mid=[two, "Both."], Leaf=[where, "So."])
    async with kernel() as test, connected(test.kernel, ROOT) as tab:
        tab.chat("r1", user("u1", "hi"))
        await tab.until(lambda c: len(asks(c)) == 4)
        first, second = sorted({a["runId"] for a in asks(tab)})
        boss = await test.kernel.get_agent(Boss, "a")
        assert {(q.run_id, q.state) for q in await boss.asked()} == {
            (run, state)
            for run in (first, second)
            for state in ("approval-requested", "input-available")
        }
        assert await boss.approve(first, "k1", False)
        await tab.until(lambda c: len(asks(c)) == 3)
        assert await boss.answer(first, "k2", {"at": "home"})
        await tab.until(lambda c: len(asks(c)) == 2)
        assert {a["runId"] for a in asks(tab)} == {second}
        tab.send("cf_agent_tool_result", toolCallId="k2", runId=second, output="here")
        assert await boss.approve(second, "k1", True)
        await tab.ended("r1")
        assert DONE == ["Leaf 1"]
        with pytest.raises(UsageError):
            await boss.answer(first, "k2", float)


@pytest.mark.rule("W-190")
async def test_a_parent_without_a_chat_answers_too(clock: object, script: Any) -> None:
    async with kernel() as test, connected(test.kernel, ("Plain", "p")) as tab:
        plain = await test.kernel.get_agent(Plain, "p")
        await plain.begin()
        await tab.until(lambda c: bool(asks(c)))
        tab.send("cf_agent_tool_approval", toolCallId="k1", approved=True, runId="r")
        await tab.until(lambda c: bool(c.of("cf_agent_run_answer")))
        await trio.sleep(5)
        [run] = await plain.look()
        assert (run.status, run.summary) == ("completed", "Leaf done.")


@pytest.mark.rule("B-11")
@pytest.mark.parametrize("cut", ["leaf", "all"])
async def test_it_is_asked_and_answered_over_crashes(
    clock: object, script: Any, cut: str
) -> None:
    async with kernel() as test:
        async with connected(test.kernel, ROOT) as tab:
            question = await asked(tab)
        for _ in range(3 if cut == "all" else 1):
            await test.crash()
            await test.reopen()
            await test.kernel.get_agent(Boss, "a")
            await trio.sleep(20)
        async with connected(test.kernel, ROOT) as tab:
            await tab.until(lambda c: bool(asks(c)))
            assert asks(tab)[0]["runId"] == question["runId"]
            tab.send(
                "cf_agent_tool_approval", toolCallId="k1", approved=True,
                runId=question["runId"],
            )  # fmt: skip
            await tab.until(lambda c: bool(c.of("cf_agent_run_answer")))
        if cut == "all":
            await test.crash()  # what was told is durable
            await test.reopen()
            await test.kernel.get_agent(Boss, "a")
        run = await run_ended(test)
        assert run.status == "completed"
        assert DONE == ["Leaf 1"]
        async with connected(test.kernel, ROOT) as tab:
            await tab.until(lambda c: bool(progress(c)))
            await trio.sleep(5)
            assert asks(tab) == []


async def test_an_answer_before_its_run_waits_again_is_told_above(
    clock: object, script: Any
) -> None:
    global DOOR
    async with kernel() as test:
        async with connected(test.kernel, ROOT) as tab:
            question = await asked(tab)
        await trio.sleep(5)
        await test.crash()
        await test.reopen()
        DOOR = trio.Event()
        boss = await test.kernel.get_agent(Boss, "a")
        await trio.sleep(5)
        assert await boss.approve(question["runId"], "k1", True)
        DOOR.set()
        run = await run_ended(test)
        assert run.status == "completed"
        async with connected(test.kernel, ROOT) as tab:
            await tab.until(lambda c: bool(progress(c)))
            await trio.sleep(5)
            assert progress(tab)[-1]["phase"] == "answered"
        assert DONE == ["Leaf 1"]


async def story(scenario: Scenario) -> None:
    """A run two levels down asks; it is answered from the top, and told so once."""
    global SCENE
    SCENE = scenario
    boss = await scenario.get(Boss, "a")
    await boss.run_below(None, True)
    for _ in range(40):
        questions = await boss.asked()
        run = (await boss.all_runs())[0]
        if questions or run.status != "running":
            break
        await scenario.advance(1)
    for question in questions:
        if await boss.approve(question.run_id, question.tool_call_id, True):
            scenario.told("approved", True)
    for _ in range(60):
        run = (await boss.all_runs())[0]
        if run.status != "running":
            scenario.ended("m", run.status)
            break
        await scenario.advance(1)

    @scenario.recall
    async def read() -> dict[str, Any]:
        return {"approved": await boss_of(scenario).approved()}


def boss_of(scenario: Scenario) -> Any:
    node = scenario.harness.find([ROOT])
    assert node is not None
    return node.agent


def test_an_answer_that_was_taken_stands_after_a_crash_at_any_point(
    script: Any,
) -> None:
    script(Mid=[ask("Leaf"), "Mid done."])
    spec = Spec(roots=[Boss], facets=[Mid, Low, Leaf], effects={"pay": "at_most_once"})
    whole = run_scenario(story, spec)
    assert whole.findings == ()
    assert whole.effects == {("pay", "k1"): 1}
    commits, records = whole.lives[0]
    points = [Point("commit", n + 1) for n in range(commits)]
    points += [Point("landed", n + 1) for n in range(records)]
    assert len(points) > 20
    for point in points[:: max(1, len(points) // CRASHES.now)]:
        told = run_scenario(story, spec, (point,), hasty=True)
        assert told.findings == (), point
        assert told.reached, point


# ---- who may not


@pytest.mark.rule("B-11", "W-189")
@pytest.mark.parametrize(
    "who", ["readonly", "a gate", "nobody", "another call", "a broken gate"]
)
async def test_the_gates_hold(clock: object, script: Any, who: str) -> None:
    name = "reader" if who == "readonly" else "c"
    async with (
        kernel() as test,
        connected(test.kernel, ROOT) as first,
        connected(test.kernel, ROOT, connection_id=name) as tab,
    ):
        question = await asked(first)
        if who == "a gate":
            REFUSED.add("Mid>Low")
        if who == "a broken gate":
            REFUSED.add("broken")
        told = {"toolCallId": "k1", "runId": question["runId"], "approved": True}
        if who == "nobody":
            told["runId"] = "run-of-nobody"
        if who == "another call":
            told["toolCallId"] = "k9"
        tab.send("cf_agent_tool_approval", **told)
        await tab.until(lambda c: bool(c.of("cf_agent_run_answer")))
        [answer] = tab.of("cf_agent_run_answer")
        assert not answer["accepted"]
        why = {
            "readonly": "readonly", "a gate": "gate", "nobody": "no run",
            "a broken gate": "(error ",
        }.get(who)  # fmt: skip
        assert why is None or why in answer["error"]
        assert "secret" not in str(answer), "a client gets no words of a query"
        assert first.of("cf_agent_run_answer") == []
        await trio.sleep(10)
        assert DONE == []
        boss = await test.kernel.get_agent(Boss, "a")
        assert len(await boss.asked()) == 1


@pytest.mark.rule("W-186")
async def test_a_readonly_client_answers_nothing_of_its_own_agent_either(
    clock: object, script: Any
) -> None:
    script(Boss=[PAY, "Done."])
    async with (
        kernel() as test,
        connected(test.kernel, ROOT, connection_id="reader") as tab,
    ):
        tab.chat("r1", user("u1", "hi"))
        await tab.ended("r1")
        said = {"toolCallId": "k1", "approved": True, "autoContinue": True}
        tab.send("cf_agent_tool_approval", **said)
        await trio.sleep(60)
        assert DONE == []
        assert tab.of("cf_agent_message_updated") == []


async def test_a_run_s_id_opens_no_other_call_of_its_facet(
    clock: object, script: Any
) -> None:
    script(Leaf=[[ToolCall(id="own", name="pay", input={"n": 2})], "Own."])
    async with kernel() as test:
        plain = await test.kernel.get_agent(Plain, "p")
        await plain.make()
        async with connected(test.kernel, ("Plain", "p"), ("Leaf", "r")) as window:
            window.chat("r1", user("u1", "hi"))
            await window.ended("r1")
        script(Leaf=[PAY, "Leaf done."])
        await plain.begin()
        await trio.sleep(5)
        assert await plain.waits() == ["k1"]
        assert not await plain.approve("r", "own")
        assert await plain.waits() == ["k1"]
        assert await plain.approve("r", "k1")
        await trio.sleep(60)
        assert DONE == ["Leaf 1"]


async def test_an_agent_answers_below_itself_only(clock: object, script: Any) -> None:
    async with kernel() as test, connected(test.kernel, ROOT) as tab:
        question = await asked(tab)
        other = await test.kernel.get_agent(Boss, "b")
        with pytest.raises(NotFound):
            await other.approve(question["runId"], "k1", True)
        assert DONE == []


async def test_a_run_that_was_cancelled_takes_its_questions_along(
    clock: object, script: Any
) -> None:
    async with kernel() as test, connected(test.kernel, ROOT) as tab:
        question = await asked(tab)
        boss = await test.kernel.get_agent(Boss, "a")
        [run] = await boss.all_runs()
        receipt = await boss.stop(run.run_id)
        assert [(q.run_id, q.tool_call_id, q.tool_name) for q in receipt.questions] == [
            (question["runId"], "k1", "pay")
        ]
        assert await boss.asked() == []
        assert not await boss.approve(question["runId"], "k1", True)
        await trio.sleep(5)
        assert DONE == []


# ---- policies


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
async def test_those_above_are_told_that_nobody_can_answer_any_more(
    clock: object, script: Any, how: str
) -> None:
    async with kernel() as test, connected(test.kernel, ROOT) as tab:
        leaf_run = (await asked(tab))["runId"]
        tree = test.tree(*ROOT)
        assert tree is not None
        sql = "SELECT owner, child FROM run WHERE id = ?"
        [(owner, child)] = tree.db.execute(sql, (leaf_run,))
        if how == "cancelled":
            await tree.runs.stop(owner, leaf_run, "test")
        else:
            await tree.delete(child)

        assert (await run_ended(test)).status == "completed"
        assert progress(tab)[-1]["phase"] == "answered"
        assert asks(tab) == []


@pytest.mark.rule("B-11")
@pytest.mark.parametrize(
    ("policy", "done", "said"),
    [("deny", [], "refused"), ("auto", ["Leaf 1"], "paid 1")],
)
@pytest.mark.parametrize("at", ["run", "tool", "class", "above"])
async def test_a_policy_decides_at_once(
    clock: object,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    policy: Any,
    done: list[str],
    said: str,
    at: str,
) -> None:
    script(Mid=[ask("Leaf"), "Mid done."])
    if at == "tool":
        monkeypatch.setattr(Mid, "questions", policy)
    if at == "class":
        monkeypatch.setattr(Mid, "agent_tool_questions", policy)
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        with trio.fail_after(60):
            run = await boss.run_below(
                policy if at in ("run", "above") else None, False
            )
        assert run.status == "completed"
        assert done == DONE


async def test_what_a_client_carries_out_no_policy_can_but_it_can_be_refused(
    clock: object, script: Any
) -> None:
    script(Mid=[[ToolCall(id="k2", name="where", input={})], "Mid done."])
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        await boss.run_below("auto", True)
        await trio.sleep(10)
        [question] = await boss.asked()
        assert (question.run_id, question.state) == ("m", "input-available")
        assert await boss.answer("m", "k2", "home")
        assert (await run_ended(test, "m")).status == "completed"
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        with trio.fail_after(60):
            assert (await boss.run_below("deny", False)).status == "completed"


async def test_the_nearest_word_decides_and_a_policy_outlives_the_process(
    clock: object, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(Mid=[ask("Leaf"), "Mid done."])
    monkeypatch.setattr(Mid, "questions", "deny")
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        assert (await boss.run_below("auto", False)).status == "completed"
        assert DONE == []
    monkeypatch.setattr(Mid, "questions", None)
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        await boss.run_below("auto", True)
        await test.crash()
        await test.reopen()
        assert (await run_ended(test, "m")).status == "completed"
        assert DONE == ["Leaf 1"]


async def test_no_policy_does_again_what_may_be_done_already(
    clock: object, script: Any
) -> None:
    repay = [ToolCall(id="k1", name="repay", input={"n": 13})]
    script(Mid=[repay, "Mid done."])
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        await boss.run_below("auto", True)
        await trio.sleep(10)
        assert DONE == ["Mid 13"]
        await test.crash()
        await test.reopen()
        boss = await test.kernel.get_agent(Boss, "a")
        await trio.sleep(300)
        assert DONE == ["Mid 13"]
        [question] = await boss.asked()
        assert question.uncertain
        assert await boss.approve("m", "k1", True)
        assert (await run_ended(test, "m")).status == "completed"
        assert DONE == ["Mid 13", "Mid 13"]


async def test_a_policy_that_is_none_is_refused(clock: object, script: Any) -> None:
    with pytest.raises(UsageError):
        agent_tool(Leaf, description="x", questions="perhaps")  # type: ignore[arg-type]
    async with kernel() as test:
        boss = await test.kernel.get_agent(Boss, "a")
        with pytest.raises(UsageError):
            await boss.run_below("perhaps", False)
        assert await boss.all_runs() == []
