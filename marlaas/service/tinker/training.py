"""Runs: made, trained and saved. Every route but `get_info` accepts an operation and answers at
once with the name of its future.

- An operation of a run has a number, and the numbers are used up in order, whatever the order in
  which requests come. One that is refused uses up its number as well, if run and number can be
  read: the client goes on with the next, and nobody is to wait for this one.
- A repeated request gets the same answer: run and number name an operation.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from msgspec import Struct

from marlaas.errors import Conflict, InvalidRequest, QuotaExceeded, TooLarge, UnsupportedFeature
from marlaas.loop.operations import (
    Body,
    LoadWeights,
    OperationKind,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from marlaas.runtime import derive_seed
from marlaas.service.limits import BodyReader, read_body
from marlaas.service.parts import Parts, WithParts
from marlaas.service.tinker import bodies, passes
from marlaas.service.tinker.bodies import number, read_json, read_metadata
from marlaas.service.tinker.door import PREFIX, WithTenant, answer, read, says
from marlaas.store.db import Store
from marlaas.store.files import check_checkpoint_name
from marlaas.types import (
    EPHEMERAL,
    RANK_BUCKETS,
    AdamParams,
    AdapterSpec,
    Checkpoint,
    CheckpointKind,
    Run,
    TenantId,
)

B = TypeVar("B", bound=bodies.OperationBody)

router = APIRouter(prefix=PREFIX, tags=["tinker: training"])

ALPHA = 32.0
"""Scale of every adapter at any rank, as the hosted service documents it."""
DEFAULT_RANK = 32
MAX_SEQ = (1 << 31) - 1
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 24 * 3600
"""As clients check it themselves."""

_ADAM_RANGES: Mapping[str, tuple[float, float]] = {
    "learning_rate": (0.0, 1e6),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "eps": (0.0, 1e6),
    "weight_decay": (0.0, 1e6),
    "grad_clip_norm": (0.0, 1e30),
}


# ---------------------------------------------------------------------------------------------
# Runs


@router.post("/create_model", openapi_extra=says(bodies.CreateModel))
async def create_model(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Make a run with a fresh adapter."""
    body = await read(request, bodies.CreateModel)
    run_id = _run_id(body.session_id, body.model_seq_id)
    run = Run(
        run_id=run_id,
        session_id=body.session_id,
        seq=body.model_seq_id,
        base_model=base_named(parts, body.base_model),
        spec=_spec(body.lora_config, run_id),
        metadata=read_metadata("user_metadata", body.user_metadata),
        optimizer=_optimizer(body.optimizer_config),
    )
    return await _create(parts, tenant, run, None, with_optimizer=False)


