"""Which model the environment names: the user's choice, made outside of the program."""

from __future__ import annotations

import os
from collections.abc import Mapping

from culet.adapters.anthropic import AnthropicModel
from culet.adapters.model import Model
from culet.adapters.openai import OpenAIModel
from culet.kernel.errors import UsageError


def model_from_environment(environ: Mapping[str, str] | None = None) -> Model | None:
    """Return the model that the environment names, or None if there is no key in it.

    `OPENAI_API_KEY` with `OPENAI_MODEL`, and `OPENAI_BASE_URL` for another server that
    speaks the same; or `ANTHROPIC_API_KEY` with `ANTHROPIC_MODEL`. With both keys the
    one whose model is named counts, OpenAI's first. There is no default model: a key
    without one is a `UsageError`, and so is a missing extra.
    """
    given = os.environ if environ is None else environ
    openai_key, openai_model = given.get("OPENAI_API_KEY"), given.get("OPENAI_MODEL")
    key, model = given.get("ANTHROPIC_API_KEY"), given.get("ANTHROPIC_MODEL")
    if openai_key and openai_model:
        base_url = given.get("OPENAI_BASE_URL") or None
        return OpenAIModel(openai_model, base_url=base_url, api_key=openai_key)
    if key and model:
        return AnthropicModel(model, api_key=key)
    if openai_key or key:
        name = "OPENAI" if openai_key else "ANTHROPIC"
        msg = f"{name}_API_KEY is set but {name}_MODEL is not: name the model to use"
        raise UsageError(msg)
    return None
