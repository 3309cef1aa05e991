"""`AnthropicModel`: Anthropic's messages API, by its own client.

Needs the extra: `pip install "culet[anthropic]"`. The client is imported when a model
is made, which takes a second: make it once, in the class body or before the loop runs,
and not in each turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, cast, final

import trio

from culet.adapters.anthropic_wire import (
    MessageFold,
    messages_of,
    system_of,
    tools_of,
)
from culet.adapters.model import Json, ModelEvent, ModelRequest, Price
from culet.adapters.remote import Remote, Reply, Sdk, key_for
from culet.kernel.core.job import Retry
from culet.kernel.core.limits import MODEL_CONNECT_S, MODEL_SILENCE_S, MODEL_TOKENS
from culet.kernel.errors import UsageError

if TYPE_CHECKING:
    import anthropic

KEY: str = "ANTHROPIC_API_KEY"


@final
class AnthropicModel:
    """A model behind Anthropic's messages API, streamed.

    Without `base_url` the client takes `ANTHROPIC_BASE_URL`, else Anthropic's own;
    without `api_key` it is `ANTHROPIC_API_KEY`. `max_tokens` bounds one answer;
    `options` are more fields of each request, such as `{"temperature": 0}`. Thinking is
    shown and not sent back, so use the adaptive kind with tools: the manual kind
    insists on its own thinking in the next step.

    An answer that a crash cut is sent as a message of the assistant with the request to
    go on; `prefill=True` leaves that request out, for older models, which go on by
    themselves (newer ones refuse it).

    `retry`, `silence_s`, connections and errors are as in `OpenAIModel`.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_tokens: int = MODEL_TOKENS,
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
        self.max_tokens = max_tokens
        self._options = dict(options or {})
        self._prefill = prefill
        self._messages = client.messages
        self._remote = Remote(sdk, retry=retry, sleep=sleep, chance=chance)

    def __repr__(self) -> str:
        return f"AnthropicModel({self.model!r})"

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelEvent, None]:
        """Return the events of one step; see the class for what it raises."""
        said = request.partial
        lead = said[len(said.rstrip()) :] if self._prefill else ""
        return self._remote.stream(
            lambda: self._send(request), lambda: MessageFold(lead)
        )

    def _send(self, request: ModelRequest) -> AbstractAsyncContextManager[Reply]:
        more: dict[str, Json] = {}
        if system := system_of(request):
            more["system"] = system
        if tools := tools_of(request.tools):
            more["tools"] = tools
        create: Any = self._messages.with_streaming_response.create
        sending = create(
            model=self.model,
            max_tokens=min(self.max_tokens, request.max_tokens or self.max_tokens),
            messages=messages_of(request, prefill=self._prefill),
            stream=True,
            extra_body={**more, **self._options},
        )
        return cast("AbstractAsyncContextManager[Reply]", sending)


def _client(
    model: str, base_url: str | None, api_key: str | None, silence_s: float
) -> tuple[Sdk, anthropic.AsyncAnthropic]:
    try:
        import anthropic
        import httpx2
    except ImportError as error:
        msg = 'AnthropicModel needs the extra: pip install "culet[anthropic]"'
        raise UsageError(msg) from error
    key = key_for("AnthropicModel", KEY, model, api_key)
    http = anthropic.DefaultAsyncHttpxClient(
        limits=httpx2.Limits(max_keepalive_connections=0)
    )
    client = anthropic.AsyncAnthropic(
        api_key=key,
        base_url=base_url,
        max_retries=0,  # we try again ourselves
        timeout=anthropic.Timeout(silence_s, connect=MODEL_CONNECT_S),
        http_client=http,
    )
    sdk = Sdk(
        name="Anthropic"
        if client.base_url.host.endswith(".anthropic.com")
        else "the model's server",
        variable=KEY,
        status_error=anthropic.APIStatusError,
        timeout_error=anthropic.APITimeoutError,
        connection_error=anthropic.APIConnectionError,
        api_error=anthropic.AnthropicError,
        transport_error=httpx2.HTTPError,
        transport_timeout=httpx2.TimeoutException,
    )
    return sdk, client
