"""What a tenant's clients have made: runs and their checkpoints, looked at, published, deleted.

Another tenant's is found by the path of a published checkpoint, and by nothing else.
"""

import hmac
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from marlaas import runtime
from marlaas.errors import InvalidRequest, NotFound, UnsupportedFeature
from marlaas.service.parts import Parts, WithParts
from marlaas.service.tinker import bodies
from marlaas.service.tinker.bodies import check_text, number
from marlaas.service.tinker.door import PREFIX, WithTenant, answer, read, says
from marlaas.service.tinker.sessions import AccessScope, Limit, Offset
from marlaas.service.tinker.training import MAX_SEQ, read_ttl
from marlaas.store.db import Store
from marlaas.types import Checkpoint, CheckpointKind, Run, Session, TenantId

router = APIRouter(prefix=PREFIX, tags=["tinker: records"])

_TYPES = {
    CheckpointKind.WEIGHTS: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}

_CHECKPOINTS_READ = 100
"""Newest checkpoints of a run among which its last ones are looked for."""

RunName = Annotated[str, Path(max_length=200)]
CheckpointName = Annotated[str, Path(max_length=200)]


def _kind(kind: Annotated[str, Path(max_length=40)]) -> CheckpointKind:
    try:
        return CheckpointKind(kind)
    except ValueError:
        raise NotFound(f"no kind of checkpoint {kind!r}") from None


KindName = Annotated[CheckpointKind, Depends(_kind)]
ProjectId = Annotated[str | None, Query(max_length=200)]

NO_PROJECTS = "this service has no projects, a tenant is one; expected none"
"""Where a client says one at the beginning, it is kept as a label."""


# ---------------------------------------------------------------------------------------------
# Runs


@router.get("/training_runs")
async def list_training_runs(
    tenant: WithTenant,
    parts: WithParts,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = None,
    project_id: ProjectId = None,
) -> Response:
    """List the tenant's runs, newest first."""
    if project_id is not None:
        raise UnsupportedFeature(f"project_id: {NO_PROJECTS}")
    return answer(await parts.store.call(_runs, tenant, limit, offset))


