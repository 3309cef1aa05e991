"""Whether a value fits a JSON Schema: of those that `msgspec.json.schema` makes.

The type that a caller wants of an output lives in its code, and its code may be gone
when the run goes on after a crash. Its schema is data, and is kept with what the run
owes; so the output is checked in a later life as well. Only what those schemas say is
known here; any other keyword refuses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]
_DEPTH: Final = 64  # of a value; what is deeper is not looked at
_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "null": type(None),
    "boolean": bool,
    "string": str,
    "array": list,
    "object": dict,
}
_BOUNDS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
    "minProperties": lambda value, bound: len(value) >= bound,
    "maxProperties": lambda value, bound: len(value) <= bound,
    "pattern": lambda value, bound: re.search(bound, value) is not None,
}
_APPLIES: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (int, float)
    ),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), (str,)),
    **dict.fromkeys(("minItems", "maxItems"), (list,)),
    **dict.fromkeys(("minProperties", "maxProperties"), (dict,)),
}


def complaint(schema: Schema, value: Any) -> str | None:
    """Return why a JSON value does not fit, and where; None when it fits."""
    return next(_complaints(schema, value, "$", schema.get("$defs", {}), _DEPTH), None)


def _complaints(
    schema: Schema, value: Any, at: str, defs: Schema, depth: int
) -> Iterator[str]:
    if depth == 0:
        return
    ref = schema.get("$ref")
    if isinstance(ref, str):
        target = defs.get(ref.rpartition("/")[2], {})
        yield from _complaints(target, value, at, defs, depth - 1)
        return
    some = schema.get("anyOf")
    if some is not None and all(
        any(_complaints(one, value, at, defs, depth - 1)) for one in some
    ):
        yield f"fits none of its kinds - at `{at}`"
    kind = schema.get("type")
    if kind is not None and not _is(kind, value):
        yield f"expected `{kind}` - at `{at}`"
        return
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if allowed is not None and not any(_same(value, one) for one in allowed):
        yield f"is none of {allowed!r:.200} - at `{at}`"
    for name, within in _BOUNDS.items():
        bound = schema.get(name)
        about = bound is not None and isinstance(value, _APPLIES[name])
        if about and not within(value, bound):
            yield f"{name} is {bound!r} - at `{at}`"
    if isinstance(value, dict):
        yield from _in_object(schema, value, at, defs, depth)
    if isinstance(value, list):
        yield from _in_array(schema, value, at, defs, depth)


def _in_object(
    schema: Schema, value: dict[str, Any], at: str, defs: Schema, depth: int
) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"missing `{name}` - at `{at}`"
    known = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    for name, inner in value.items():
        if name in known:
            yield from _complaints(known[name], inner, f"{at}.{name}", defs, depth - 1)
        elif more is False:
            yield f"unknown `{name}` - at `{at}`"
        elif isinstance(more, Mapping):
            yield from _complaints(more, inner, f"{at}[...]", defs, depth - 1)


def _in_array(
    schema: Schema, value: list[Any], at: str, defs: Schema, depth: int
) -> Iterator[str]:
    first = schema.get("prefixItems", ())
    for number, inner in enumerate(value):
        each = first[number] if number < len(first) else schema.get("items")
        if each is False:
            yield f"more than {len(first)} items - at `{at}`"
            return
        if isinstance(each, Mapping):
            yield from _complaints(each, inner, f"{at}[{number}]", defs, depth - 1)


def _is(kind: str, value: Any) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _TYPES.get(kind, object))


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
