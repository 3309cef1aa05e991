"""`agent_tool`: an agent class offered to a model, or to `run_agent_tool`, as a tool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import msgspec

from .core.budget import Budget, checked
from .core.questions import Policy, check_policy
from .errors import UsageError

if TYPE_CHECKING:
    from .agent import Agent


@final
class AgentTool:
    """A tool whose executor is a run of `cls`; made by `agent_tool`.

    `parameters` is the JSON Schema of its input.
    """

    def __init__(
        self,
        cls: type[Agent],
        description: str,
        input_type: Any,
        output_type: Any,
        display: dict[str, Any] | None,
        budget: Budget | None = None,
        questions: Policy | None = None,
    ) -> None:
        self.cls, self.description = cls, description
        self.input_type, self.output_type = input_type, output_type
        self.display, self.budget = display, checked(budget)
        self.questions = None if questions is None else check_policy(questions)
        self.parameters = _schema(input_type)

    def check_input(self, value: Any) -> Any:
        """Return the input as plain data; raises `UsageError` for what does not fit."""
        if self.input_type is None:
            return value
        try:
            fitted = msgspec.convert(value, self.input_type)
        except msgspec.ValidationError as error:
            msg = f"the input of {self.cls.__name__} is not what it wants: {error}"
            raise UsageError(msg) from None
        return msgspec.to_builtins(fitted)


def _schema(input_type: Any) -> dict[str, Any]:
    if input_type is None:
        return {"type": "object"}
    try:
        schema = msgspec.json.schema(input_type)
    except TypeError as error:
        msg = f"an input cannot be checked by {input_type!r}: {error}"
        raise UsageError(msg) from None
    reference = schema.get("$ref")
    if isinstance(reference, str):  # models want the object itself at the top
        name = reference.rpartition("/")[2]
        definitions = dict(schema.get("$defs", {}))
        top = dict(definitions.pop(name))
        if definitions:
            top["$defs"] = definitions
        return top
    return schema


def output_schema(output_type: Any) -> dict[str, Any]:
    """Return the JSON Schema of what a caller wants; raises `UsageError` for no type."""
    if isinstance(output_type, dict):
        msg = "a JSON Schema mapping needs the extra `schema`; give a type instead"
        raise UsageError(msg)
    try:
        return msgspec.json.schema(output_type)
    except TypeError as error:
        msg = f"an output cannot be checked by {output_type!r}: {error}"
        raise UsageError(msg) from None


def agent_tool(
    cls: type[Agent],
    *,
    description: str,
    input_type: Any = None,
    output_type: Any = None,
    display_name: str | None = None,
    icon: str | None = None,
    budget: Budget | None = None,
    questions: Policy | None = None,
) -> AgentTool:
    """Offer an agent class as a tool.

    `input_type` is a `msgspec.Struct`, dataclass or TypedDict; the model's input is
    validated by it. An `output_type` validates the output before the run is settled.
    Each run gets the `budget`, or is refused.
    `questions`: see `Agent.run_agent_tool`.
    """
    if isinstance(input_type, dict):
        msg = "a JSON Schema mapping needs the extra `schema`; give a type instead"
        raise UsageError(msg)
    if output_type is not None:
        output_schema(output_type)
    display = {"name": display_name, "icon": icon}
    shown = {k: v for k, v in display.items() if v is not None}
    return AgentTool(
        cls, description, input_type, output_type, shown or None, budget, questions
    )
