"""Requests to train on data, from protobuf to our records; and what came of them, back.

    body ─► zstd ─► protobuf ─► `PassRequest` ─► one `Datum` a datum ─► run
                                                                         │
                protobuf ◄─ one record for each shape of targets ◄─ outputs

A client's datum has N input tokens and N targets: row i predicts target i, and the client has
shifted. Ours has N + 1 entries, entry t is about what row t - 1 predicts, and entry 0 is about
nothing:

    client   inputs   a b c d        targets  b c d e         weights  0 0 1 1
    here     tokens   a b c d e                               weights  0 0 0 1 1

- Where the targets are not the shifted inputs, they travel beside them (`Datum.targets`), and the
  last token, which is never read, is a filler.
- Everything here is for a thread: a body of some megabytes takes tens of milliseconds.
- Spans that say where tokens were sampled are for losses that this service computes without them.
- What a request takes is known before it takes it: how large it is once it is decompressed
  (`unpacked_bytes`), and what its sparse tensors come to (`PassRequest.unfolded_bytes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from marlaas.errors import InvalidRequest, TooLarge, UnsupportedFeature
from marlaas.loop.operations import ForwardBackward, OperationKind
from marlaas.service.tinker import losses, schema
from marlaas.service.tinker.tensors import pack, read_int32, read_tensor
from marlaas.types import Datum, DatumOutput

MAX_DATA = 4096
"""Data of one request; clients send at most 1,024 in each."""

MAX_PROBLEMS = 20
"""Faults that a refusal names."""

MAX_SPARSE_CELLS = 1 << 24
"""Cells that the sparse tensors of one request have together, listed or not: 64 MiB in single
precision. What is dense is as large as its bytes."""

MAX_TARGETS = 256
"""Targets of one token; the engine has no more."""

_BYTES_PER_CELL = 24
"""What a cell of a sparse tensor takes in our arrays, in the journal, and on the way there."""

HEADER_BYTES = 18
"""A compressed body says within so many bytes how large it is."""

_NO_CELL = -1
"""Where a target is this, there is none."""


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A request that could be parsed: who it is for is known, whatever is wrong with the rest."""

    run_id: str
    seq: int
    message: Any
    sparse_cells: Mapping[str, int]
    """Of each sparse tensor, listed or not."""

    @property
    def unfolded_bytes(self) -> int:
        """What the sparse tensors come to once they are dense."""
        return min(sum(self.sparse_cells.values()), MAX_SPARSE_CELLS) * _BYTES_PER_CELL

    @property
    def kind(self) -> OperationKind:
        is_forward = self.message.forward_only
        return OperationKind.FORWARD if is_forward else OperationKind.FORWARD_BACKWARD


