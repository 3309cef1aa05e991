"""`OpenAIModel`: any server that speaks OpenAI's chat completions, by its own client.

Needs the extra: `pip install "culet[openai]"`. The client is imported when a model is
made, which takes a second: make it once, in the class body or before the loop runs, and
not in each turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, cast, final

import trio

from culet.adapters.model import Json, ModelEvent, ModelRequest, Price
from culet.adapters.openai_wire import ChatFold, messages_of, tools_of
from culet.adapters.remote import Remote, Reply, Sdk, key_for
from culet.kernel.core.job import Retry
from culet.kernel.core.limits import MODEL_CONNECT_S, MODEL_SILENCE_S
from culet.kernel.errors import UsageError

if TYPE_CHECKING:
    import openai

KEY: str = "OPENAI_API_KEY"


@final
class OpenAIModel:
    """A model behind OpenAI's chat completions API, streamed.

    Chat completions and not Responses, because that is what other servers speak too:
    any OpenAI-compatible `base_url` works. Without one the client takes
    `OPENAI_BASE_URL`, else OpenAI's own; without `api_key` it is `OPENAI_API_KEY`
    (servers that need none take any text). `options` are more fields of each request,
    such as `{"temperature": 0}` or `{"max_completion_tokens": 2000}`.

    An answer that a crash cut is sent as a message of the assistant with the request to
    go on; `prefill=True` leaves that request out, for servers that go on by themselves.

    Under a budget the server is told how long its answer may be, as
    `max_completion_tokens`, or as `max_tokens` where the options have that. `price` is what
    a budget in money counts with.

    `retry` says how often the first word of an answer is waited for, `silence_s` how
    long nothing may come. Raises `UsageError` here for a missing extra or key. `stream`
    raises `UsageError` for a key that is not accepted, else a `ModelError`.

    Each answer has a connection of its own, closed with it: nothing is left open
    between two answers or two event loops.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        options: Mapping[str, Json] | None = None,
        prefill: bool = False,
        retry: Retry | None = None,
        silence_s: float = MODEL_SILENCE_S,
        sleep: Callable[[float], Awaitable[object]] = trio.sleep,
        chance: Callable[[], float] | None = None,
        price: Price | None = None,
    ) -> None:
        sdk, client = _client(model, base_url, api_key, silence_s)
        self.model, self.price = model, price
        self._options = dict(options or {})
        self._prefill = prefill
        self._completions = client.chat.completions
        self._remote = Remote(sdk, retry=retry, sleep=sleep, chance=chance)

    def __repr__(self) -> str:
        return f"OpenAIModel({self.model!r})"

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelEvent, None]:
        """Return the events of one step; see the class for what it raises."""
        return self._remote.stream(lambda: self._send(request), ChatFold)

    @property
    def max_tokens(self) -> int | None:
        """The bound on an answer that its options give."""
        return self._options.get(self._bounds)

    @property
    def _bounds(self) -> str:
        """The field that bounds an answer: older servers know it by its older name."""
        return (
            "max_tokens" if "max_tokens" in self._options else "max_completion_tokens"
        )

    def _bound(self, request: ModelRequest) -> dict[str, Json]:
        return {} if request.max_tokens is None else {self._bounds: request.max_tokens}

    def _send(self, request: ModelRequest) -> AbstractAsyncContextManager[Reply]:
        tools = tools_of(request.tools)
        create: Any = self._completions.with_streaming_response.create
        sending = create(
            model=self.model,
            messages=messages_of(request, prefill=self._prefill),
            stream=True,
            stream_options={"include_usage": True},
            extra_body={
                **({"tools": tools} if tools else {}),
                **self._options,
                **self._bound(request),
            },
        )
        return cast("AbstractAsyncContextManager[Reply]", sending)


def _client(
    model: str, base_url: str | None, api_key: str | None, silence_s: float
) -> tuple[Sdk, openai.AsyncOpenAI]:
    try:
        import httpx2
        import openai
    except ImportError as error:
        msg = 'OpenAIModel needs the extra: pip install "culet[openai]"'
        raise UsageError(msg) from error
    key = key_for("OpenAIModel", KEY, model, api_key)
    http = openai.DefaultAsyncHttpxClient(
        limits=httpx2.Limits(max_keepalive_connections=0)
    )
    client = openai.AsyncOpenAI(
        api_key=key,
        base_url=base_url,
        max_retries=0,  # we try again ourselves
        timeout=openai.Timeout(silence_s, connect=MODEL_CONNECT_S),
        http_client=http,
    )
    sdk = Sdk(
        name="OpenAI"
        if client.base_url.host.endswith(".openai.com")
        else "the model's server",
        variable=KEY,
        status_error=openai.APIStatusError,
        timeout_error=openai.APITimeoutError,
        connection_error=openai.APIConnectionError,
        api_error=openai.OpenAIError,
        transport_error=httpx2.HTTPError,
        transport_timeout=httpx2.TimeoutException,
    )
    return sdk, client
