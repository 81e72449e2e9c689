"""The description of the console's interface, as OpenAPI 3.1 has it, made from what it answers with."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import unicron
from unicron_console.views import Answer

REFERENCE = "#/components/schemas/{name}"
KIND = "application/json"


class Way(NamedTuple):
    """A way of asking the console, and what it is for.

    Attributes:
        path: with names in braces.
        asked: what is sent along; None for nothing.
        answer: what comes back.
    """

    path: str
    call: Callable[[Request], Awaitable[Response]]
    text: str
    answer: Any
    asked: type | None = None


def describe(ways: Iterable[Way]) -> bytes:
    """Return the description of these ways of asking, as JSON."""
    known = list(ways)
    kinds = [kind for way in known for kind in (way.answer, way.asked) if kind is not None]
    schemas, parts = msgspec.json.schema_components([*kinds, Answer], ref_template=REFERENCE)
    found = {id(kind): schema for kind, schema in zip([*kinds, Answer], schemas, strict=True)}
    error = {"description": "What was wrong, and the cure.", "content": {KIND: {"schema": found[id(Answer)]}}}
    paths = {}
    for way in known:
        operation: dict[str, Any] = {
            "summary": way.text,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in _names(way.path)
            ],
            "responses": {
                "200": {"description": way.text, "content": {KIND: {"schema": found[id(way.answer)]}}},
                "default": error,
            },
        }
        if way.asked:
            operation["requestBody"] = {"required": True, "content": {KIND: {"schema": found[id(way.asked)]}}}
        paths[way.path] = {"post" if way.asked else "get": operation}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Unicron's console", "version": unicron.__version__},
            "paths": paths,
            "components": {
                "schemas": parts,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]