def unpacked_bytes(first: bytes, num_bytes: int, encoding: str, limit: int) -> int:
    """Return how large a body will be at most, by its first bytes: `num_bytes` if it is not
    compressed, what it says of itself if it is."""
    if encoding != "zstd":
        return num_bytes
    try:
        says = zstandard.frame_content_size(first[:HEADER_BYTES])
    except zstandard.ZstdError:
        return num_bytes  # is refused
    return limit if says < 0 else min(max(says, num_bytes), limit)


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a body as it was before it was compressed.

    Raises:
        InvalidRequest: it is not what it says.
        TooLarge: it is over the limit.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidRequest(f"Content-Encoding {encoding[:40]!r}; expected zstd or none")
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            data = reader.read(limit + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise InvalidRequest(f"body: is no zstd frame ({error})") from None
    if len(data) > limit:
        raise TooLarge(f"the body has more than {limit} bytes once it is decompressed")
    return data


def parse(data: bytes) -> PassRequest:
    """Return a request from protobuf.

    Raises:
        InvalidRequest: it cannot be parsed.
    """
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequest("body: is no ForwardBackwardRequest in protobuf") from None
    return PassRequest(message.model_id, message.seq_id, message, _sparse_cells(message))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a base can take."""

    max_context: int
    vocab_size: int


def read_pass(request: PassRequest, bounds: Bounds) -> ForwardBackward:
    """Return what a request asks for.

    Raises:
        InvalidRequest: names every datum and field that is wrong, up to a number of them.
    """
    message = request.message
    loss = losses.loss_named(message.loss_fn)
    objective = losses.read_objective(loss, _config(message))
    if not 1 <= len(message.data) <= MAX_DATA:
        raise InvalidRequest(f"data: {len(message.data)} of them; expected 1 to {MAX_DATA}")
    _check_sparse_cells(request.sparse_cells)
    data, problems = [], []
    for index, datum in enumerate(message.data):
        try:
            data.append(_read_datum(f"data[{index}]", datum, loss, bounds))
        except InvalidRequest as error:
            problems += error.problems
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise InvalidRequest(*problems[:MAX_PROBLEMS])
    return ForwardBackward(data=data, objective=objective, is_forward_only=message.forward_only)


def _config(message: Any) -> dict[str, float | str]:
    """Return the options of a loss; where both maps have one, the newer map holds."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        config[name] = getattr(value, kind) if kind else ""
    return config


def _sparse_cells(message: Any) -> dict[str, int]:
    """Return how many cells each sparse tensor claims. What is no shape of a matrix claims none,
    since it is refused by who reads it: a product of a million sizes would never end."""
    return {
        f"data[{index}].loss_fn_inputs.{name}": prod(tensor.shape)
        for index, datum in enumerate(message.data)
        for name, tensor in datum.loss_fn_inputs.items()
        if tensor.HasField("sparse_csr") and len(tensor.shape) == 2 and min(tensor.shape) >= 0
    }


def _check_sparse_cells(cells: Mapping[str, int]) -> None:
    """Refuse sparse tensors that would be too large once they are dense."""
    if sum(cells.values()) > MAX_SPARSE_CELLS:
        largest = max(cells, key=lambda place: cells[place])
        raise TooLarge(
            f"data: sparse tensors of more than {MAX_SPARSE_CELLS} cells together, most of them in "
            f"{largest[:200]}"
        )


def _read_datum(where: str, message: Any, loss: losses.Loss, bounds: Bounds) -> Datum:
    inputs_N = _read_inputs(where, message.model_input, bounds.vocab_size)
    most = bounds.max_context - 1
    if not 1 <= len(inputs_N) <= most:
        raise InvalidRequest(
            f"{where}: {len(inputs_N)} input tokens; expected 1 to {most}, which with the last "
            f"target fill a context of {bounds.max_context}"
        )
    fields = _read_fields(where, message.loss_fn_inputs, loss, len(inputs_N), bounds)
    targets = fields.pop(losses.TARGETS)
    weights = losses.is_trained(loss, fields, targets != _NO_CELL)
    is_lost = (weights != 0) & (targets == _NO_CELL)
    if is_lost.any():
        raise InvalidRequest(f"{where}: {_first(is_lost)} is to be trained on, and has no target")
    nothing = np.zeros_like(weights)
    is_shifted = (
        targets.ndim == 1 and targets[-1] != _NO_CELL and np.array_equal(targets[:-1], inputs_N[1:])
    )
    last = targets[-1] if is_shifted else 0
    return Datum(
        tokens=np.append(inputs_N, np.int32(last)),
        weights=_behind_nothing(weights),
        advantages=_behind_nothing(fields.get(losses.ADVANTAGES, nothing)),
        sampling_logprobs=_behind_nothing(fields.get(losses.LOGPROBS, nothing)),
        targets=None if is_shifted else _behind_nothing(targets),
        is_scored_everywhere=True,
        loss_inputs={
            name: _behind_nothing(values)
            for name, values in losses.token_parameters(fields).items()
        },
    )


def _behind_nothing(values: np.ndarray) -> np.ndarray:
    """Return an array with an entry of zeros before it: nothing predicts the first token."""
    return np.concatenate([np.zeros((1, *values.shape[1:]), values.dtype), values])


def _read_inputs(where: str, chunks: Sequence[Any], vocab_size: int) -> np.ndarray:
    pieces = []
    for index, chunk in enumerate(chunks):
        place = f"{where}.model_input[{index}]"
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            words = f"{kind} chunks are not supported; " if kind else ""
            raise UnsupportedFeature(f"{place}: {words}expected encoded_text")
        pieces.append(read_int32(place, chunk.encoded_text.tokens))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    is_wrong = (tokens < 0) | (tokens >= vocab_size)
    if is_wrong.any():
        at = int(is_wrong.argmax())
        raise InvalidRequest(
            f"{where}.model_input: token {at} is {tokens[at]}; expected 0 to {vocab_size - 1}"
        )
    return tokens.astype(np.int32, copy=False)


def _read_fields(
    where: str, tensors: Mapping[str, Any], loss: losses.Loss, num_tokens: int, bounds: Bounds
) -> dict[str, np.ndarray]:
    """Return every input of a loss, in the shape of the targets."""
    problems = [
        f"{where}.loss_fn_inputs.{name[:40]}: {loss.name} has no such input; expected "
        f"{', '.join(loss.inputs)}"
        for name in tensors
        if name not in loss.inputs
    ]
    problems += [
        f"{where}.loss_fn_inputs.{name}: is missing; {loss.name} needs it"
        for name in (losses.TARGETS, *loss.needs)
        if name not in tensors
    ]
    if problems:
        raise InvalidRequest(*problems)
    fields = {
        name: read_tensor(f"{where}.loss_fn_inputs.{name}", tensor)
        for name, tensor in tensors.items()
    }
    targets = fields[losses.TARGETS] = _read_targets(
        f"{where}.loss_fn_inputs.{losses.TARGETS}", fields[losses.TARGETS], num_tokens, bounds
    )
    for name, values in fields.items():
        if name != losses.TARGETS:
            place = f"{where}.loss_fn_inputs.{name}"
            fields[name] = _read_floats(place, values, targets.shape)
            if name == losses.MASK and (fields[name] < 0).any():
                raise InvalidRequest(f"{place}: {_first(values < 0)} is negative; expected 0 or 1")
    return fields


def _read_targets(place: str, targets: np.ndarray, num_tokens: int, bounds: Bounds) -> np.ndarray:
    if targets.dtype.kind != "i":
        raise InvalidRequest(f"{place}: has float values; expected int64")
    if targets.shape[0] != num_tokens or not targets.size:
        raise InvalidRequest(
            f"{place}: shape {list(targets.shape)}; expected [{num_tokens}] or [{num_tokens}, K], "
            "one row for each input token"
        )
    if targets.ndim == 2 and targets.shape[1] > MAX_TARGETS:
        raise InvalidRequest(
            f"{place}: shape {list(targets.shape)}; expected at most {MAX_TARGETS} targets a token"
        )
    is_wrong = (targets < _NO_CELL) | (targets >= bounds.vocab_size)
    if is_wrong.any():
        wrong = targets[is_wrong][0]
        raise InvalidRequest(
            f"{place}: {_first(is_wrong)} is {wrong}; expected 0 to {bounds.vocab_size - 1}"
        )
    return targets.astype(np.int32)


def _read_floats(place: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if values.shape != shape:
        raise InvalidRequest(
            f"{place}: shape {list(values.shape)}; expected {list(shape)}, as target_tokens has"
        )
    floats = values.astype(np.float32, copy=False)
    is_finite = np.isfinite(floats)
    if not is_finite.all():
        at = np.unravel_index(int((~is_finite).argmax()), floats.shape)
        raise InvalidRequest(
            f"{place}: {_first(~is_finite)} is {floats[at]}; expected a finite number"
        )
    return floats


def _first(is_wrong: np.ndarray) -> str:
    """Return the first place that is wrong, as text."""
    at = np.unravel_index(int(is_wrong.argmax()), is_wrong.shape)
    return f"entry [{', '.join(map(str, at))}]"


# ---------------------------------------------------------------------------------------------
# Results

OUTPUT_TYPE = "ArrayRecord"


def encode_outputs(outputs: Sequence[DatumOutput], metrics: Mapping[str, float]) -> bytes:
    """Return what a pass said as protobuf: data in order, neighbours of one shape in one record."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in metrics.items():
        message.metrics[name] = value
    for trailing, logprobs in _runs_of_one_shape(outputs):
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(logprobs))
        field = record.fields["logprobs"]
        field.data = pack(np.concatenate([each.ravel() for each in logprobs]), "<f4")
        ends = np.cumsum([0, *(each.size for each in logprobs)], dtype=np.int64)
        field.offsets = pack(ends * 4, "<i8")
        field.dtype = schema.FLOAT32
        field.trailing_shape.extend(trailing)
    return message.SerializeToString()


def _runs_of_one_shape(
    outputs: Sequence[DatumOutput],
) -> list[tuple[tuple[int, ...], list[np.ndarray]]]:
    runs: list[tuple[tuple[int, ...], list[np.ndarray]]] = []
    for output in outputs:
        logprobs = output.logprobs[1:]  # entry 0 is about nothing
        if not runs or runs[-1][0] != logprobs.shape[1:]:
            runs.append((logprobs.shape[1:], []))
        runs[-1][1].append(logprobs)
    return runs
