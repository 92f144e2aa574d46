"""What the web framework refuses, in the words of our own readers.

    ("body", "quotas", "tokens"), extra_forbidden ──► quotas.tokens: unknown key; did you mean ...?
    ("query", "days"), greater_than_equal         ──► days: got 0; expected at least 1
    json_invalid                                  ──► body: is no JSON (line 2, column 7: ...)
    no route                                      ──► no route GET /v1/job; did you mean ...?

This is the one place that knows the framework's dialect. A kind of fault that is not listed keeps
the framework's sentence behind what was got.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import compile_path

from marlaas.service.wire.common import Body

MAX_SHOWN_CHARS = 48
"""Most of a value that a message repeats."""

_EXPECTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']}",
    "greater_than": lambda ctx: f"more than {ctx['gt']}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']}",
    "less_than": lambda ctx: f"less than {ctx['lt']}",
    "finite_number": lambda _: "a finite number",
    "int_type": lambda _: "a whole number",
    "int_parsing": lambda _: "a whole number",
    "int_parsing_size": lambda _: "a whole number of 64 bits",
    "int_from_float": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "float_parsing": lambda _: "a number",
    "bool_type": lambda _: "true or false",
    "bool_parsing": lambda _: "true or false",
    "string_type": lambda _: "text",
    "string_too_short": lambda ctx: f"at least {ctx['min_length']} characters",
    "string_too_long": lambda ctx: f"at most {ctx['max_length']} characters",
    "list_type": lambda _: "a list",
    "too_short": lambda ctx: f"at least {ctx['min_length']} entries",
    "too_long": lambda ctx: f"at most {ctx['max_length']} entries",
    "dict_type": lambda _: "a mapping",
    "model_type": lambda _: "a mapping",
    "model_attributes_type": lambda _: "a mapping",
    "literal_error": lambda ctx: _bare(ctx["expected"]),
    "enum": lambda ctx: _bare(ctx["expected"]),
}
"""What would be right, by the framework's name of a fault."""

_THEN = "; expected "

_BRANCH = re.compile(r"str|int|float|bool|(list|dict|constrained|literal|function)[\[-].*")
"""How the framework calls the things that a value may be, in the place of a fault."""

_SIZES = frozenset({"string_too_short", "string_too_long", "too_short", "too_long"})
"""Faults of a size, where the value itself says nothing."""


def problems_of(request: Request, error: RequestValidationError) -> list[str]:
    """Return every fault of a request, each with its place and with what would be right."""
    route = request.scope.get("route")
    model = _body_model(route) if isinstance(route, APIRoute) else None
    return _merged(_worded(fault, model, error.body) for fault in error.errors())


def _merged(problems: Iterable[str]) -> list[str]:
    """Return problems with one line for a value that is none of several things it may be."""
    expected: dict[str, list[str]] = {}
    for problem in problems:
        got, _, words = problem.partition(_THEN)
        expected.setdefault(got, []).append(words)
    return [got + (_THEN + " or ".join(w) if any(w) else "") for got, w in expected.items()]


def _worded(fault: Mapping[str, Any], model: type[BaseModel] | None, body: object) -> str:
    kind, *path = fault["loc"]
    context = fault.get("ctx") or {}
    if fault["type"] == "json_invalid":
        return f"body: is no JSON ({_where(body, path)}{context.get('error', fault['msg'])})"
    path = [key for key in path if not _BRANCH.fullmatch(str(key))]
    place = ".".join(str(key) for key in path) or str(kind)
    if fault["type"] == "extra_forbidden":
        holder = _inner(model, path[:-1]) if kind == "body" and model is not None else None
        return f"{place}: {_unknown(str(path[-1]), holder)}"
    if fault["type"] == "missing":
        return f"{place}: is missing" + ("; expected JSON" if place == "body" else "")
    expected = _EXPECTED.get(fault["type"])
    words = expected(context) if expected else fault["msg"][:200]
    got = _size(fault["input"]) if fault["type"] in _SIZES else _shown(fault["input"], str(kind))
    return f"{place}: got {got}{_THEN}{words}" if expected else f"{place}: got {got}; {words}"


def _where(body: object, path: list[Any]) -> str:
    """Return line and column of the place at which JSON could not be read on."""
    if not isinstance(body, str | bytes) or not path or not isinstance(path[0], int):
        return ""
    text = body if isinstance(body, str) else body.decode(errors="replace")
    before = text[: path[0]]
    return f"line {before.count(chr(10)) + 1}, column {path[0] - before.rfind(chr(10))}: "


def _unknown(key: str, holder: type[BaseModel] | None) -> str:
    if holder is None:
        return "unknown key"
    if issubclass(holder, Body) and key in holder.not_supported:
        return "is not supported by this service; expected a request without it"
    known = list(holder.model_fields)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean `{near[0]}`?" if near else f"expected one of {', '.join(known)}"
    return f"unknown key; {hint}"


def _body_model(route: APIRoute) -> type[BaseModel] | None:
    """Return the schema of a route's body, if it has one."""
    field = route.body_field
    return None if field is None else _model_in(field.field_info.annotation)


def _inner(model: type[BaseModel], path: Iterable[Any]) -> type[BaseModel] | None:
    """Return the schema of what lies at a path in a body."""
    found: type[BaseModel] | None = model
    for key in path:
        if found is not None and key in found.model_fields:
            found = _model_in(found.model_fields[key].annotation)
    return found


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return the schema that a type is, or has within: `list[Schema]`, `Schema | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)


def _shown(value: object, kind: str) -> str:
    """Return a value as its author wrote it, short enough for a line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    # Everything in a query is text; its author thinks of what it says.
    is_plain = isinstance(value, str) and kind != "body" and value.isprintable()
    text = value if is_plain and isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def _size(value: object) -> str:
    if isinstance(value, str):
        return f"{len(value)} characters"
    return f"{len(value)} entries" if isinstance(value, list | Mapping) else "another size"


def _bare(expected: str) -> str:
    return expected.replace("'", "")


# ---------------------------------------------------------------------------------------------
# Requests that no route takes


def no_route(request: Request) -> str:
    """Return that no route has this path, and which one may have been meant."""
    path = request.url.path[:200]
    known = sorted({template for template, _ in _routes(request)})
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "`GET /openapi.json` lists every route"
    return f"no route {_printable(path)}; {hint}"


def other_methods(request: Request) -> str:
    """Return that a route does not take this method, and which ones it takes."""
    path = request.url.path
    methods = sorted(
        {
            method
            for template, taken in _routes(request)
            if compile_path(template)[0].fullmatch(path)
            for method in taken
        }
    )
    asked = re.sub(r"[^A-Z]", "", request.method)[:20] or "this method"
    return f"{asked} is not for {_printable(path[:200])}; expected {' or '.join(methods)}"


def _routes(request: Request) -> list[tuple[str, set[str]]]:
    return [
        (str(route.path), set(route.methods or ()) - {"HEAD"})
        for route in iter_route_contexts(request.app.routes)
    ]


def _printable(path: str) -> str:
    return path if path.isprintable() else repr(path)
