"""Tools: typed Python functions that a model may call.

The annotations of a function are its schema and its decoder. What a model sends is
never trusted and never crashes anything: an input that does not fit, a function that
raises, a result that is too large or not plain data become an error text that the model
can read and act on.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias, final, get_type_hints

import msgspec

from culet.adapters.model import Json, ToolSpec
from culet.kernel.core.effects import POLICIES, Policy
from culet.kernel.core.limits import DEFAULT, ERROR_CHARS
from culet.kernel.core.run import error_text, storable
from culet.kernel.errors import (
    EffectUncertain,
    Fenced,
    UsageError,
    UserError,
    is_told,
)

log = logging.getLogger("culet.adapters")
Uncertain: TypeAlias = Policy
NeedsApproval: TypeAlias = Callable[[Mapping[str, Json]], bool]
Report: TypeAlias = Callable[[Mapping[str, Json]], Awaitable[object]]


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool may know of its call: a parameter annotated with it is filled in.

    `idempotency_key` is the same for every attempt of one call, also after a crash, and
    no other call's, of whatever agent. `run_id` is None in a turn of a chat; an agent's
    own run and call ids may be another agent's as well.
    """

    agent: Any = None
    run_id: str | None = None
    tool_call_id: str = ""
    attempt: int = 1
    idempotency_key: str = ""
    cancel: Any = None  # a CancelToken
    identity: Any = None
    report: Report | None = None

    async def progress(
        self,
        *,
        fraction: float | None = None,
        message: str | None = None,
        phase: str | None = None,
        milestone: str | None = None,
        data: Json = None,
    ) -> None:
        """Tell observers how far the call is. Without an observer nothing happens."""
        given = {
            "fraction": fraction,
            "message": message,
            "phase": phase,
            "milestone": milestone,
            "data": data,
        }
        if self.report is not None:
            await self.report({k: v for k, v in given.items() if v is not None})


class ToolOutput(msgspec.Struct, frozen=True):
    """A value of a tool, as plain JSON. A preliminary one is followed by another."""

    value: Json
    preliminary: bool = False


class ToolFailure(msgspec.Struct, frozen=True):
    """The call came to nothing; `text` tells the model why.

    `cause` is what the tool has raised: then clients get an error id, not the text.
    """

    text: str
    cause: Any = None


ToolResult: TypeAlias = ToolOutput | ToolFailure


@final
class Tool:
    """A function made callable by a model. Build it with `tool`."""

    def __init__(
        self,
        fn: Callable[..., object],
        *,
        needs_approval: bool | NeedsApproval,
        client: bool,
        on_uncertain: Uncertain,
        check: Callable[..., object] | None,
    ) -> None:
        self.fn = fn
        self.check = check
        self.needs_approval = needs_approval
        self.client = client
        self.on_uncertain: Uncertain = on_uncertain
        self.description = inspect.cleandoc(fn.__doc__ or "")
        self._context, self._input = _parameters(fn)
        self.parameters = _schema(self._input)
        self._check_context = self._of_check() if check is not None else None

    def _of_check(self) -> str | None:
        """Return the context parameter of the check, which takes what the tool takes."""
        assert self.check is not None
        context, given = _parameters(self.check)
        wanted = set(self._input.__struct_fields__)
        if set(given.__struct_fields__) != wanted:
            msg = f"the check of a tool takes the same parameters: {sorted(wanted)}"
            raise UsageError(msg)
        return context

    def ask_check(self, value: Json, context: ToolContext) -> object:
        """Call the check with the input of a call; it may return an awaitable."""
        assert self.check is not None
        arguments = self.decode(value)
        if isinstance(arguments, ToolFailure):
            return None
        if self._check_context is not None:
            arguments[self._check_context] = context
        return self.check(**arguments)

    def spec(self, name: str) -> ToolSpec:
        """Return what a model is told about this tool under the name it has here."""
        return ToolSpec(
            name=name, description=self.description, parameters=self.parameters
        )

    def asks(self, value: Json) -> bool:
        """Whether a person is to approve a call with that input.

        One that does not fit the function fails by itself: nobody is asked about it.
        """
        if not self.needs_approval or isinstance(self.decode(value), ToolFailure):
            return False
        if not callable(self.needs_approval):
            return True
        try:
            return bool(self.needs_approval(value or {}))
        except Exception:
            log.exception("needs_approval failed: a person is asked")
            return True

    def decode(self, value: Json) -> dict[str, object] | ToolFailure:
        """Return the arguments for the function, or why `value` does not fit."""
        try:
            decoded = msgspec.convert(
                {} if value is None else value, self._input, strict=False
            )
        except msgspec.ValidationError as error:
            return _failure(f"bad input: {error}")
        return {name: getattr(decoded, name) for name in decoded.__struct_fields__}

    async def run(
        self,
        value: Json,
        context: ToolContext,
        *,
        output_bytes: int = DEFAULT.tool_output_bytes,
    ) -> AsyncGenerator[ToolResult, None]:
        """Call the function. The last result is final; close the iterator when done.

        An async generator's values come as they are yielded, preliminary, and its last
        one again as the final one. An error is one `ToolFailure`, also after
        preliminary values. Only cancellation, the fence of a stopped agent and the
        tool's own `EffectUncertain` get out.
        """
        arguments = self.decode(value)
        if isinstance(arguments, ToolFailure):
            yield arguments
            return
        if self._context is not None:
            arguments[self._context] = context
        last: ToolResult = ToolOutput(None)
        try:
            result = self.fn(**arguments)
            if inspect.isasyncgen(result):
                async with aclosing(result) as values:
                    async for item in values:
                        last = plain(item, output_bytes)
                        if isinstance(last, ToolFailure):
                            break
                        yield ToolOutput(last.value, preliminary=True)
            else:
                if inspect.isawaitable(result):
                    result = await result
                last = plain(result, output_bytes)
        except (Fenced, EffectUncertain):
            raise
        except Exception as error:
            last = failure_of(error)
        yield last


