"""The map from the JavaScript SDK names only what exists."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from culet.adapters import Think
from culet.kernel import Agent, Kernel, fibernoun, nouns, runnoun, sockets
from culet.kernel import agent as agents
from culet.kernel.testing import open_test_kernel

TEXT = (Path(__file__).parents[2] / "docs" / "coming-from-javascript.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| (`.*?`) \|", TEXT, re.MULTILINE)
NAMES = sorted(
    {n for _, cell in ROWS for n in re.findall(r"`([\w.]+)(?:\(.*?\))?`", cell)}
)


def noun(of: type, name: str) -> Any:
    """Return what a property of an agent is annotated to return."""
    value = inspect.getattr_static(of, name)
    if isinstance(value, property) and value.fget is not None:
        wanted = str(value.fget.__annotations__.get("return", ""))
        for module in (nouns, runnoun, fibernoun, sockets, agents):
            if hasattr(module, wanted):
                return getattr(module, wanted)
    return value


def found(name: str) -> Any:
    first, *rest = name.split(".")
    if first == "culet":
        *module, last = name.split(".")
        return getattr(importlib.import_module(".".join(module)), last)
    start: Any = {"self": Agent, "kernel": Kernel, "think": Think}[first]
    return reduce(noun, rest, start)


NONE_AT_FIRST = {
    "self.max_concurrent_agent_tools", "self.initial_state", "think.stall_s",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str) -> None:
    assert found(name) is not None or name in NONE_AT_FIRST


# What the facets API of the JavaScript SDK has: routing, identity, children, sockets,
# time, queue and fibers. (Workflows are one word on the page.)
THEIRS = """\
routeAgentRequest getAgentByName routingRetry routeSubAgentRequest getSubAgentByName
parseSubAgentPath SUB_PREFIX buildAgentPath buildAgentUrl camelCaseToKebabCase useAgent
AgentClient onBeforeConnect onBeforeRequest RoutedAgents
dynamicAgents.get .has .list .abort .delete subAgent hasSubAgent listSubAgents
abortSubAgent deleteSubAgent onBeforeSubAgent SubAgentStub SubAgentClass
this.name this.parentPath this.selfPath this.parentAgent .fetch this.sessionAffinity
getCurrentAgent this.schedule this.scheduleEvery cancelSchedule getScheduleById
listSchedules getSchedule getSchedules getSchedulePrompt scheduleSchema
this.queue dequeue dequeueAll dequeueAllByCallback getQueue getQueues this.retry
isErrorRetryable keepAlive keepAliveWhile runFiber startFiber stash inspectFiber
inspectFiberByKey listFibers cancelFiber resolveFiber deleteFibers onFiberRecovered
initialState this.state this.setState validateStateChange onStateChanged onStateUpdate
shouldConnectionBeReadonly setConnectionReadonly isConnectionReadonly
shouldSendProtocolMessages isConnectionProtocolEnabled getConnectionTags
connection.setState this.getConnection this.getConnections this.broadcast @callable
getCallableMethods StreamingResponse onStart onRequest onConnect onMessage onClose
onError this.destroy this.sql subscribe Workflows
"""


@pytest.mark.parametrize("name", THEIRS.split())
def test_each_of_their_names_is_on_the_page(name: str) -> None:
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", TEXT), name


async def test_the_example_does_what_theirs_does(clock: object) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    made: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, "coming-from-javascript.md", "exec"), made)
    boss, runner = made["Supervisor"], made["JobRunner"]
    async with open_test_kernel(roots=[boss], facets=[runner]) as test:
        stub = await test.kernel.get_agent(boss, "alice")
        said = [await stub.run_job("r1", text) for text in ("one", "two")]
        await stub.cancel_job("r1")
        said.append(await stub.run_job("r1", "three"))
        await stub.cleanup_job("r1")
        said.append(await stub.run_job("r1", "again"))
        kind = test.kernel.classes.of(boss, among="roots")

    numbers = [text.partition("number ")[2].partition(",")[0] for text in said]
    assert numbers == ["1", "2", "3", "1"]
    assert said[0].endswith("alice is here")
    assert sorted(kind.rpc) == ["cancelJob", "cleanupJob", "runJob"]


def test_a_name_that_does_not_exist_would_be_found_out() -> None:
    for name in ("self.schedules.nope", "culet.web.nope", "kernel.nope"):
        with pytest.raises(AttributeError):
            found(name)
    assert len(NAMES) > 90
