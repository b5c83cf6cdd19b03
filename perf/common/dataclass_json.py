"""Dataclasses as JSON and back: a key for each field. What is read is held to the fields' types."""

from __future__ import annotations

import types
import typing
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

REST = {"rest": True}  # metadata of a field that is a dict of all keys that no other field has


def to_json(value: object) -> Any:
    """A field that is None is left out if that is its default, and else written as null."""
    if isinstance(value, dict):
        return {key: to_json(each) for key, each in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    written: dict[str, Any] = {}
    for each in fields(value):
        content = getattr(value, each.name)
        if content is not None or each.default is not None:
            written |= to_json(content if each.metadata == REST else {each.name: content})
    return written


def from_json(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `to_json` wrote; of a union the first type that it can be. Raises ValueError for
    anything else: an unknown key, one that is missing, a value of another type. A TypedDict is taken as it is."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for member in members:
            with suppress(ValueError):
                return from_json(member, data)
    elif isinstance(data, dict):
        if is_dataclass(kind):
            return _dataclass_from(kind, data)
        if origin is dict:
            return {key: from_json(members[1], each) for key, each in data.items()}
        if typing.is_typeddict(kind):
            return data
    elif isinstance(kind, type) and isinstance(data, (int, float) if kind is float else kind):
        return data
    raise ValueError(f"{str(data)[:80]} is not of type {getattr(kind, '__name__', kind)}")


def _dataclass_from(kind: Any, data: dict[str, Any]) -> Any:
    types_of = _types(kind)
    rest = next((each.name for each in fields(kind) if each.metadata == REST), None)
    others = {key: each for key, each in data.items() if key not in types_of or key == rest}
    values = {key: each for key, each in data.items() if key not in others} | ({rest: others} if rest else others)
    try:
        return kind(**{name: from_json(types_of[name], each) for name, each in values.items()})
    except (KeyError, TypeError) as error:  # a key is unknown, or missing
        raise ValueError(f"{kind.__name__}: {error}") from None


@cache
def _types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
