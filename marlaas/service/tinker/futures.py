"""What comes of requests: asked for one by one in long polls, or a sampler's all together.

    result ─► 200 JSON, or protobuf for passes and samples
    error ──► 200 `{"error", "category"}`                      the client raises
    none ───► 408 `{"type": "try_again", "queue_state"}` after `POLL_S`, and the client asks again
    gone ───► 410 for a sample: the client submits it anew

- A poll is held open until there is something to say: a client that is answered asks again at once.
- A result may be read again, so nothing is lost with a connection.
- Before the service ends, polls are answered and their connections closed.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from marlaas.errors import UnsupportedFeature
from marlaas.loop.operations import (
    Created,
    Loaded,
    PassResult,
    Result,
    Saved,
    Value,
    Waiting,
)
from marlaas.loop.samplers import SampleFailure, SampleResult, is_sample
from marlaas.service.parts import Parts, WithParts
from marlaas.service.tinker import bodies
from marlaas.service.tinker.bodies import number
from marlaas.service.tinker.door import PREFIX, WithTenant, answer, read, says
from marlaas.service.tinker.passes import encode_outputs
from marlaas.service.tinker.samples import encode_samples
from marlaas.types import StepResult, StopReason, TenantId

T = TypeVar("T")

router = APIRouter(prefix=PREFIX, tags=["tinker: futures"])

POLL_S = 25.0
"""How long a poll is held: clients give up after 45 s, proxies often after 30 s."""

PROTOBUF = "application/x-protobuf"

LARGE = 1 << 16
"""Numbers of a result that a thread encodes."""

MAX_CURSOR = 1 << 62
MAX_ACKNOWLEDGED = 10_000


@router.post(
    "/retrieve_future",
    openapi_extra=says(bodies.RetrieveFuture),
    responses={
        200: {"content": {"application/json": {"schema": {}}, PROTOBUF: {}}},
        408: {"description": "Not yet: ask again", "content": {"application/json": {}}},
        410: {"description": "Not kept any more"},
    },
)
async def retrieve_future(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Say what came of a request, once something did."""
    body = await read(request, bodies.RetrieveFuture)
    outcome = await _until_drained(parts, _outcome(parts, tenant, body.request_id))
    if outcome is None or isinstance(outcome, Waiting):
        return _try_again(body.request_id, outcome)
    if isinstance(outcome, SampleResult):
        return await _samples(outcome)
    if isinstance(outcome, SampleFailure):
        return answer({"error": outcome.error, "category": str(outcome.category)})
    if outcome.value is None:
        return answer({"error": outcome.error, "category": outcome.category})
    return await _value(outcome, outcome.value)


async def _outcome(
    parts: Parts, tenant: TenantId, request_id: str
) -> Result | SampleResult | SampleFailure | Waiting:
    source = parts.samplers if is_sample(request_id) else parts.runs
    return await source.wait(tenant, request_id, POLL_S)


async def _until_drained(parts: Parts, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what a wait gives, or None once the service is about to end."""
    waiting = asyncio.ensure_future(work)
    draining = asyncio.ensure_future(parts.draining.wait())
    try:
        await asyncio.wait({waiting, draining}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        draining.cancel()


def _try_again(request_id: str, waiting: Waiting | None) -> Response:
    again = waiting or Waiting()
    return answer(
        {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": str(again.queue_state),
            "queue_state_reason": again.reason or None,
        },
        408,
        {"Connection": "close"} if waiting is None else None,
    )


async def _samples(result: SampleResult) -> Response:
    completions = result.completions
    if any(one.stop_reason is StopReason.NON_FINITE for one in completions):
        error = "the weights that were sampled from give logits that are not finite"
        return answer({"error": error, "category": "user"})
    scored = sum(one.topk_prompt_ids.size for one in completions if one.topk_prompt_ids is not None)
    if sum(len(one.tokens) for one in completions) + scored > LARGE:
        data = await asyncio.to_thread(encode_samples, completions, result.form)
    else:
        data = encode_samples(completions, result.form)
    return Response(data, media_type=PROTOBUF)


async def _value(result: Result, value: Value) -> Response:
    if isinstance(value, PassResult):
        if sum(one.logprobs.size for one in value.outputs) > LARGE:
            data = await asyncio.to_thread(encode_outputs, value.outputs, value.metrics)
        else:
            data = encode_outputs(value.outputs, value.metrics)
        return Response(data, media_type=PROTOBUF)
    return answer(_json(result, value))


def _json(result: Result, value: Value) -> dict[str, object]:
    """Return a result as JSON. It never has a field `error`: clients take that for a failure."""
    if isinstance(value, Created):  # asked for by create_model, or by load_weights
        return {"model_id": value.run_id}
    if isinstance(value, StepResult):
        metrics = {"grad_norm": value.grad_norm, "version": float(value.version)}
        return {"metrics": metrics}
    if isinstance(value, Loaded):
        return {"type": "load_weights", "path": value.path}
    assert isinstance(value, Saved)
    return {
        "type": str(result.kind),
        "path": value.path,
        "sampling_session_id": value.sampler_id,
        "size_bytes": value.size_bytes,
    }


# ---------------------------------------------------------------------------------------------
# Many at once


@router.post("/retrieve_futures", openapi_extra=says(bodies.RetrieveFutures))
async def retrieve_futures(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Say which requests of a sampler's client came to their end since it asked last."""
    body = await read(request, bodies.RetrieveFutures)
    target = body.target
    if target.type != "sampling_session":
        raise UnsupportedFeature(f"target.type: {target.type[:40]!r}; expected sampling_session")
    cursor = number("prev_cursor", body.prev_cursor, 0, MAX_CURSOR)
    clone = number("target.cloned_sampler_id", target.cloned_sampler_id, 0, MAX_CURSOR)
    timeout_s = POLL_S
    if body.timeout is not None and body.timeout < POLL_S:
        timeout_s = max(body.timeout, 0.0)
    number("retrieved_request_ids", len(body.retrieved_request_ids), 0, MAX_ACKNOWLEDGED)
    parts.samplers.acknowledge(tenant, body.retrieved_request_ids)
    ended = await _until_drained(
        parts,
        parts.samplers.completions_since(
            tenant, target.sampling_session_id, clone, cursor, timeout_s
        ),
    )
    entries, cursor = ended or ([], cursor)
    return answer(
        {
            "completions": [
                {"state": "failed", "request_id": one.request_id}
                if one.is_failed
                else {
                    "state": "finished",
                    "request_id": one.request_id,
                    "response_payload_uncompressed_size": one.num_bytes,
                }
                for one in entries
            ],
            "cursor": cursor,
        }
    )


@router.post("/cancel_future", openapi_extra=says(bodies.RequestId))
async def cancel_future(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Give up a sample that nobody waits for any more."""
    body = await read(request, bodies.RequestId)
    if not is_sample(body.request_id):
        # Whose operation it is, is said first.
        await parts.runs.wait(tenant, body.request_id, 0.0)
        raise UnsupportedFeature(
            "an operation of a run is executed once it was accepted; expected a sample's id"
        )
    await parts.samplers.cancel(tenant, body.request_id)
    return answer({})
