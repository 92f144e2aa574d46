"""Samplers: of the base or of a checkpoint. A request is accepted at once; what comes of it is
asked for as a future."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from marlaas.errors import InvalidRequest, UnsupportedFeature
from marlaas.service.parts import Parts, WithParts
from marlaas.service.tinker import bodies
from marlaas.service.tinker.bodies import SampleBody, number
from marlaas.service.tinker.door import PREFIX, WithTenant, answer, read, says
from marlaas.service.tinker.samples import read_sample
from marlaas.service.tinker.training import MAX_SEQ, base_named
from marlaas.store.db import Store

router = APIRouter(prefix=PREFIX, tags=["tinker: sampling"])

MAX_SAMPLE_SEQ = (1 << 63) - 1
"""Clones of a sampler begin at multiples of a billion."""


@router.post("/create_sampling_session", openapi_extra=says(bodies.CreateSamplingSession))
async def create_sampling_session(
    tenant: WithTenant, parts: WithParts, request: Request
) -> Response:
    """Make a sampler, of a checkpoint if one is named, else of the base."""
    body = await read(request, bodies.CreateSamplingSession)
    if body.base_model is None and body.model_path is None:
        raise InvalidRequest("expected base_model or model_path")
    name = _base_name(parts, body.base_model)
    sampler_id = await parts.samplers.create(
        tenant,
        body.session_id,
        number("sampling_session_seq_id", body.sampling_session_seq_id, 0, MAX_SEQ),
        name,
        body.model_path,
    )
    return answer({"type": "create_sampling_session", "sampling_session_id": sampler_id})


def _base_name(parts: Parts, name: str | None) -> str:
    return parts.base.names[0] if name is None else base_named(parts, name)


@router.post("/join_sampling_session", openapi_extra=says(bodies.SamplerId))
async def join_sampling_session(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Give another client of a sampler a number of its own."""
    body = await read(request, bodies.SamplerId)
    count = await parts.samplers.join(tenant, body.sampling_session_id)
    return answer({"type": "join_sampling_session", "client_counter": count})


@router.get("/samplers/{sampler_id}")
async def get_sampler(
    tenant: WithTenant,
    parts: WithParts,
    sampler_id: Annotated[str, Path(max_length=200)],
) -> Response:
    """Say what a sampler samples from."""
    sampler = await parts.store.call(Store.sampler, tenant, sampler_id)
    return answer(
        {
            "sampler_id": sampler.sampler_id,
            "base_model": sampler.base_model,
            "model_path": sampler.checkpoint_path,
        }
    )


@router.post("/asample", openapi_extra=says(SampleBody))
async def asample(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Sample. Too many samples under way are answered with 429, which makes clients pause."""
    body = await read(request, SampleBody)
    if body.sampling_session_id is None or body.seq_id is None:
        raise UnsupportedFeature(
            "sampling_session_id and seq_id: one is missing; base_model and model_path name what "
            "to sample from in create_sampling_session"
        )
    seq = number("seq_id", body.seq_id, 0, MAX_SAMPLE_SEQ)
    request_id, sequence_ids = await parts.samplers.submit(
        tenant, body.sampling_session_id, seq, read_sample(body, parts.base.vocab_size)
    )
    return answer({"request_id": request_id, "sample_sequence_ids": sequence_ids})
