"""What a client may ask of a run, and what comes of it: the records of the journal.

    | body             | kind in the journal             | result      | clears the gradient |
    |------------------|---------------------------------|-------------|---------------------|
    | `CreateRun`      | `create_model`                  | `Created`   | yes                 |
    | `ForwardBackward`| `forward_backward` or `forward` | `PassResult`| no                  |
    | `OptimStep`      | `optim_step`                    | `StepResult`| yes, also if it fails |
    | `SaveWeights`    | `save_weights`                  | `Saved`     | no                  |
    | `SaveForSampler` | `save_weights_for_sampler`      | `Saved`     | no                  |
    | `SaveExternal`   | `save_weights_external`         | `Saved`     | no                  |
    | `LoadWeights`    | `load_weights`                  | `Loaded`    | yes                 |

Bodies and results are plain records, encoded by `store/codec.py`. An operation has exactly one
outcome: a value, or an error with the category of who can put it right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from marlaas.errors import (
    CapacityExceeded,
    Conflict,
    InvalidRequest,
    MarlaasError,
    NotFound,
    QuotaExceeded,
    TooLarge,
)
from marlaas.loop import metrics
from marlaas.store import codec
from marlaas.types import (
    FORWARD_BACKWARD,
    AdamParams,
    Datum,
    DatumOutput,
    Objective,
    Operation,
    OperationState,
    StepResult,
)

CREATE_SEQ = 0
"""Number of the operation that makes a run; the client counts on from it."""

_REQUEST = "op"
"""Begins the request ids of operations."""


class OperationKind(StrEnum):
    """What an operation does."""

    CREATE = "create_model"
    FORWARD_BACKWARD = FORWARD_BACKWARD
    FORWARD = "forward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    LOAD_WEIGHTS = "load_weights"

    @property
    def is_pass(self) -> bool:
        """Whether several of them may be at a worker at once."""
        return self in (OperationKind.FORWARD_BACKWARD, OperationKind.FORWARD)


class Category(StrEnum):
    """Who can put an error right."""

    USER = "user"
    SERVER = "server"


# ---------------------------------------------------------------------------------------------
# Bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRun:
    """Make the policy: fresh, or from the checkpoint whose files the run has taken over."""

    path: str | None = None
    """`tinker://...` of that checkpoint."""
    with_optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Score data, and add the gradient of their summed loss unless `is_forward_only`."""

    data: Sequence[Datum]
    objective: Objective
    is_forward_only: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)

    @property
    def num_cells(self) -> int:
        """Numbers of one of its arrays."""
        return sum(datum.weights.size for datum in self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Apply the accumulated gradient and clear it."""

    adam: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights:
    """Keep adapter and optimizer state, to go on from."""

    name: str
    ttl_s: float | None = None
    overwrite: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForSampler:
    """Keep the adapter to sample from: under a name, or as sampler `sampler_seq` of the session."""

    name: str | None = None
    sampler_seq: int | None = None
    ttl_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveExternal:
    """Keep the adapter to be downloaded."""

    name: str
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """Go on from a checkpoint of this or another run, of this tenant or a published one."""

    path: str
    with_optimizer: bool = False


Body = (
    CreateRun
    | ForwardBackward
    | OptimStep
    | SaveWeights
    | SaveForSampler
    | SaveExternal
    | LoadWeights
)

_BODIES: Mapping[OperationKind, type[Body]] = {
    OperationKind.CREATE: CreateRun,
    OperationKind.FORWARD_BACKWARD: ForwardBackward,
    OperationKind.FORWARD: ForwardBackward,
    OperationKind.OPTIM_STEP: OptimStep,
    OperationKind.SAVE_WEIGHTS: SaveWeights,
    OperationKind.SAVE_FOR_SAMPLER: SaveForSampler,
    OperationKind.SAVE_EXTERNAL: SaveExternal,
    OperationKind.LOAD_WEIGHTS: LoadWeights,
}
_KINDS = {body: kind for kind, body in _BODIES.items() if body is not ForwardBackward}


def kind_of(body: Body) -> OperationKind:
    if isinstance(body, ForwardBackward):
        is_forward = body.is_forward_only
        return OperationKind.FORWARD if is_forward else OperationKind.FORWARD_BACKWARD
    return _KINDS[type(body)]


def encode_body(body: Body) -> bytes:
    """Return a body as bytes, the same ones for the same content: a repetition is told by them."""
    if isinstance(body, ForwardBackward):
        params = dict(sorted(body.objective.params.items()))
        body = replace(body, objective=replace(body.objective, params=params))
    return codec.encode(body)


def body_of(operation: Operation) -> Body:
    return codec.decode(operation.payload, _BODIES[OperationKind(operation.kind)])


# ---------------------------------------------------------------------------------------------
# Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    run_id: str
    adapter_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass says, datum by datum."""

    outputs: Sequence[DatumOutput]
    metrics: Mapping[str, float]
    """`name:reduction`, see `docs/metrics.md`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    path: str | None
    """`tinker://...`; None where the client gave no name."""
    size_bytes: int
    sampler_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    path: str
    version: int
    """The run's, with the load counted in."""


Value = Created | PassResult | StepResult | Saved | Loaded
"""`StepResult.version` is the run's: optimizer steps and loads so far."""

_VALUES: Mapping[OperationKind, type[Value]] = {
    OperationKind.CREATE: Created,
    OperationKind.FORWARD_BACKWARD: PassResult,
    OperationKind.FORWARD: PassResult,
    OperationKind.OPTIM_STEP: StepResult,
    OperationKind.SAVE_WEIGHTS: Saved,
    OperationKind.SAVE_FOR_SAMPLER: Saved,
    OperationKind.SAVE_EXTERNAL: Saved,
    OperationKind.LOAD_WEIGHTS: Loaded,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of an operation: a value, or an error."""

    kind: OperationKind
    value: Value | None = None
    error: str = ""
    category: str = ""
    """Of the error: `user` or `server`."""


class QueueState(StrEnum):
    """Why an operation has no outcome yet."""

    ACTIVE = "active"
    PAUSED_CAPACITY = "paused_capacity"
    PAUSED_RATE_LIMIT = "paused_rate_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """There is no outcome yet: ask again."""

    queue_state: QueueState = QueueState.ACTIVE
    reason: str = ""
    """In words, where there is one."""


def result_of(operation: Operation) -> Result:
    """Return the outcome of an operation that is finished.

    Raises:
        NotFound: it was so long ago that its value is not kept any more.
    """
    assert operation.state is not OperationState.ACCEPTED
    kind = OperationKind(operation.kind)
    if operation.state is OperationState.FAILED:
        return Result(kind=kind, error=operation.error, category=operation.error_category)
    if not operation.result:
        raise NotFound(f"the result of {operation.request_id} is not kept any more")
    return Result(kind=kind, value=codec.decode(operation.result, _VALUES[kind]))


def failure(kind: OperationKind, error: MarlaasError) -> Result:
    return Result(kind=kind, error=str(error), category=category_of(error).value)


def category_of(error: MarlaasError) -> Category:
    """Return whether the caller can put an error right."""
    is_users = isinstance(
        error, InvalidRequest | NotFound | Conflict | QuotaExceeded | CapacityExceeded | TooLarge
    )
    return Category.USER if is_users else Category.SERVER


def pass_result(body: ForwardBackward, outputs: Sequence[DatumOutput]) -> PassResult:
    row = metrics.of_pass(body.data, outputs, body.objective, is_forward_only=body.is_forward_only)
    return PassResult(outputs=outputs, metrics=row)


# ---------------------------------------------------------------------------------------------
# Request ids


def request_id_of(run_id: str, seq: int) -> str:
    return f"{_REQUEST}:{run_id}:{seq}"


def split_request_id(request_id: str) -> tuple[str, int]:
    """Return run id and number.

    Raises:
        NotFound: no operation is called so.
    """
    head, _, number = request_id.rpartition(":")
    prefix, _, run_id = head.partition(":")
    if prefix != _REQUEST or not run_id or not (number.isascii() and number.isdigit()):
        raise NotFound(f"no request {request_id!r}")
    if len(number) > MAX_SEQ_DIGITS:
        raise NotFound(f"no request {request_id!r}")
    return run_id, int(number)


MAX_SEQ_DIGITS = 18
"""What fits a 64-bit column for certain."""
