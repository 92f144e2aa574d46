"""Who may use the service, and how much: tenants, their keys, quotas and usage; operators' keys and
the audit log. All but `whoami` and `usage` is for operators, and what changes something is audited
in the same breath."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query

from marlaas import runtime
from marlaas.errors import Conflict
from marlaas.service.auth import WithCaller, WithIdentity, WithOperator
from marlaas.service.identities import Identity
from marlaas.service.parts import Parts, WithParts
from marlaas.service.places import After, PageSize, named
from marlaas.service.wire.tenants import (
    AuditEntry,
    AuditPage,
    KeyBody,
    KeyInfo,
    KeyList,
    NewKey,
    QuotasInfo,
    TenantBody,
    TenantChange,
    TenantInfo,
    TenantList,
    UsageInfo,
    UsageReport,
    WhoAmI,
)
from marlaas.store.db import Store
from marlaas.store.usage import day_of
from marlaas.types import OPERATOR, Quotas, Role, Tenant, TenantId, Usage

router = APIRouter(tags=["tenants"])
operators = APIRouter(tags=["operating"])

NO_LIMITS = Quotas(
    max_running_jobs=None,
    max_queued_jobs=None,
    max_runs=None,
    tokens_a_day=None,
    stored_bytes=None,
    sandbox_cpu_s_a_day=None,
    requests_a_second=None,
)
"""What an operator's key is held to."""


# ---------------------------------------------------------------------------------------------
# For tenants


@router.get("/v1/whoami")
async def who_am_i(identity: WithIdentity, parts: WithParts) -> WhoAmI:
    """Say whose key this is, what it may do, and what was used today."""
    key, tenant = identity.key, identity.tenant
    today = Usage()
    if tenant is not None:
        today = await parts.store.call(_today, tenant.tenant_id)
    return WhoAmI(
        tenant=key.tenant_id,
        role=key.role,
        key_id=key.key_id,
        weight=tenant.weight if tenant else 1.0,
        quotas=QuotasInfo.of(tenant.quotas if tenant else NO_LIMITS),
        usage_today=UsageInfo.of(today),
    )


@router.get("/v1/usage")
async def usage(
    caller: WithCaller,
    parts: WithParts,
    days: Annotated[int, Query(ge=1, le=3660, description="How far back `by_day` goes.")] = 30,
) -> UsageReport:
    """Say what the tenant has used, by job and by UTC day, and what it stores."""
    return await parts.store.call(_report, caller.tenant_id, days)


def _today(store: Store, tenant_id: TenantId) -> Usage:
    return store.usage(tenant_id, since_day=day_of(runtime.wall_time_s()))


def _report(store: Store, tenant_id: TenantId, days: int) -> UsageReport:
    by_job = store.usage_by_job(tenant_id)
    by_day = store.usage_by_day(tenant_id, days=days)
    return UsageReport(
        total=UsageInfo.of(store.usage(tenant_id)),
        today=UsageInfo.of(_today(store, tenant_id)),
        by_job={job: UsageInfo.of(used) for job, used in by_job.items()},
        by_day={day: UsageInfo.of(used) for day, used in by_day.items()},
        stored_bytes=store.stored_bytes(tenant_id),
        live_runs=store.num_live_runs(tenant_id),
    )


# ---------------------------------------------------------------------------------------------
# Tenants, for operators


def _tenant(tenant: Annotated[str, Path(description="Name of a tenant.")]) -> TenantId:
    return TenantId(named("tenant", tenant))


TenantName = Annotated[TenantId, Depends(_tenant)]


def _key_id(key_id: Annotated[str, Path(description="Id of a key, not the key.")]) -> str:
    return named("key", key_id)


KeyId = Annotated[str, Depends(_key_id)]


@operators.post("/v1/tenants", status_code=201)
async def add_tenant(operator: WithOperator, parts: WithParts, body: TenantBody) -> TenantInfo:
    """Add a tenant. It can do nothing until it has a key."""
    asked = Tenant(
        tenant_id=TenantId(body.tenant),
        weight=body.weight,
        quotas=body.quotas.over(Quotas()),
        created_s=runtime.wall_time_s(),
    )
    tenant = await parts.store.call(Store.add_tenant, asked)
    shown = TenantInfo.of(tenant)
    await _audit(parts, operator, "add tenant", tenant.tenant_id, shown.model_dump())
    await _tell_loop(parts)
    return shown


@operators.get("/v1/tenants")
async def list_tenants(operator: WithOperator, parts: WithParts) -> TenantList:
    """List all tenants."""
    tenants = await parts.store.call(Store.tenants)
    return TenantList(tenants=[TenantInfo.of(tenant) for tenant in tenants])


@operators.get("/v1/tenants/{tenant}")
async def get_tenant(operator: WithOperator, parts: WithParts, tenant: TenantName) -> TenantInfo:
    """Show a tenant, its share and its limits."""
    return TenantInfo.of(await parts.store.call(Store.tenant, tenant))


@operators.patch("/v1/tenants/{tenant}")
async def change_tenant(
    operator: WithOperator, parts: WithParts, tenant: TenantName, body: TenantChange
) -> TenantInfo:
    """Change the share or the limits of a tenant; at once, for what runs too."""
    shown = TenantInfo.of(await parts.store.call(_change, tenant, body))
    await _audit(parts, operator, "change tenant", tenant, body.model_dump(exclude_unset=True))
    await _tell_loop(parts)
    return shown


