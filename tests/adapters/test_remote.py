"""Both models behind HTTP, through Think on a real kernel, against the mock and raw servers."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, ClassVar

import msgspec
import pytest
import trio

from adapters.mock_api import (
    KEY,
    Mock,
    begin,
    needs_mock,
    raw_server,
    say,
    until_left,
)
from adapters.peer import Client, connected, fetch, user
from culet.adapters import Think
from culet.adapters.anthropic import AnthropicModel
from culet.adapters.anthropic_wire import MessageFold
from culet.adapters.model import (
    Finish,
    Model,
    ModelEvent,
    ModelMessage,
    ModelRequest,
    TextDelta,
)
from culet.adapters.openai import OpenAIModel
from culet.adapters.openai_wire import ChatFold
from culet.adapters.remote import (
    ModelCut,
    ModelError,
    ModelLimited,
    ModelRefused,
    ModelUnavailable,
    retry_after_s,
)
from culet.adapters.wire import GO_ON
from culet.kernel.core.job import Retry
from culet.kernel.errors import UsageError
from culet.kernel.testing import Harness, open_test_kernel

ME = ("Reporter", "a")
PROVIDERS = ("openai", "anthropic")
KEY_NAMES = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
QUESTION = ModelRequest(messages=(ModelMessage(role="user", content="hello"),))
REPLIES: dict[str, list[Any]] = {
    "openai": [{"choices": [{"delta": {"content": "Hello"}}]}],
    "anthropic": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 3}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        {
            "type": "content_block_delta", "index": 0,
            "delta": {"type": "text_delta", "text": "Hello"},
        },
    ],
}  # fmt: skip
ENDS: dict[str, list[Any]] = {
    "openai": [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, "[DONE]"],
    "anthropic": [
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        {"type": "message_stop"},
    ],
}


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mock]:
    mock = Mock(tmp_path_factory.mktemp("mock"))
    yield mock
    mock.stop()


@pytest.fixture
def mock(process: Mock) -> Mock:
    process.reset()
    return process


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Make = Callable[..., Any]


@pytest.fixture
def make(provider: str, slept: list[float]) -> Make:
    """Return a maker of models for a host; they do not wait between attempts."""

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    def made(host: str, **options: Any) -> Any:
        given = {"api_key": KEY, "sleep": sleep, "chance": lambda: 0.0} | options
        if provider == "openai":
            return OpenAIModel("m", base_url=f"http://{host}/v1", **given)
        return AnthropicModel("m", base_url=f"http://{host}", **given)

    return made


@pytest.fixture
def slept() -> list[float]:
    return []


class Reporter(Think):
    """Asks the model of the test and has two tools."""

    used: ClassVar[Model]
    done: ClassVar[list[str]] = []

    def get_model(self) -> Model:
        return self.used

    def get_system_prompt(self) -> str:
        return "be brief"

    def get_tools(self) -> dict[str, Any]:
        return {"weather": self.weather, "clock": self.clock}

    async def weather(self, city: str) -> str:
        """Tell the weather."""
        self.done.append(city)
        return f"{city}: rain"

    async def clock(self) -> str:
        """Tell the time."""
        self.done.append("clock")
        return "noon"


@asynccontextmanager
async def reporter(model: Model) -> AsyncIterator[tuple[Harness, Client]]:
    """Open a kernel with one chat on this model, and a client of it."""
    Reporter.used, Reporter.done = model, []
    async with (
        open_test_kernel(roots=[Reporter]) as test,
        connected(test.kernel, ME) as tab,
    ):
        yield test, tab


async def parts(test: Harness) -> list[Any]:
    """Return the last message's parts, short."""
    answer = await fetch(test.kernel, ME, leaf="/get-messages")
    assert isinstance(answer.body, bytes)
    message = msgspec.json.decode(answer.body)[-1]
    return [
        (p["toolName"], p.get("output")) if "toolCallId" in p else p.get("text", "|")
        for p in message["parts"]
    ]


async def events(model: Model, request: ModelRequest = QUESTION) -> list[ModelEvent]:
    return [event async for event in model.stream(request)]


# ---- what the mock can do