def tool(
    fn: Callable[..., object],
    *,
    needs_approval: bool | NeedsApproval = False,
    client: bool = False,
    on_uncertain: Uncertain = "ask",
    check: Callable[..., object] | None = None,
) -> Tool:
    """Build a tool from a typed function: async, sync (short) or an async generator.

    Its name for the model is its key in `get_tools`, its description the docstring.
    `client` tools run in the client, of the function only the signature is used.
    `needs_approval` asks a person first: always, or for an input of which a function says
    so (it gets the input, JSON values by name; one that raises asks).
    `on_uncertain` says what happens to a call of which nobody knows whether it was
    carried out, because the process died in its middle or the function has raised
    `EffectUncertain`: `ask` makes it a question to a person, like an approval, whether
    to do it again; `repeat` does it again with the same `idempotency_key`; `check` calls
    `check`, which takes the same parameters and returns `Done(result)`, `NotDone()` or
    None (then a person is asked); `fail` tells the model that nobody knows.
    Raises `UsageError` for parameters that no JSON can express.
    """
    if on_uncertain not in POLICIES:
        msg = f"on_uncertain is one of {sorted(POLICIES)}, not {on_uncertain!r}"
        raise UsageError(msg)
    if (check is not None) != (on_uncertain == "check"):
        msg = "a check belongs to on_uncertain='check', and the other way round"
        raise UsageError(msg)
    return Tool(
        fn, needs_approval=needs_approval, client=client, on_uncertain=on_uncertain,
        check=check,
    )  # fmt: skip


def _parameters(fn: Callable[..., object]) -> tuple[str | None, type[msgspec.Struct]]:
    """Return the name of the context parameter and a Struct of all the others."""
    name = getattr(fn, "__name__", type(fn).__name__)
    function = fn if inspect.isroutine(fn) else type(fn).__call__
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        msg = f"cannot resolve the annotations of tool {name!r}: {error}"
        raise UsageError(msg) from error
    context: str | None = None
    required: list[tuple[str, Any]] = []
    optional: list[tuple[str, Any, Any]] = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        ):
            msg = f"tool {name!r} has parameter {parameter}; name every parameter"
            raise UsageError(msg)
        hint = hints.get(parameter.name, Any)
        if hint is ToolContext:
            context = parameter.name
        elif parameter.default is inspect.Parameter.empty:
            required.append((parameter.name, hint))
        else:
            optional.append((parameter.name, hint, _default(parameter.default)))
    try:
        struct = msgspec.defstruct(
            "Input", [*required, *optional], kw_only=True, forbid_unknown_fields=True
        )
    except TypeError as error:
        msg = f"tool {name!r} has a parameter that no JSON can express: {error}"
        raise UsageError(msg) from error
    return context, struct


def _default(value: object) -> object:
    # A Struct refuses a mutable default; the function's own default is one object that
    # every call shares, so sharing it here changes nothing.
    if isinstance(value, list | dict | set | bytearray):
        return msgspec.field(default_factory=lambda: value)
    return value


def _schema(struct: type[msgspec.Struct]) -> dict[str, Json]:
    """Return the JSON Schema of the input, the object itself at the top."""
    try:
        (top,), parts = msgspec.json.schema_components(
            [struct], ref_template="#/$defs/{name}"
        )
    except TypeError as error:
        msg = f"a tool's parameter cannot be described: {error}"
        raise UsageError(msg) from error
    key = str(top["$ref"]).rpartition("/")[2]
    schema = dict(parts.pop(key))
    schema.pop("title", None)
    return {**schema, "$defs": parts} if parts else schema


def plain(value: object, output_bytes: int) -> ToolResult:
    """Return a value as plain JSON, or why it cannot be passed on."""
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        return _failure(f"the result is not plain data: {error}")
    if len(encoded) > output_bytes:
        return _failure(
            f"the result has {len(encoded)} bytes, at most {output_bytes} are passed"
            " on; ask for less"
        )
    return ToolOutput(msgspec.json.decode(encoded))


def failure_of(error: Exception) -> ToolFailure:
    """Return what a tool has raised as a failure of its call."""
    if isinstance(error, UserError):
        return _failure(str(error))
    return ToolFailure(error_text(error), None if is_told(error) else error)


def _failure(text: str) -> ToolFailure:
    return ToolFailure(storable(text, ERROR_CHARS) or "")
