"""Reads a job file in YAML: plain values for `loop.jobspec`, with the line of every value.

YAML is read by the rules of version 1.2, which hold fewer surprises: `no` is a word, 010 is not 8,
a date is text, and `1e-3` is a number. A key that is given twice is a fault, not an override.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from marlaas.errors import InvalidRequest
from marlaas.loop.jobspec import JobFile, Place, Trail, read_jobs

MAX_FILE_BYTES = 1 << 20
"""A job file is written by hand; one of more than a megabyte is a mistake."""
MAX_FILE_VALUES = 100_000
"""Bounds what aliases can unfold a small file into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A job file as plain values, the line of every value, and faults that did not stop it."""

    values: Any
    lines: Mapping[Trail, int]
    problems: Sequence[str]


def load_jobs(path: Path, *, context_of: Callable[[str], int | None] | None = None) -> JobFile:
    """Read a job file; `context_of` is as in `read_jobs`.

    Raises:
        InvalidRequest: with one problem per fault.
    """
    document = load_document(path)
    return read_jobs(
        document.values,
        lines=document.lines,
        problems=document.problems,
        context_of=context_of,
    )


def load_document(path: Path) -> Document:
    """Read a job file as YAML and no further.

    Raises:
        InvalidRequest: it cannot be read, or is not YAML.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read ({error.strerror})") from error
    if len(text) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path}: is too long; expected at most {MAX_FILE_BYTES} bytes")
    return _parse_yaml(text)


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: no octal, no dates, `no` is a word, 1e-3 a number."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (the parent's attribute)


for _tag, _pattern, _firsts in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?[0-9]+[eE][-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [*_firsts]
    )
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])


class _TreeReader:
    """Turns YAML nodes into plain values and notes on which line each one begins."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._num_nodes = 0
        self.lines: dict[Trail, int] = {}
        self.problems: list[str] = []

    def read(self, node: yaml.Node, path: Trail = (), above: tuple[yaml.Node, ...] = ()) -> object:
        self._num_nodes += 1
        if node in above or self._num_nodes > MAX_FILE_VALUES:
            raise InvalidRequest(
                f"line {node.start_mark.line + 1}: aliases unfold without end, or past "
                f"{MAX_FILE_VALUES} values"
            )
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.read(item, (*path, index), (*above, node))
                for index, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path, (*above, node))
        return self._loader.construct_object(node)

    def _read_mapping(
        self, node: yaml.MappingNode, path: Trail, above: tuple[yaml.Node, ...]
    ) -> dict[Any, object]:
        self._note_repeated_keys(node, path)
        self._loader.flatten_mapping(node)
        mapping: dict[Any, object] = {}
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node)
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            mapping[key] = self.read(value_node, (*path, key), above)
        return mapping

    def _note_repeated_keys(self, node: yaml.MappingNode, path: Trail) -> None:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise InvalidRequest(f"line {key_node.start_mark.line + 1}: a key must be a word")
            if key_node.value in seen and key_node.value != "<<":
                place = Place(lines={}, problems=self.problems, path=(*path, key_node.value))
                place.refuse(f"is given twice (line {key_node.start_mark.line + 1})")
            seen.add(key_node.value)


def _parse_yaml(text: bytes) -> Document:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            reader = _TreeReader(loader)
            values = None if node is None else reader.read(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        raise InvalidRequest(f"{where}is not YAML: {what}") from error
    return Document(values=values, lines=reader.lines, problems=reader.problems)
