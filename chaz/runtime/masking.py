"""What of a call's arguments may leave the workers. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, cast

MASK = "***"
SHORTEST = 4
"""Shorter values are in any text, and tell nothing."""


def shown_arguments(arguments: str, sensitive: Collection[str]) -> str:
    """The JSON text of a call's arguments with the values of these parameters masked; as it came, if it has none.

    Inside of others too, where a model that gets the form wrong puts them. What is no JSON object is masked whole.
    """
    if not sensitive or not arguments.strip():
        return arguments
    found = False

    def masked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        found = found or any(name in sensitive for name, _ in pairs)
        return {name: MASK if name in sensitive else value for name, value in pairs}

    values = _object(arguments, masked)
    if values is None:
        return MASK
    return json.dumps(values, ensure_ascii=False) if found else arguments


def sensitive_values(arguments: str, sensitive: Collection[str]) -> set[str]:
    """The texts inside of what :func:`shown_arguments` masks, numbers as text; none of what is no JSON object."""
    values: set[str] = set()

    def gather(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            if name in sensitive:
                values.update(_texts(value))
        return dict(pairs)

    if sensitive:
        _object(arguments, gather)
    return {text for text in values if len(text) >= SHORTEST}


def without(text: str, values: Collection[str]) -> str:
    """The text with these values masked, wherever they stand; as JSON writes them, too."""
    for value in sorted(values, key=len, reverse=True):
        for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
            text = text.replace(form, MASK)
    return text


def without_in(arguments: str, values: Collection[str], parameters: Collection[str]) -> str:
    """The same in the JSON text of a call's arguments, which stays one: a value may be part of how JSON is written.

    The names of the tool's own parameters stay.
    """
    if (masked := without(arguments, values)) == arguments:
        return arguments

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(each) for each in cast("list[Any]", value)]
        if isinstance(value, str):
            return without(value, values)
        if isinstance(value, int | float) and not isinstance(value, bool) and without(str(value), values) != str(value):
            return MASK
        return value

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name if name in parameters else without(name, values): clean(value) for name, value in pairs}

    found = _object(arguments, hook)
    return masked if found is None else json.dumps(found, ensure_ascii=False)


def _object(arguments: str, hook: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> dict[str, Any] | None:
    """The object that a JSON text is, each in it made by ``hook`` of all its pairs: a name may come twice."""
    try:
        found: object = json.loads(arguments, object_pairs_hook=hook)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _texts(value: Any) -> list[str]:
    texts: list[str] = []
    # Not by recursion, which something that is nested deeply enough would end.
    left: list[Any] = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(cast("dict[str, Any]", each).values())
        elif isinstance(each, list):
            left.extend(cast("list[Any]", each))
        elif each is not None and not isinstance(each, bool):
            texts.append(str(each))
    return texts
