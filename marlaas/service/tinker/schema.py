"""The message classes of `schema.proto`, made when this module is imported.

The file is read by the few rules below, which cover what it uses; so nothing generated lies in the
repository, and nothing but `protobuf` itself is needed. The classes live in a descriptor pool of
their own: a process may hold another library's classes for the same wire format beside them.
"""

import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "marlaas.tinker"
_FILE = "schema.proto"

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "bool": _FIELD.TYPE_BOOL,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
}
_TOKEN = re.compile(r"map<\w+,\s*\w+>|\w+|[{}=;]")
_MAP = re.compile(r"map<(\w+),\s*(\w+)>")


def _read(text: str) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a schema: enums, then messages with plain, optional, repeated and
    map fields and oneofs."""
    body = re.sub(r"//[^\n]*", "", text).split(f"package {_PACKAGE};")[1]
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=_PACKAGE, syntax="proto3")
    tokens = iter(_TOKEN.findall(body))
    enums: set[str] = set()
    for kind in tokens:
        name = next(tokens)
        assert next(tokens) == "{" and kind in ("enum", "message"), f"{_FILE}: {kind} {name}"
        if kind == "enum":
            enums.add(name)
            _read_enum(file.enum_type.add(name=name), tokens)
        else:
            _read_message(file.message_type.add(name=name), tokens, enums)
    return file


def _read_enum(enum: descriptor_pb2.EnumDescriptorProto, tokens: Iterator[str]) -> None:
    while (name := next(tokens)) != "}":
        enum.value.add(name=name, number=_number(tokens))


def _read_message(
    message: descriptor_pb2.DescriptorProto, tokens: Iterator[str], enums: set[str]
) -> None:
    oneof: int | None = None
    optional: list[descriptor_pb2.FieldDescriptorProto] = []
    while (token := next(tokens)) != "}" or oneof is not None:
        if token == "}":
            oneof = None
        elif token == "oneof":
            oneof = len(message.oneof_decl)
            message.oneof_decl.add(name=next(tokens))
            assert next(tokens) == "{"
        else:
            label = token if token in ("repeated", "optional") else ""
            kind = next(tokens) if label else token
            field = message.field.add(name=next(tokens), label=_FIELD.LABEL_OPTIONAL)
            field.number = _number(tokens)
            _set_type(message, field, kind, enums)
            if label == "repeated":
                field.label = _FIELD.LABEL_REPEATED
            if label == "optional":
                optional.append(field)
            if oneof is not None:
                field.oneof_index = oneof
    for field in optional:  # each in a oneof of its own, behind the written ones
        field.oneof_index = len(message.oneof_decl)
        field.proto3_optional = True
        message.oneof_decl.add(name=f"_{field.name}")


def _set_type(
    message: descriptor_pb2.DescriptorProto,
    field: descriptor_pb2.FieldDescriptorProto,
    kind: str,
    enums: set[str],
) -> None:
    pair = _MAP.fullmatch(kind)
    if pair is not None:
        name = "".join(part.capitalize() for part in field.name.split("_")) + "Entry"
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        for number, (part, inner) in enumerate(
            zip(("key", "value"), pair.groups(), strict=True), 1
        ):
            held = entry.field.add(name=part, number=number, label=_FIELD.LABEL_OPTIONAL)
            _set_type(entry, held, inner, enums)
        field.label = _FIELD.LABEL_REPEATED
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FIELD.TYPE_ENUM if kind in enums else _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _number(tokens: Iterator[str]) -> int:
    assert next(tokens) == "="
    number = int(next(tokens))
    assert next(tokens) == ";"
    return number


_TEXT = resources.files("marlaas.service.tinker").joinpath(_FILE).read_text(encoding="utf-8")
_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_read(_TEXT).SerializeToString())


def _class(name: str) -> Any:
    found = _POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}")
    return message_factory.GetMessageClass(found)


# Typed as anything: the classes are made here, so no checker knows their fields.
ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
SampleResponse = _class("SampleResponse")
Tensor = _class("Tensor")
Datum = _class("Datum")

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""`DType`."""
STOP, LENGTH = 0, 1
"""`StopReason`."""