def _runs(store: Store, tenant: TenantId, limit: int, offset: int) -> dict[str, object]:
    runs, total = store.runs(tenant, limit=limit, offset=offset)
    return {
        "training_runs": [_run(store, tenant, run) for run in runs],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@router.get("/training_runs/{run_id}")
async def get_training_run(
    tenant: WithTenant, parts: WithParts, run_id: RunName, access_scope: AccessScope = None
) -> Response:
    """Show a run."""
    return answer(await parts.store.call(_one_run, tenant, run_id))


def _one_run(store: Store, tenant: TenantId, run_id: str) -> dict[str, object]:
    return _run(store, tenant, store.run(tenant, run_id))


def _run(store: Store, tenant: TenantId, run: Run) -> dict[str, object]:
    newest, _ = store.checkpoints(tenant, run.run_id, limit=_CHECKPOINTS_READ)
    shown = {
        "training_run_id": run.run_id,
        "base_model": run.base_model,
        "model_owner": tenant,
        "is_lora": True,
        "corrupted": run.is_corrupted,
        "lora_rank": run.spec.rank,
        "last_request_time": iso_time(run.used_s),
        "user_metadata": dict(run.metadata),
    }
    for name, kind in (
        ("last_checkpoint", CheckpointKind.WEIGHTS),
        ("last_sampler_checkpoint", CheckpointKind.SAMPLER),
    ):
        found = next((one for one in newest if one.kind is kind), None)
        if found is not None:
            shown[name] = _checkpoint(found)
    return shown


# ---------------------------------------------------------------------------------------------
# Checkpoints


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(tenant: WithTenant, parts: WithParts, run_id: RunName) -> Response:
    """List every checkpoint of a run, newest first."""
    return answer({"checkpoints": await parts.store.call(_all_of, tenant, run_id)})


def _all_of(store: Store, tenant: TenantId, run_id: str) -> list[dict[str, object]]:
    store.run(tenant, run_id)
    found, total = store.checkpoints(tenant, run_id, limit=1000)
    while len(found) < total:
        more, total = store.checkpoints(tenant, run_id, limit=1000, offset=len(found))
        if not more:
            break
        found += more
    return _checkpoints(found)


@router.get("/checkpoints")
async def list_checkpoints(
    tenant: WithTenant, parts: WithParts, limit: Limit = 100, offset: Offset = 0
) -> Response:
    """List the tenant's checkpoints, newest first."""
    found, total = await parts.store.call(Store.checkpoints, tenant, limit=limit, offset=offset)
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return answer({"checkpoints": _checkpoints(found), "cursor": cursor})


_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.delete(_ONE)
async def delete_checkpoint(
    tenant: WithTenant, parts: WithParts, run_id: RunName, kind: KindName, name: CheckpointName
) -> Response:
    """Delete a checkpoint."""
    await parts.store.call(Store.delete_checkpoint, tenant, run_id, kind, name)
    return answer({})


@router.post(f"{_ONE}/publish")
async def publish_checkpoint(
    tenant: WithTenant, parts: WithParts, run_id: RunName, kind: KindName, name: CheckpointName
) -> Response:
    """Let every tenant of this service load and sample a checkpoint."""
    await parts.store.call(Store.publish_checkpoint, tenant, run_id, kind, name, is_public=True)
    return answer({})


@router.delete(f"{_ONE}/publish")
async def unpublish_checkpoint(
    tenant: WithTenant, parts: WithParts, run_id: RunName, kind: KindName, name: CheckpointName
) -> Response:
    """Keep a checkpoint from other tenants again."""
    await parts.store.call(Store.publish_checkpoint, tenant, run_id, kind, name, is_public=False)
    return answer({})


@router.put(f"{_ONE}/ttl", openapi_extra=says(bodies.TtlBody))
async def set_checkpoint_ttl(
    tenant: WithTenant,
    parts: WithParts,
    request: Request,
    run_id: RunName,
    kind: KindName,
    name: CheckpointName,
) -> Response:
    """Delete a checkpoint so many seconds from now, or (null) never."""
    ttl_s = read_ttl((await read(request, bodies.TtlBody)).ttl_seconds)
    expires_s = None if ttl_s is None else runtime.wall_time_s() + ttl_s
    await parts.store.call(
        Store.set_checkpoint_ttl, tenant, run_id, kind, name, expires_s=expires_s
    )
    return answer({})


@router.post("/weights_info", openapi_extra=says(bodies.TinkerPath))
async def weights_info(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Say what a checkpoint, the tenant's or a published one, is an adapter of."""
    body = await read(request, bodies.TinkerPath)
    return answer(await parts.store.call(_weights_info, tenant, body.tinker_path))


def _weights_info(store: Store, tenant: TenantId, path: str) -> dict[str, object]:
    owner, checkpoint = store.find_checkpoint(tenant, path)
    run = store.run(owner, checkpoint.run_id)
    return {
        "base_model": run.base_model,
        "is_lora": True,
        "lora_rank": run.spec.rank,
        "train_unembed": "head" in run.spec.targets,
        "train_mlp": "mlp" in run.spec.targets,
        "train_attn": "attention" in run.spec.targets,
        "optimizer_config": {"type": "adamw"},
    }


@router.post("/copy_weights", openapi_extra=says(bodies.CopyWeights))
async def copy_weights(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Copy a checkpoint, the tenant's or a published one, into a run of its own."""
    body = await read(request, bodies.CopyWeights)
    if body.weights_access_token or request.headers.get("x-tinker-weights-access-token"):
        raise UnsupportedFeature(
            "weights_access_token: other tenants' checkpoints are copied once they are published; "
            "expected none"
        )
    ttl_s = read_ttl(body.ttl_seconds)
    if body.destination_project_id is not None:
        session = _session_of_copy(parts, tenant, request, body.destination_project_id)
        await parts.store.call(Store.add_session, tenant, session)
        session_id, seq = session.session_id, 0
    elif body.session_id is not None:
        session_id, seq = body.session_id, number("model_seq_id", body.model_seq_id, 0, MAX_SEQ)
    else:
        raise InvalidRequest("expected destination_project_id, or session_id and model_seq_id")
    copy = await parts.store.call(
        _copy,
        tenant,
        body.source_path,
        session_id,
        seq,
        None if ttl_s is None else runtime.wall_time_s() + ttl_s,
    )
    return answer({"tinker_path": copy.path})


def _session_of_copy(parts: Parts, tenant: TenantId, request: Request, project_id: str) -> Session:
    """Return the session that holds a copy. A client that repeats the request gets the same one:
    it repeats the key, too."""
    key = request.headers.get("x-idempotency-key", "") or runtime.unguessable_bytes(16).hex()
    words = f"copy\0{tenant}\0{key}".encode()
    name = hmac.digest(parts.download_key, words, "sha256")[:8].hex()
    now_s = runtime.wall_time_s()
    return Session(
        session_id=f"s-{name}", project_id=check_text("destination_project_id", project_id),
        created_s=now_s, display_name="copy",
    )  # fmt: skip


def _copy(
    store: Store,
    tenant: TenantId,
    path: str,
    session_id: str,
    seq: int,
    expires_s: float | None,
) -> Checkpoint:
    owner, source = store.find_checkpoint(tenant, path)
    origin = store.run(owner, source.run_id)
    run = Run(
        run_id=f"{session_id}:train:{seq}",
        session_id=session_id,
        seq=seq,
        base_model=origin.base_model,
        spec=origin.spec,
        optimizer=origin.optimizer,
    )
    store.add_run(tenant, run)
    return store.copy_checkpoint(tenant, path, run.run_id, expires_s=expires_s)


def _checkpoints(found: Iterable[Checkpoint]) -> list[dict[str, object]]:
    return [_checkpoint(one) for one in found]


def _checkpoint(checkpoint: Checkpoint) -> dict[str, object]:
    shown: dict[str, object] = {
        "checkpoint_id": f"{checkpoint.kind.value}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": iso_time(checkpoint.created_s),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.is_public,
        "user_metadata": dict(checkpoint.metadata),
    }
    if checkpoint.expires_s is not None:
        shown["expires_at"] = iso_time(checkpoint.expires_s)
    return shown


def iso_time(since_epoch_s: float) -> str:
    """Return a time as clients read it."""
    return datetime.fromtimestamp(since_epoch_s, UTC).isoformat()