@needs_mock
async def test_text_and_reasoning_stream_and_usage_is_told(
    mock: Mock, make: Make
) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5,
             "input_tokens": 7, "output_tokens": 5}  # fmt: skip
    said = {"content": "It will rain.", "reasoning": "Clouds, so", "usage": usage}
    mock.answer({}, said, chunkSize=4)
    async with reporter(make(mock.host)) as (test, tab):
        tab.chat("r1", user("u1", "hello"))
        await tab.ended("r1")
        assert await parts(test) == ["|", "Clouds, so", "It will rain."]
        deltas = [c for c in tab.chunks("r1") if c["type"] == "text-delta"]
        assert len(deltas) > 2
        told = tab.chunks("r1")
        assert told[-1] == {"type": "finish", "finishReason": "stop"}
        (metadata,) = [c for c in told if c["type"] == "message-metadata"]
        assert metadata["messageMetadata"]["usage"] == {
            "inputTokens": 7, "outputTokens": 5,
        }  # fmt: skip
    (entry,) = mock.journal()
    assert entry["headers"]["x-stainless-async"].endswith("trio")
    system, question = entry["body"]["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert question["role"] == "user"
    names = {tool["function"]["name"] for tool in entry["body"]["tools"]}
    assert names == {"weather", "clock"}


@needs_mock
async def test_tools_are_asked_for_in_parallel_and_their_results_sent_back(
    mock: Mock, make: Make
) -> None:
    calls = [
        {"id": "c1", "name": "weather", "arguments": {"city": "Bern"}},
        {"id": "c2", "name": "weather", "arguments": {"city": "Rom"}},
        {"id": "c3", "name": "clock", "arguments": {}},
    ]
    mock.answer({"hasToolResult": False}, {"content": "I ask.", "toolCalls": calls})
    mock.answer({"hasToolResult": True}, {"content": "Rain in both."})
    async with reporter(make(mock.host)) as (test, tab):
        for turn in ("r1", "r2"):  # the ids come a second time, and are replaced
            tab.chat(turn, user(turn, "weather?"))
            await tab.ended(turn)
            assert await parts(test) == [
                "|", "I ask.", ("weather", "Bern: rain"), ("weather", "Rom: rain"),
                ("clock", "noon"), "|", "Rain in both.",
            ]  # fmt: skip
        assert sorted(Reporter.done) == ["Bern", "Bern", "Rom", "Rom", "clock", "clock"]
    messages = mock.requests()[-1]["messages"]
    asked = [c["id"] for m in messages for c in m.get("tool_calls") or ()]
    answered = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert len(set(asked)) == 6
    assert sorted(answered) == sorted(asked)


@needs_mock
@pytest.mark.parametrize(("after", "waited"), [(7, 7.0), (0, 0.5)])
async def test_a_rate_limit_is_waited_for_as_long_as_it_asks(
    mock: Mock, make: Make, slept: list[float], after: int, waited: float
) -> None:
    limit = {"error": {"message": "slow", "type": "rate_limit_error"}, "status": 429}
    mock.answer({"sequenceIndex": 0}, {**limit, "retryAfter": after})
    mock.answer({}, {"content": "Hello"})
    async with reporter(make(mock.host)) as (test, tab):
        tab.chat("r1", user("u1", "hello"))
        await tab.ended("r1")
        assert await parts(test) == ["|", "Hello"]
    assert slept == [waited]
    assert len(mock.requests()) == 2


@needs_mock
@pytest.mark.parametrize(
    ("after", "times", "waits"), [(1, 3, [1.0, 1.0]), (3600, 1, [])]
)
async def test_attempts_are_bounded_and_so_is_the_wait(
    mock: Mock, make: Make, slept: list[float], after: int, times: int, waits: Any
) -> None:
    mock.fail(429, retryAfter=after, type="rate_limit_error")
    model = make(mock.host, retry=Retry(max_attempts=3, max_delay=60))
    with pytest.raises(ModelLimited, match="rate limit") as raised:
        await events(model)
    assert raised.value.retry_after_s == after
    assert slept == waits
    assert len(mock.requests()) == times


@needs_mock
async def test_a_server_that_fails_is_asked_again_later_and_later(
    mock: Mock, make: Make, slept: list[float]
) -> None:
    mock.fail(503)
    async with reporter(make(mock.host)) as (test, _tab):
        agent = await test.kernel.get_agent(Reporter, "a")
        result = await agent.save_messages([user("u1", "hello")])
        assert result.status == "error"
        assert "failed with status 503" in result.error
    assert slept == [0.5, 1.0, 2.0]


@needs_mock
async def test_a_key_that_is_not_accepted_names_the_variable(
    mock: Mock, make: Make, provider: str, slept: list[float]
) -> None:
    mock.answer({}, {"content": "Hello"})
    with pytest.raises(UsageError, match=KEY_NAMES[provider]) as raised:
        await events(make(mock.host, api_key="sk-secret"))
    assert "sk-secret" not in str(raised.value)
    assert slept == []


@needs_mock
async def test_a_request_that_is_refused_is_not_sent_again(
    mock: Mock, make: Make, slept: list[float]
) -> None:
    mock.fail(400, "the prompt is\ntoo long", type="invalid_request_error")
    with pytest.raises(ModelRefused, match=r"\(400\): the prompt is too long") as told:
        await events(make(mock.host))
    assert told.value.status == 400
    assert slept == []
    assert len(mock.requests()) == 1


@needs_mock
async def test_a_stream_that_breaks_off_ends_the_turn_and_the_partial_stays(
    mock: Mock, make: Make, slept: list[float]
) -> None:
    cut = {"chunkSize": 8, "truncateAfterChunks": 5, "latency": 20}
    mock.answer({}, {"content": "abcdefgh" * 9}, **cut)
    async with reporter(make(mock.host)) as (test, tab):
        tab.chat("r1", user("u1", "hello"))
        assert (await tab.ended("r1"))["outcome"] == "error"
        _, text = await parts(test)
        assert text
        assert ("abcdefgh" * 9).startswith(text)
    assert slept == []  # what was said stays said, so nothing is asked again
    assert len(mock.requests()) == 1


@needs_mock
async def test_a_cut_answer_is_sent_as_the_assistant_s_and_asked_to_go_on(
    mock: Mock, make: Make
) -> None:
    mock.answer({}, {"content": "upon a time"})
    request = msgspec.structs.replace(QUESTION, partial="Once ")
    for prefill in (False, True):
        model = make(mock.host, prefill=prefill)
        assert TextDelta("upon a time") in await events(model, request)
    asked, filled = (body["messages"] for body in mock.requests())
    assert [m["role"] for m in asked] == ["user", "assistant", "user"]
    assert "Once" in str(asked[1]["content"])
    assert GO_ON in str(asked[2]["content"])
    assert [m["role"] for m in filled] == ["user", "assistant"]


# ---- what only a server of ours can do


async def test_a_turn_that_a_crash_cut_goes_on_behind_what_was_said(
    make: Make, provider: str
) -> None:
    asked: list[Any] = []

    async def answer(stream: trio.SocketStream, body: Any) -> None:
        asked.append(body["messages"])
        await begin(stream)
        await say(stream, *REPLIES[provider])
        if len(asked) == 1:
            await until_left(stream)
        await say(stream, *ENDS[provider])

    async with raw_server(answer) as host, reporter(make(host)) as (test, tab):
        tab.chat("r1", user("u1", "hello"))
        await tab.until(lambda tab: tab.text("r1") == "Hello")
        await test.crash()
        await test.reopen()
        async with connected(test.kernel, ME) as late:
            late.send("cf_agent_stream_resume_request")
            await late.until(lambda c: bool(c.of("cf_agent_stream_resuming")))
            late.send("cf_agent_stream_resume_ack", id="r1")
            await late.ended("r1")
        assert await parts(test) == ["|", "HelloHello"]
    assert "Hello" in str(asked[1][-2])
    assert asked[1][-1]["role"] == "user"


@pytest.mark.parametrize("how", ["cancel", "stop", "scope"])
async def test_the_connection_is_closed_at_once_when_nobody_listens(
    make: Make, provider: str, how: str
) -> None:
    left = trio.Event()

    async def answer(stream: trio.SocketStream, _body: Any) -> None:
        await begin(stream)
        await say(stream, *REPLIES[provider])
        await until_left(stream)
        left.set()

    async with raw_server(answer) as host:
        model = make(host)
        if how == "cancel":
            async with reporter(model) as (test, tab):
                tab.chat("r1", user("u1", "hello"))
                await tab.until(lambda tab: tab.text("r1") == "Hello")
                tab.send("cf_agent_chat_request_cancel", id="r1")
                with trio.fail_after(1):
                    await left.wait()
                assert (await tab.ended("r1"))["outcome"] == "aborted"
                assert await parts(test) == ["|", "Hello"]
        elif how == "stop":
            async with aclosing(model.stream(QUESTION)) as said:
                assert await anext(said) == TextDelta("Hello")
        else:
            with trio.move_on_after(0.2) as scope:
                await events(model)
            assert scope.cancelled_caught
        with trio.fail_after(1):
            await left.wait()
    gc.collect()  # a generator that was left half read would be told here


async def test_a_connection_that_breaks_before_the_first_word_is_tried_again(
    make: Make, provider: str, slept: list[float]
) -> None:
    times = 0

    async def answer(stream: trio.SocketStream, _body: Any) -> None:
        nonlocal times
        times += 1
        if times == 2:
            await begin(stream)  # a good status, and then nothing
        if times == 3:
            await begin(stream)
            await say(stream, *REPLIES[provider], *ENDS[provider])

    async with raw_server(answer) as host:
        found = await events(make(host))
    assert found[0] == TextDelta("Hello")
    assert found[-1] == Finish("stop")
    assert slept == [0.5, 1.0]


async def test_silence_is_bounded(make: Make, provider: str) -> None:
    async def answer(stream: trio.SocketStream, _body: Any) -> None:
        await begin(stream)
        await say(stream, *REPLIES[provider])
        await until_left(stream)

    async with raw_server(answer) as host:
        model = make(host, silence_s=0.1)
        with pytest.raises(ModelUnavailable, match="said nothing for too long"):
            await events(model)


async def test_a_stream_that_ends_in_order_but_too_early_is_cut(
    make: Make, provider: str
) -> None:
    async def answer(stream: trio.SocketStream, _body: Any) -> None:
        await begin(stream)
        await say(stream, *REPLIES[provider])

    async with (
        raw_server(answer) as host,
        aclosing(make(host).stream(QUESTION)) as said,
    ):
        assert await anext(said) == TextDelta("Hello")
        with pytest.raises(ModelCut, match="before the model had finished"):
            await anext(said)


async def test_a_server_that_is_not_there_is_unavailable(
    make: Make, slept: list[float]
) -> None:
    async with raw_server(lambda stream, body: until_left(stream)) as host:
        pass
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        await events(make(host))
    assert len(slept) == 3


async def test_an_answer_is_over_when_the_provider_says_so_not_when_it_hangs_up(
    make: Make, provider: str
) -> None:
    async def answer(stream: trio.SocketStream, _body: Any) -> None:
        await begin(stream)
        await say(stream, *REPLIES[provider], *ENDS[provider])
        await until_left(stream)

    async with raw_server(answer) as host:
        with trio.fail_after(2):
            assert (await events(make(host)))[-1] == Finish("stop")


async def test_under_a_budget_the_server_is_told_how_long_its_answer_may_be(
    make: Make, provider: str
) -> None:
    """By the name that it knows; without a budget nothing is said but what it insists on."""
    asked: list[Any] = []

    async def answer(stream: trio.SocketStream, body: Any) -> None:
        asked.append({k: v for k, v in body.items() if k.startswith("max_")})
        await begin(stream)
        await say(stream, *REPLIES[provider], *ENDS[provider])

    bounded = msgspec.structs.replace(QUESTION, max_tokens=7)
    async with raw_server(answer) as host:
        own = {"options": {"max_tokens": 90}} if provider == "openai" else {}
        other = {"max_tokens": 90} if provider == "anthropic" else own
        for request in (QUESTION, bounded):
            await events(make(host), request)
            await events(make(host, **other), request)
        assert make(host, **other).max_tokens == 90
    if provider == "openai":
        assert asked == [
            {}, {"max_tokens": 90}, {"max_completion_tokens": 7}, {"max_tokens": 7},
        ]  # fmt: skip
    else:
        assert [a["max_tokens"] for a in asked] == [8192, 90, 7, 7]


def test_a_model_outlives_its_event_loop(make: Make, provider: str) -> None:
    async def answer(stream: trio.SocketStream, _body: Any) -> None:
        await begin(stream)
        await say(stream, *REPLIES[provider], *ENDS[provider])

    model: list[Any] = []
    ports: list[str] = []

    async def main() -> None:
        async with raw_server(answer) as host:
            ports.append(host)
            model.append(make(host))
            for _ in range(3):
                assert (await events(model[0]))[-1] == Finish("stop")

    async def again() -> None:
        with pytest.raises(ModelUnavailable):
            await events(model[0])

    trio.run(main)
    trio.run(again)


@pytest.mark.parametrize(
    ("value", "date", "expected"),
    [
        ("7", "", 7.0),
        ("0.5", "", 0.5),
        ("-1", "", None),
        ("inf", "", None),
        ("nan", "", None),
        ("soon", "", None),
        ("Wed, 21 Oct 2026 07:28:30 GMT", "Wed, 21 Oct 2026 07:28:00 GMT", 30.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", "Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2026 07:28:30 GMT", "", None),
        ("Wed, 21 Oct 2026 07:28:30 GMT", "Wed, 21 Oct 2026 07:28:00 -0000", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(
    value: str, date: str, expected: float | None
) -> None:
    headers = {"retry-after": value} | ({"date": date} if date else {})
    assert retry_after_s(headers) == expected
    assert retry_after_s({}) is None


def test_both_folds_say_what_is_cut() -> None:
    for fold in (ChatFold(), MessageFold()):
        with pytest.raises(ModelError):
            list(fold.end())
