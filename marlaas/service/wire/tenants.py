"""Schemas of usage, quotas, tenants, keys and the audit log."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from marlaas.service.wire.common import Answer, Body
from marlaas.types import (
    ApiKey,
    Quotas,
    Role,
    Tenant,
    Usage,
)


class UsageInfo(Answer):
    """What was used, by stage."""

    sampled_tokens: int
    trained_tokens: int
    evaluated_tokens: int
    served_tokens: int
    prefill_tokens: int
    device_s: float
    sandbox_cpu_s: float

    @classmethod
    def of(cls, usage: Usage) -> "UsageInfo":
        return cls(**{name: getattr(usage, name) for name in Usage.__slots__})


class UsageReport(Answer):
    """A tenant's usage in all, by job and by UTC day."""

    total: UsageInfo
    today: UsageInfo
    by_job: dict[str, UsageInfo]
    """Job "" is what no job used: completions and the runs of Tinker clients."""
    by_day: dict[str, UsageInfo]
    stored_bytes: int
    live_runs: int
    """Runs of Tinker clients, as `max_runs` counts them."""


class QuotasInfo(Answer):
    """Limits of a tenant: null is no limit, 0 allows none."""

    max_running_jobs: int | None
    max_queued_jobs: int | None
    max_runs: int | None
    tokens_a_day: int | None
    stored_bytes: int | None
    sandbox_cpu_s_a_day: float | None
    requests_a_second: float | None

    @classmethod
    def of(cls, quotas: Quotas) -> "QuotasInfo":
        return cls(**{name: getattr(quotas, name) for name in Quotas.__slots__})


Limit = Annotated[int, Field(ge=0, le=2**53)]
LimitNumber = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


MIN_RATE = 1e-3


def _check_rate(rate: float) -> float:
    if 0 < rate < MIN_RATE:
        raise ValueError(f"expected 0 (none), or at least {MIN_RATE:g}")
    return rate


class QuotasBody(Body):
    """Limits to set; a field that is left out keeps its value."""

    max_running_jobs: Limit | None = None
    max_queued_jobs: Limit | None = None
    max_runs: Limit | None = None
    tokens_a_day: Limit | None = None
    stored_bytes: Limit | None = None
    sandbox_cpu_s_a_day: LimitNumber | None = None
    requests_a_second: Annotated[LimitNumber, AfterValidator(_check_rate)] | None = None

    def over(self, quotas: Quotas) -> Quotas:
        """Return `quotas` with what the body names replaced; null lifts a limit."""
        kept = {name: getattr(quotas, name) for name in Quotas.__slots__}
        return Quotas(**{**kept, **{name: getattr(self, name) for name in self.model_fields_set}})


class TenantBody(Body):
    """A tenant to add."""

    tenant: str
    weight: Weight = 1.0
    quotas: QuotasBody = QuotasBody()


class TenantChange(Body):
    """What to change about a tenant; a field that is left out keeps its value."""

    weight: Weight | None = None
    quotas: QuotasBody = QuotasBody()


class TenantInfo(Answer):
    """A tenant, its share and its limits."""

    tenant: str
    weight: float
    quotas: QuotasInfo
    created_s: float

    @classmethod
    def of(cls, tenant: Tenant) -> "TenantInfo":
        return cls(
            tenant=tenant.tenant_id,
            weight=tenant.weight,
            quotas=QuotasInfo.of(tenant.quotas),
            created_s=tenant.created_s,
        )


class TenantList(Answer):
    tenants: list[TenantInfo]


class WhoAmI(Answer):
    """Whose key this is, and what it may still do today."""

    tenant: str
    role: Role
    key_id: str
    weight: float
    quotas: QuotasInfo
    usage_today: UsageInfo


class KeyBody(Body):
    """A key to make."""

    label: str = Field(default="", max_length=200)


class KeyInfo(Answer):
    """What is kept of a key."""

    key_id: str
    tenant: str
    role: Role
    label: str
    created_s: float
    revoked_s: float | None

    @classmethod
    def of(cls, key: ApiKey) -> "KeyInfo":
        return cls(**_of_key(key))


class NewKey(KeyInfo):
    """A key that was just made; `secret` is shown this once."""

    secret: str

    @classmethod
    def made(cls, key: ApiKey, secret: str) -> "NewKey":
        return cls(**_of_key(key), secret=secret)


def _of_key(key: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "tenant": key.tenant_id,
        "role": key.role,
        "label": key.label,
        "created_s": key.created_s,
        "revoked_s": key.revoked_s,
    }


class KeyList(Answer):
    keys: list[KeyInfo]


class AuditEntry(Answer):
    """One thing that an operator did."""

    seq: int
    at_s: float
    actor: str
    action: str
    tenant: str
    detail: Any


class AuditPage(Answer):
    entries: list[AuditEntry]
    next: int
    """Hand it to `after` for what comes later."""
