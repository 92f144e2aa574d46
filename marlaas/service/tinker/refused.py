"""What clients may ask for and this service has not: refused with what to do instead."""

from typing import Annotated

from fastapi import APIRouter, Path, Request

from marlaas.errors import UnsupportedFeature
from marlaas.service.limits import read_body
from marlaas.service.parts import WithParts
from marlaas.service.tinker.door import ANY_BODY, PREFIX, WithTenant
from marlaas.service.tinker.records import NO_PROJECTS
from marlaas.store.db import Store

router = APIRouter(prefix=PREFIX, tags=["tinker: not here"])

SessionName = Annotated[str, Path(max_length=200)]


@router.post("/create_custom_loss", openapi_extra=ANY_BODY)
async def create_custom_loss(tenant: WithTenant, request: Request) -> None:
    """Losses of a client's own are computed at the client."""
    await read_body(request)
    raise UnsupportedFeature(
        "custom losses do not run on this service; forward_backward_custom computes them at the "
        "client"
    )


@router.post("/auth/token", openapi_extra=ANY_BODY)
async def exchange_token(tenant: WithTenant) -> None:
    """Keys are not exchanged."""
    raise UnsupportedFeature("this service takes keys as they are (X-API-Key: tml-...)")


@router.get("/auth/apikey/me")
async def get_own_key(tenant: WithTenant) -> None:
    """Keys are shown elsewhere."""
    raise UnsupportedFeature("GET /v1/whoami says whose key this is")


@router.delete("/auth/apikey/me")
async def delete_own_key(tenant: WithTenant) -> None:
    """Keys are revoked by operators."""
    raise UnsupportedFeature("an operator revokes keys (marlaas keys revoke)")


@router.put("/sessions/{session_id}/project", openapi_extra=ANY_BODY)
async def set_project(
    tenant: WithTenant, parts: WithParts, request: Request, session_id: SessionName
) -> None:
    """There are no projects."""
    await read_body(request)
    await parts.store.call(Store.session, tenant, session_id)
    raise UnsupportedFeature(f"project_id: {NO_PROJECTS}")


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(tenant: WithTenant, parts: WithParts, session_id: SessionName) -> None:
    """Traces are the operator's."""
    await parts.store.call(Store.session, tenant, session_id)
    raise UnsupportedFeature("traces are an operator's: GET /v1/trace")


@router.get("/audit")
async def organization_audit_log(tenant: WithTenant) -> None:
    """The audit log is the operator's."""
    raise UnsupportedFeature("the audit log is an operator's: GET /v1/audit")


@router.get("/billing/usage/events")
async def billing_usage(tenant: WithTenant) -> None:
    """Nothing is billed."""
    raise UnsupportedFeature("nothing is billed here; GET /v1/usage says what was used")


@router.get("/billing/usage/checkpoints/current")
async def billing_checkpoints(tenant: WithTenant) -> None:
    """Nothing is billed."""
    raise UnsupportedFeature("nothing is billed here; GET /v1/usage says what is stored")
