"""What a call of a model may cost: a bound that is reserved before it, the bill after it.

Where a budget bounds the turn, no call begins whose worst case is not reserved. Tokens of
the input are bounded by the bytes of the request (a token is at least one byte of text)
unless the model counts them itself; tokens of the answer by what is left, which a remote
model is told. A price turns both into money. The call counts one. What it did not need
goes back when the model has said what it used; a model that does not say has used what it
could have.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final, final

import msgspec

from culet.adapters.continuation import usage_sum
from culet.adapters.model import (
    Model,
    ModelEvent,
    ModelRequest,
    Price,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    Usage,
)
from culet.kernel import Agent
from culet.kernel.core.limits import AMOUNT_MAX
from culet.kernel.errors import OverBudget, UsageError

TOOLS_TOKENS: Final = 1_024  # that a provider adds on its own where there are tools


def input_bound(model: Model, request: ModelRequest) -> int:
    """Return more tokens than the input of a request can have.

    A model with a method `input_bound(request) -> int` knows better.
    """
    counts = getattr(model, "input_bound", None)
    if counts is not None:
        return int(counts(request))
    return len(msgspec.json.encode(request)) + (TOOLS_TOKENS if request.tools else 0)


def micros(dollars: float) -> int:
    """Return dollars as millionths, rounded up; what is no amount of money is nothing."""
    if not math.isfinite(dollars) or dollars <= 0:
        return 0
    exact = Decimal(str(dollars)) * 1_000_000
    return min(AMOUNT_MAX, int(exact.to_integral_value(ROUND_CEILING)))


def cost(price: Price, input_tokens: int, output_tokens: int) -> int:
    """Return what so many tokens cost, in millionths of a dollar, rounded up."""
    # a dollar for a million tokens is a millionth of a dollar for one
    exact = Decimal(str(price.input)) * input_tokens
    exact += Decimal(str(price.output)) * output_tokens
    return min(AMOUNT_MAX, int(exact.to_integral_value(ROUND_CEILING)))


@final
class Call:
    """One call of a model in a turn, paid for. Made in the step before its barrier.

    `request` has the bound on the answer in it. Raises `OverBudget` when there is less
    left than it may cost, `UsageError` under a budget in money without a price.
    """

    def __init__(self, agent: Agent, model: Model, request: ModelRequest) -> None:
        budget = agent.budget
        left = budget.left()
        self._price: Price | None = getattr(model, "price", None)
        self._input = input_bound(model, request)
        self._bounded = left.tokens is not None or left.cost is not None
        self._usage: Usage | None = None
        self._said = 0  # bytes
        own = getattr(model, "max_tokens", None)
        most = whole = own or agent._node.tree.kernel.limits.model_tokens
        if left.tokens is not None:
            most = min(most, left.tokens - self._input)
        if left.cost is not None:
            most = min(most, self._affordable(agent, left.cost, most))
        self._short = most < whole  # it may not say as much as it could
        most = max(1, most)
        self._output = most
        self.request = request
        if self._bounded:
            self.request = msgspec.structs.replace(request, max_tokens=most)
        self._spend = budget.reserve_nowait(
            tokens=0 if left.tokens is None else self._input + most,
            cost=0 if left.cost is None else self._costs(self._input, most),
            calls=1,
        )

    def _affordable(self, agent: Agent, left: int, most: int) -> int:
        """Return how long an answer may be for what is left of the money."""
        if self._price is None:
            msg = (
                f"{type(agent).__name__} has a budget in money and its model tells no"
                " price: give the model price=Price(input=…, output=…)"
            )
            raise UsageError(msg)
        rest = left - self._costs(self._input, 0)
        if self._price.output <= 0:
            return most if rest >= 0 else 0
        return int(max(0, rest) / Decimal(str(self._price.output)))

    def _costs(self, input_tokens: int, output_tokens: int) -> int:
        if self._price is None:
            return 0
        return cost(self._price, input_tokens, output_tokens)

    def hear(self, event: ModelEvent) -> None:
        """Take note of what the model says."""
        match event:
            case TextDelta(text) | ReasoningDelta(text):
                self._said += len(text.encode(errors="replace"))
            case ToolCall():
                self._said += len(msgspec.json.encode([event.name, event.input]))
            case Usage():
                self._usage = usage_sum(self._usage or Usage(), event)

    def check_whole(self, reason: str) -> None:
        """Raise `OverBudget` for an answer that ended because the budget did."""
        if self._short and reason == "length":
            text = f"over budget: the answer was cut after {self._output} tokens"
            raise OverBudget(text, what="tokens")

    def settle(self) -> None:
        """The model is done: pay what it has used, give back the rest."""
        usage = self._usage
        if usage is not None:
            used = _count(usage.input_tokens), _count(usage.output_tokens)
        elif self._bounded:
            used = self._input, min(self._output, self._said)
        else:
            return  # nobody has said, and nothing depends on it
        told = None if usage is None else usage.cost
        paid = self._costs(*used) if told is None else micros(told)
        self._spend.settle(tokens=min(AMOUNT_MAX, sum(used)), cost=paid)


def _count(value: Any) -> int:
    """Return a number of tokens that a server has told: it may be anything."""
    return min(AMOUNT_MAX, max(0, int(value)))
