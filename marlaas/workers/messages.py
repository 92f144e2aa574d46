"""What the server and an engine worker say to each other: one dataclass per message, one framing.

    frame = length u32 | call id u32 | message number u8 | MessagePack body (store/codec)

Every call is answered by exactly one `Reply...` with the same call id, in any order; `Release`,
which nobody waits for, by none. The socket is private to parent and child; nothing in a frame
chooses what is constructed but the numbers below.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marlaas.store.codec import decode, encode
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Completion,
    Datum,
    DatumOutput,
    GenerateRequest,
    Objective,
    PolicyId,
    StepResult,
    WorkerStats,
)


@dataclass(frozen=True, slots=True)
class Generate:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Release:
    sequence_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Create:
    policy_id: PolicyId
    spec: AdapterSpec


@dataclass(frozen=True, slots=True)
class CreateFrom:
    policy_id: PolicyId
    spec: AdapterSpec
    source: str


@dataclass(frozen=True, slots=True)
class Load:
    policy_id: PolicyId
    snapshot: str


@dataclass(frozen=True, slots=True)
class LoadVersion:
    policy_id: PolicyId
    version: int
    folder: str


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    policy_id: PolicyId
    data: Sequence[Datum]
    objective: Objective


@dataclass(frozen=True, slots=True)
class Forward:
    policy_id: PolicyId | None
    version: int
    data: Sequence[Datum]


@dataclass(frozen=True, slots=True)
class OptimStep:
    policy_id: PolicyId
    adam: AdamParams
    snapshot: str | None


@dataclass(frozen=True, slots=True)
class ZeroGrad:
    policy_id: PolicyId


@dataclass(frozen=True, slots=True)
class SaveState:
    policy_id: PolicyId
    path: str


@dataclass(frozen=True, slots=True)
class Publish:
    policy_id: PolicyId
    version: int


@dataclass(frozen=True, slots=True)
class Retire:
    policy_id: PolicyId
    version: int


@dataclass(frozen=True, slots=True)
class SaveAdapter:
    policy_id: PolicyId
    version: int
    folder: str


@dataclass(frozen=True, slots=True)
class Remove:
    policy_id: PolicyId


@dataclass(frozen=True, slots=True)
class ExportVersion:
    """Ask for a version's weights, to carry them to another worker."""

    policy_id: PolicyId
    version: int


@dataclass(frozen=True, slots=True)
class ImportVersion:
    """Make another worker's version live here."""

    policy_id: PolicyId
    version: int
    spec: AdapterSpec
    adapter_hash: str
    row: np.ndarray
    """float32 [P], in the layout of the adapter's rank bucket."""


@dataclass(frozen=True, slots=True)
class GetStats:
    pass


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


@dataclass(frozen=True, slots=True)
class ReplyReady:
    """First message of a worker: its base passed the self-check."""

    max_context: int
    self_check: Mapping[str, float]
    max_trained_tokens: int
    """The longest datum that fits into a training pass of this worker."""


@dataclass(frozen=True, slots=True)
class ReplyNone:
    pass


@dataclass(frozen=True, slots=True)
class ReplyHash:
    adapter_hash: str


@dataclass(frozen=True, slots=True)
class ReplyCompletion:
    completion: Completion


@dataclass(frozen=True, slots=True)
class ReplyOutputs:
    outputs: list[DatumOutput]


@dataclass(frozen=True, slots=True)
class ReplyStep:
    result: StepResult


@dataclass(frozen=True, slots=True)
class ReplyVersion:
    spec: AdapterSpec
    adapter_hash: str
    row: np.ndarray


@dataclass(frozen=True, slots=True)
class ReplyStats:
    stats: WorkerStats


@dataclass(frozen=True, slots=True)
class ReplyError:
    """`code` names a class of `marlaas.errors`."""

    code: str
    message: str


Call = (
    Generate
    | Cancel
    | Release
    | Create
    | CreateFrom
    | Load
    | LoadVersion
    | ForwardBackward
    | Forward
    | OptimStep
    | ZeroGrad
    | SaveState
    | Publish
    | Retire
    | SaveAdapter
    | Remove
    | ExportVersion
    | ImportVersion
    | GetStats
    | Shutdown
)
Reply = (
    ReplyReady
    | ReplyNone
    | ReplyHash
    | ReplyCompletion
    | ReplyOutputs
    | ReplyStep
    | ReplyVersion
    | ReplyStats
    | ReplyError
)

_TYPES: tuple[type, ...] = (*Call.__args__, *Reply.__args__)
_NUMBERS = {type_: number for number, type_ in enumerate(_TYPES)}
_HEADER = struct.Struct("<IIB")

HEADER_BYTES = _HEADER.size


def pack(call_id: int, message: Call | Reply) -> bytes:
    """Return one whole frame."""
    body = encode(message)
    return _HEADER.pack(len(body), call_id, _NUMBERS[type(message)]) + body


def unpack_header(data: bytes | bytearray | memoryview, start: int = 0) -> tuple[int, int, type]:
    """Return body length, call id and message type of the frame that begins at `data[start]`."""
    length, call_id, number = _HEADER.unpack_from(data, start)
    return length, call_id, _TYPES[number]


def unpack_body(type_: type, body: bytes | bytearray | memoryview) -> Call | Reply:
    """Return the message of a frame."""
    return decode(body, type_)
