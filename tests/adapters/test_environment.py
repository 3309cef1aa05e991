from __future__ import annotations

import sys

import pytest

from culet.adapters.anthropic import AnthropicModel
from culet.adapters.environment import model_from_environment
from culet.adapters.openai import OpenAIModel
from culet.kernel.errors import UsageError

OPENAI = {"OPENAI_API_KEY": "k", "OPENAI_MODEL": "o"}
ANTHROPIC = {"ANTHROPIC_API_KEY": "k", "ANTHROPIC_MODEL": "a"}


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, "None"),
        ({"OPENAI_MODEL": "o", "OPENAI_API_KEY": ""}, "None"),
        (OPENAI, "OpenAIModel('o')"),
        (ANTHROPIC, "AnthropicModel('a')"),
        ({**ANTHROPIC, **OPENAI}, "OpenAIModel('o')"),
        ({**ANTHROPIC, "OPENAI_API_KEY": "k"}, "AnthropicModel('a')"),
    ],
)
def test_the_environment_names_the_model(environ: dict[str, str], shown: str) -> None:
    assert repr(model_from_environment(environ)) == shown


@pytest.mark.parametrize("name", ["OPENAI", "ANTHROPIC"])
def test_there_is_no_default_model(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}_MODEL is not"):
        model_from_environment({f"{name}_API_KEY": "k"})


@pytest.mark.parametrize(
    ("model", "name"), [(OpenAIModel, "openai"), (AnthropicModel, "anthropic")]
)
def test_what_is_missing_is_named(
    model: type[OpenAIModel], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(f"{name.upper()}_API_KEY", raising=False)
    with pytest.raises(UsageError, match=f"set {name.upper()}_API_KEY"):
        model("m")
    with pytest.raises(UsageError, match="name of a model"):
        model("", api_key="k")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf'pip install "culet\[{name}\]"'):
        model("m", api_key="k")