def _change(store: Store, tenant_id: TenantId, body: TenantChange) -> Tenant:
    before = store.tenant(tenant_id)
    return store.update_tenant(
        Tenant(
            tenant_id=tenant_id,
            weight=before.weight if body.weight is None else body.weight,
            quotas=body.quotas.over(before.quotas),
            created_s=before.created_s,
        )
    )


@operators.delete("/v1/tenants/{tenant}", status_code=204)
async def delete_tenant(operator: WithOperator, parts: WithParts, tenant: TenantName) -> None:
    """Remove a tenant with every row, file and key. None of its jobs may be queued or running."""
    await parts.controller.purge_tenant(tenant)
    await parts.runs.drop_tenant(tenant)
    parts.hub.end(tenant_id=tenant)
    parts.rates.forget(tenant)
    parts.identities.forget()
    await _audit(parts, operator, "delete tenant", tenant, {})
    await _tell_loop(parts)


@operators.post("/v1/tenants/{tenant}/keys", status_code=201)
async def add_key(
    operator: WithOperator, parts: WithParts, tenant: TenantName, body: KeyBody
) -> NewKey:
    """Make a key for a tenant. The answer is the only place where it is ever shown."""
    await parts.store.call(Store.tenant, tenant)
    return await _add_key(parts, operator, tenant, Role.TENANT, body.label)


@operators.get("/v1/tenants/{tenant}/keys")
async def list_keys(operator: WithOperator, parts: WithParts, tenant: TenantName) -> KeyList:
    """List a tenant's keys, revoked ones too; never the keys themselves."""
    await parts.store.call(Store.tenant, tenant)
    return await _list_keys(parts, tenant)


@operators.delete("/v1/tenants/{tenant}/keys/{key_id}", status_code=204)
async def revoke_key(
    operator: WithOperator, parts: WithParts, tenant: TenantName, key_id: KeyId
) -> None:
    """Revoke a key. It opens nothing from now on, and the streams it opened end."""
    await _revoke(parts, operator, tenant, key_id)


# ---------------------------------------------------------------------------------------------
# Operators


@operators.post("/v1/operator/keys", status_code=201)
async def add_operator_key(operator: WithOperator, parts: WithParts, body: KeyBody) -> NewKey:
    """Make another operator's key, which may do everything that this one may."""
    return await _add_key(parts, operator, OPERATOR, Role.OPERATOR, body.label)


@operators.get("/v1/operator/keys")
async def list_operator_keys(operator: WithOperator, parts: WithParts) -> KeyList:
    """List the operators' keys."""
    return await _list_keys(parts, OPERATOR)


@operators.delete("/v1/operator/keys/{key_id}", status_code=204)
async def revoke_operator_key(operator: WithOperator, parts: WithParts, key_id: KeyId) -> None:
    """Revoke an operator's key, but not the one that asks: somebody must be left who can."""
    if key_id == operator.key.key_id:
        raise Conflict("this key cannot revoke itself; expected another operator's key to do it")
    await _revoke(parts, operator, OPERATOR, key_id)


@operators.get("/v1/audit")
async def audit_log(
    operator: WithOperator, parts: WithParts, after: After = 0, limit: PageSize = 100
) -> AuditPage:
    """List what operators did, oldest first."""
    rows = await parts.store.call(Store.audit_log, after=after, limit=limit)
    return AuditPage(
        entries=[
            AuditEntry(
                seq=row.seq,
                at_s=row.at_s,
                actor=row.actor,
                action=row.action,
                tenant=row.tenant_id,
                detail=row.detail,
            )
            for row in rows
        ],
        next=rows[-1].seq if rows else after,
    )


async def _add_key(
    parts: Parts, operator: Identity, tenant_id: TenantId, role: Role, label: str
) -> NewKey:
    key, secret = await parts.store.call(Store.add_key, tenant_id, role=role, label=label)
    detail = {"key_id": key.key_id, "label": label}
    await _audit(parts, operator, "add key", tenant_id, detail)
    return NewKey.made(key, secret)


async def _list_keys(parts: Parts, tenant_id: TenantId) -> KeyList:
    keys = await parts.store.call(Store.keys, tenant_id)
    return KeyList(keys=[KeyInfo.of(key) for key in keys])


async def _revoke(parts: Parts, operator: Identity, tenant_id: TenantId, key_id: str) -> None:
    await parts.store.call(Store.revoke_key, tenant_id, key_id)
    parts.identities.forget()
    parts.hub.end(key_id=key_id)
    await _audit(parts, operator, "revoke key", tenant_id, {"key_id": key_id})


async def _audit(
    parts: Parts, operator: Identity, action: str, tenant_id: TenantId, detail: object
) -> None:
    await parts.store.call(Store.audit, operator.actor, action, tenant_id, detail)


async def _tell_loop(parts: Parts) -> None:
    """New shares and limits apply to what runs, and to what comes next."""
    parts.identities.forget()
    parts.controller.tenants_changed(await parts.store.call(Store.tenants))
