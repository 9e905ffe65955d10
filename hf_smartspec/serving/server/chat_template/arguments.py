"""
Arguments of tool calls that a model writes in tags, as text. transformers' parser converts them by the `type` that
their schemas declare, so schemas without a `type` get one here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ApiError

_UNIONS = ("anyOf", "oneOf")
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
_NUMBERS = ("integer", "number")
_ORDER = ("integer", "number", "boolean", "null", "object", "array", "string")  # else 1 would be read as true
# Keys of schemas that accept any number: where text may be read as a number, the schema must accept all numbers.
_FREE = frozenset(["type", "title", "description", "default", "examples", "nullable", "deprecated", *_UNIONS])
_NOT_READ = ("$ref", "allOf", "not", "if", "enum", "const", *_UNIONS)  # keys that restrict values without a type
_DEEPEST, _MOST = 32, 2**16  # levels of a schema, and keys and items of all schemas of a request, that are unfolded
_LONGEST_REFERENCE = 2**10  # characters
_MOST_TYPES = 32  # different ones of a schema
_UNRESOLVED = {"$ref": "#"}  # in place of a schema that unfolds to more: declares no type, and cannot be forced


class _TooLargeError(Exception):
    """Raised when the schemas of a request unfold to more than the bound."""


class _Budget:
    """Bounds the work of unfolding schemas: one that refers to itself unfolds without an end."""

    def __init__(self, number: int):
        self._left = number

    def charge(self, schema: Mapping[str, Any]) -> None:
        """Count the keys of a schema and the items of its lists; raise `_TooLargeError` beyond the bound."""
        self._left -= 1 + len(schema)
        if self._left >= 0:
            self._left -= sum(len(item) for item in schema.values() if isinstance(item, list))
        if self._left < 0:
            raise _TooLargeError


def with_types(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """
    Return tools, in the form of chats, for the parser: the schema of every parameter declares its type where the type
    can be found. Items that are no tools stay as they are. A parameter whose schema unfolds to too much gets one
    without a type: the parser then reads text.
    """
    budget = _Budget(_MOST)
    return None if tools is None else [_with_types(tool, budget) for tool in tools]


def _with_types(tool: dict[str, Any], budget: _Budget) -> dict[str, Any]:
    function = tool.get("function")
    schema = function.get("parameters") if isinstance(function, dict) else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(function, dict) or not isinstance(schema, dict) or not isinstance(properties, dict):
        return tool
    typed = {name: _resolved(value, schema, budget) for name, value in properties.items()}
    return {**tool, "function": {**function, "parameters": {**schema, "properties": typed}}}


def _resolved(value: Any, schema: Mapping[str, Any], budget: _Budget) -> dict[str, Any]:
    try:
        return _declared(value, schema, budget)[0]
    except _TooLargeError:
        return _UNRESOLVED


def _declared(value: Any, schema: Mapping[str, Any], budget: _Budget, depth: int = 0) -> tuple[dict[str, Any], bool]:
    """
    Return the schema of a value with references to other parts of the whole `schema` followed, unless they are within
    the value, and with the type of the items of its `enum` or `const`; and whether it, or a part of it, has a type.
    """
    if not isinstance(value, dict):
        return {}, False  # `true` stands for any value
    if depth > _DEEPEST:
        raise _TooLargeError
    if depth:  # the top level is no larger than the request
        budget.charge(value)
    value = dict(value)
    parts = value.get("allOf")
    if (target := _target(value.get("$ref"), schema)) is not None:
        budget.charge(target)
        del value["$ref"]
        return _declared(target | value, schema, budget, depth + 1)
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
        budget.charge(parts[0])
        del value["allOf"]
        return _declared(parts[0] | value, schema, budget, depth + 1)
    has_type = bool(own := _own_types(value))
    if isinstance(value.get("type"), list):  # the parser reads it at every call, in the event loop
        value["type"] = list(dict.fromkeys(own))
        if len(value["type"]) > _MOST_TYPES:
            raise _TooLargeError
    for name in _UNIONS:
        if parts := _parts(value, name):
            declared = [_declared(part, schema, budget, depth + 1) for part in parts]
            value[name] = [part for part, _ in declared]
            has_type = has_type or any(is_typed for _, is_typed in declared)
    if not has_type and (choices := _choices(value)) is not None:
        kinds = {_kind(choice) for choice in choices}
        value["type"] = next(iter(kinds)) if len(kinds) == 1 else sorted(kinds, key=_ORDER.index)
        has_type = True
    return value, has_type


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "object")


def _parts(value: Mapping[str, Any], *names: str) -> list[Any]:
    return [part for name in names if isinstance(value.get(name), list) for part in value[name]]


def _target(reference: Any, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the part of the schema that a reference names, if it is a schema; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#/") or len(reference) > _LONGEST_REFERENCE:
        return None
    found: Any = schema
    for part in reference[2:].split("/"):
        if not isinstance(found, dict):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found if isinstance(found, dict) else None


def _own_types(value: Mapping[str, Any]) -> list[str]:
    kind = value.get("type")
    return [item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str)]


def _types(value: Mapping[str, Any]) -> list[str]:
    """Return the types that the parser tries, in its order."""
    types = _own_types(value)
    for part in _parts(value, *_UNIONS):
        types += _types(part) if isinstance(part, dict) else ()
    return types


def _choices(value: Mapping[str, Any]) -> list[Any] | None:
    if "const" in value:
        return [value["const"]]
    choices = value.get("enum")
    return choices if isinstance(choices, list) and choices else None


def accepted_text(name: str, value: dict[str, Any]) -> list[str] | str:
    """
    Return the texts that a parameter accepts in tags: a list of choices, "text" for any text, or "json".

    Args:
        name (`str`): The parameter's name.
        value (`dict`): Its schema, as `with_types` returns it.

    Raises:
        ApiError: 400, if an accepted text could be read as a value that the schema forbids.
    """
    if value is _UNRESOLVED:
        raise _refused(name, "its schema unfolds to too much")
    types, choices = _types(value), _choices(value)
    if "boolean" in types and any(kind in types[types.index("boolean") :] for kind in _NUMBERS):
        raise _refused(name, "the text 1 would be read as true: name numbers before booleans")
    if not types and any(key in value for key in _NOT_READ):
        raise _refused(name, "its schema declares no type that the text could be read as")
    others = set(types) - {"string"}
    if choices is not None:
        allowed = {*types, *(["integer"] if "number" in types else [])}
        choices = [choice for choice in choices if _kind(choice) in allowed]
        if not choices or (others and any(isinstance(choice, str) and _is_like(choice) for choice in choices)):
            raise _refused(name, "its choices would be read as other values, or are not of its type")
        return [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
    if "string" not in types and others:
        return "json"
    if others & {"object", "array"} or not _is_free(value):
        raise _refused(name, "its text may be read as another value: beside strings, allow null, booleans, any number")
    return "text"


def _is_like(text: str) -> bool:
    """Return whether a text may be read as a value that is not a string."""
    try:
        json.loads(text)
    except ValueError:
        return text.strip().lower() in ("true", "false", "none", "null") or text.strip()[:1] in "+-.0123456789"
    return True


def _is_free(value: Mapping[str, Any]) -> bool:
    """Return whether the schema accepts all numbers, if it accepts one."""
    return _numbers_and_freedom(value)[1]


def _numbers_and_freedom(value: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether a schema accepts numbers, and whether it then accepts all of them."""
    parts = [_numbers_and_freedom(part) for part in _parts(value, *_UNIONS) if isinstance(part, dict)]
    may_be_number = any(kind in _NUMBERS for kind in _own_types(value)) or any(number for number, _ in parts)
    is_free = not may_be_number or value.keys() <= _FREE
    return may_be_number, is_free and all(free for _, free in parts)


def _refused(name: str, reason: str) -> ApiError:
    message = f"tools: the parameter {name!r} cannot be forced, since this model writes arguments as text, and {reason}"
    return ApiError(400, message, param="tools")