@router.post("/load_weights", openapi_extra=says(bodies.CreateFromBody))
async def load_weights(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Make a run from a checkpoint; or, with `model_id` and `seq_id` in place of `session_id` and
    `model_seq_id`, load one into a run."""
    raw = await read_body(request)
    if _place_in(raw) is not None:
        return await _submit(
            parts, tenant, raw, OperationKind.LOAD_WEIGHTS, bodies.LoadIntoBody, _load
        )
    return await _create_from(parts, tenant, read_json(raw, bodies.CreateFromBody))


def _load(body: bodies.LoadIntoBody) -> Body:
    _refuse_token(body.weights_access_token)
    return LoadWeights(path=body.path, with_optimizer=body.optimizer)


def _refuse_token(token: str | None) -> None:
    if token:
        raise UnsupportedFeature(
            "weights_access_token: other tenants' checkpoints are read once they are published; "
            "expected none"
        )


async def _create_from(parts: Parts, tenant: TenantId, body: bodies.CreateFromBody) -> Response:
    """Make a run of a checkpoint's shape. Its id is what the client takes it to be."""
    _refuse_token(body.weights_access_token)
    run_id = _run_id(body.session_id, body.model_seq_id)
    if body.base_model is not None:
        base_named(parts, body.base_model)
    owner, source = await parts.store.call(Store.use_checkpoint, tenant, body.path)
    origin = await parts.store.call(Store.run, owner, source.run_id)
    if body.optimizer and source.kind is not CheckpointKind.WEIGHTS:
        raise InvalidRequest(
            f"optimizer: {body.path} holds no optimizer state; expected a `weights` checkpoint, or "
            "optimizer: false"
        )
    run = Run(
        run_id=run_id,
        session_id=body.session_id,
        seq=body.model_seq_id,
        base_model=body.base_model or parts.base.names[0],
        spec=origin.spec,
        metadata=read_metadata("user_metadata", body.user_metadata),
        optimizer=_optimizer(body.optimizer_config),
    )
    return await _create(parts, tenant, run, (owner, source), with_optimizer=body.optimizer)


async def _create(
    parts: Parts,
    tenant: TenantId,
    run: Run,
    source: tuple[TenantId, Checkpoint] | None,
    *,
    with_optimizer: bool,
) -> Response:
    """Accept a run.

    Raises:
        Conflict: as many runs are at work as may be. Not 429, which clients wait out in silence for
            ten minutes: no time passes that would end a run.
    """
    try:
        request_id = await parts.runs.create(
            tenant, run, source=source, with_optimizer=with_optimizer
        )
    except QuotaExceeded as error:
        raise Conflict(str(error)) from error
    return answer({"request_id": request_id, "model_id": run.run_id})


@router.post("/get_info", openapi_extra=says(bodies.ModelId))
async def get_info(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Say what a run trains."""
    body = await read(request, bodies.ModelId)
    run = await parts.store.call(Store.run, tenant, body.model_id)
    return answer(
        {
            "type": "get_info",
            "model_id": run.run_id,
            "model_data": {
                "arch": parts.base.architecture,
                "model_name": run.base_model,
                "tokenizer_id": parts.base.tokenizer_id,
            },
            "is_lora": True,
            "lora_rank": run.spec.rank,
            "model_name": run.base_model,
            "optimizer_config": {"type": "adamw"},
        }
    )


def base_named(parts: Parts, name: str) -> str:
    """Return a name of the base.

    Raises:
        InvalidRequest: this service has another base.
    """
    if name not in parts.base.names:
        raise InvalidRequest(
            f"base_model {name[:200]!r}: this service has {', '.join(parts.base.names)}; an "
            "operator adds names with --model-alias"
        )
    return name


def _run_id(session_id: str, seq: int) -> str:
    number("model_seq_id", seq, 0, MAX_SEQ)
    return f"{session_id}:train:{seq}"


def _spec(config: bodies.LoraConfig | None, run_id: str) -> AdapterSpec:
    if config is None:
        raise UnsupportedFeature("lora_config: is missing; this service trains LoRA adapters only")
    flags = {
        "head": config.train_unembed,
        "mlp": config.train_mlp,
        "attention": config.train_attn,
    }
    targets = tuple(name for name in ("attention", "mlp", "head") if flags[name])
    if not targets:
        raise InvalidRequest(
            "lora_config: nothing to train; expected train_attn, train_mlp or train_unembed"
        )
    # What names no seed still begins the same when the request is repeated.
    seed = derive_seed("run", run_id) if config.seed is None else config.seed
    return AdapterSpec(
        rank=number("lora_config.rank", config.rank, 1, max(RANK_BUCKETS)),
        alpha=ALPHA,
        targets=targets,
        seed=number("lora_config.seed", seed, -(1 << 63), (1 << 64) - 1) & ((1 << 63) - 1),
    )


def _optimizer(config: Mapping[str, object] | None) -> dict[str, object]:
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise UnsupportedFeature(f"optimizer_config.type: got {str(kind)[:40]!r}; expected adamw")
    return {"type": "adamw"}


# ---------------------------------------------------------------------------------------------
# Operations


@router.post(
    "/forward_backward",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def forward_backward(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Add the gradient of some data's loss, or only score them. The body is a
    `ForwardBackwardRequest` in protobuf, compressed by zstd or not."""
    limit = parts.settings.max_tinker_body_bytes
    bounds = passes.Bounds(parts.max_context, parts.base.vocab_size)
    announced = request.headers.get("content-length", "")
    num_bytes = int(announced) if announced.isascii() and announced.isdigit() else limit
    encoding = request.headers.get("content-encoding", "").strip().lower()
    incoming = BodyReader(request)
    first = await incoming.begin(passes.HEADER_BYTES)
    most = passes.unpacked_bytes(first, num_bytes, encoding, limit)
    async with parts.passes.of(tenant, most):
        asked = await asyncio.to_thread(_parse, await incoming.rest(), encoding, most)
        run_id, seq = asked.run_id, number("seq_id", asked.seq, 1, MAX_SEQ)
        async with parts.unfolded.of(tenant, asked.unfolded_bytes):
            try:
                body = await asyncio.to_thread(passes.read_pass, asked, bounds)
            except (InvalidRequest, TooLarge) as error:
                await parts.runs.reject(tenant, run_id, seq, str(error), kind=asked.kind)
                raise
            request_id = await parts.runs.submit(tenant, run_id, seq, body)
    return answer({"request_id": request_id, "model_id": run_id})


def _parse(raw: bytes, encoding: str, limit: int) -> passes.PassRequest:
    return passes.parse(passes.unpack(raw, encoding, limit))


@router.post("/optim_step", openapi_extra=says(bodies.OptimStepBody))
async def optim_step(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Apply the accumulated gradient."""
    raw = await read_body(request)
    return await _submit(parts, tenant, raw, OperationKind.OPTIM_STEP, bodies.OptimStepBody, _step)


def _step(body: bodies.OptimStepBody) -> Body:
    adam = body.adam_params
    if body.optimizer_params is not None:
        raise UnsupportedFeature(
            f"optimizer_params: got {str(body.optimizer_params.get('type'))[:40]!r}; this service "
            "has AdamW only, expected adam_params"
        )
    if adam is None:
        raise InvalidRequest("adam_params: is missing")
    if adam.type != "adamw":
        raise UnsupportedFeature(f"adam_params.type: got {adam.type[:40]!r}; expected adamw")
    problems = [
        f"adam_params.{name}: got {getattr(adam, name)}; expected {low:g} to {high:g}"
        for name, (low, high) in _ADAM_RANGES.items()
        if not low <= getattr(adam, name) <= high
    ]
    if problems:
        raise InvalidRequest(*problems)
    return OptimStep(
        adam=AdamParams(
            lr=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm,
        )
    )


@router.post("/save_weights", openapi_extra=says(bodies.SaveWeightsBody))
async def save_weights(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Keep adapter and optimizer state under a name."""
    raw = await read_body(request)
    return await _submit(
        parts, tenant, raw, OperationKind.SAVE_WEIGHTS, bodies.SaveWeightsBody, _save
    )


def _save(body: bodies.SaveWeightsBody) -> Body:
    return SaveWeights(
        name=_name(body.path),
        ttl_s=read_ttl(body.ttl_seconds),
        overwrite=body.overwrite,
        metadata=read_metadata("user_metadata", body.user_metadata),
    )


@router.post("/save_weights_for_sampler", openapi_extra=says(bodies.SaveForSamplerBody))
async def save_weights_for_sampler(
    tenant: WithTenant, parts: WithParts, request: Request
) -> Response:
    """Keep the adapter to sample from, under a name or as a sampler of the session."""
    raw = await read_body(request)
    return await _submit(
        parts,
        tenant,
        raw,
        OperationKind.SAVE_FOR_SAMPLER,
        bodies.SaveForSamplerBody,
        _save_for_sampler,
    )


def _save_for_sampler(body: bodies.SaveForSamplerBody) -> Body:
    if body.kind not in ("snapshot", "inflight"):
        raise InvalidRequest(f"kind: got {body.kind[:40]!r}; expected snapshot or inflight")
    seq = body.sampling_session_seq_id
    if (body.path is None) == (seq is None):
        raise InvalidRequest("expected either path or sampling_session_seq_id")
    return SaveForSampler(
        name=None if body.path is None else _name(body.path),
        sampler_seq=None if seq is None else number("sampling_session_seq_id", seq, 0, MAX_SEQ),
        ttl_s=read_ttl(body.ttl_seconds),
        metadata=read_metadata("user_metadata", body.user_metadata),
    )


@router.post("/save_weights_external", openapi_extra=says(bodies.SaveExternalBody))
async def save_weights_external(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Keep the adapter to be downloaded, as a folder that PEFT loads."""
    raw = await read_body(request)
    return await _submit(
        parts, tenant, raw, OperationKind.SAVE_EXTERNAL, bodies.SaveExternalBody, _save_external
    )


def _save_external(body: bodies.SaveExternalBody) -> Body:
    if body.age_encryption_recipients:
        raise UnsupportedFeature(
            "age_encryption_recipients: this service does not encrypt what it keeps; expected none"
        )
    return SaveExternal(name=_name(body.path), ttl_s=read_ttl(body.ttl_seconds))


def _name(path: str | None) -> str:
    if path is None:
        raise InvalidRequest("path: is missing; expected a name")
    if path.startswith(EPHEMERAL):
        raise InvalidRequest(f"path: {path[:40]!r} is no name; expected a letter or digit first")
    try:
        return check_checkpoint_name(path)
    except InvalidRequest as error:
        raise InvalidRequest(f"path: no name of a {error}") from None


def read_ttl(seconds: int | None) -> int | None:
    """Return a time to live.

    Raises:
        InvalidRequest: less than an hour, or more than ten years.
    """
    return None if seconds is None else number("ttl_seconds", seconds, MIN_TTL_S, MAX_TTL_S)


async def _submit(
    parts: Parts,
    tenant: TenantId,
    raw: bytes,
    kind: OperationKind,
    schema: type[B],
    read_operation: Callable[[B], Body],
) -> Response:
    """Hand an operation to its run; one that is refused uses up its number."""
    try:
        body = read_json(raw, schema)
        operation = read_operation(body)
    except InvalidRequest as error:
        place = _place_in(raw)
        if place is not None:
            await parts.runs.reject(tenant, *place, str(error), kind=kind)
        raise
    seq = number("seq_id", body.seq_id, 1, MAX_SEQ)
    request_id = await parts.runs.submit(tenant, body.model_id, seq, operation)
    return answer({"request_id": request_id, "model_id": body.model_id})


class _Place(Struct):
    """What a refused request says of its place in a run, whatever else is wrong with it."""

    model_id: str
    seq_id: int


def _place_in(raw: bytes) -> tuple[str, int] | None:
    try:
        place = read_json(raw, _Place)
    except InvalidRequest:
        return None
    return (place.model_id, place.seq_id) if 1 <= place.seq_id <= MAX_SEQ else None
