"""Tenants, the keys that speak for them, and the operator's log of who did what.

- A key's secret is shown once, when it is made; what is kept is its sha256. That is enough for a
  secret of 256 random bits: there is nothing to guess, hence nothing to slow down.
- A tenant goes whole: rows, files, keys. The audit log stays.
"""

import base64
import hashlib
import hmac

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from marlaas import runtime
from marlaas.errors import Conflict, InvalidRequest, NotFound
from marlaas.store import schema
from marlaas.store.columns import clean_text, encode_json
from marlaas.store.events import OPERATOR_COUNTERS
from marlaas.store.files import check_segment
from marlaas.store.jobs import Jobs
from marlaas.store.schema import api_keys, audit, tenants
from marlaas.types import (
    OPERATOR,
    ApiKey,
    AuditEntry,
    JobState,
    Quotas,
    Role,
    Tenant,
    TenantId,
)

_SECRET_PREFIX = "tml-"
_SECRET_BYTES = 32
_KEY_ID_CHARS = 12

_OWNED = (
    schema.jobs,  # with it everything that hangs on a job
    schema.sessions,  # with it runs, operations, checkpoints, samplers
    schema.events,
    schema.usage,
    schema.upload_names,
    schema.uploads,
    schema.counters,
    schema.api_keys,
    schema.tenants,
)
"""Tables that a tenant's rows are deleted from, in this order."""

_BUSY_S = 60.0
"""A run that was used within it is at work: a client may be between two operations."""

_BUSY_RUN = (
    sa.select(schema.runs.c.run_id)
    .where(
        schema.runs.c.tenant_id == bindparam("tenant"),
        (schema.runs.c.used_s > bindparam("since"))
        | sa.exists().where(
            schema.operations.c.tenant_id == schema.runs.c.tenant_id,
            schema.operations.c.run_id == schema.runs.c.run_id,
            schema.operations.c.state == sa.literal_column("'accepted'"),
        ),
    )
    .limit(1)
)

_ADD = sa.insert(tenants)
_ONE = sa.select(tenants).where(tenants.c.tenant_id == bindparam("tenant"))
_ALL = sa.select(tenants).order_by(tenants.c.tenant_id)
_UPDATE = (
    sa.update(tenants)
    .where(tenants.c.tenant_id == bindparam("tenant"))
    .values(weight=bindparam("new_weight"), quotas=bindparam("new_quotas"))
)
_ADD_KEY = sa.insert(api_keys)
_KEY_OF = sa.select(api_keys).where(api_keys.c.digest == bindparam("of_digest"))
_KEYS = (
    sa.select(api_keys)
    .where(api_keys.c.tenant_id == bindparam("tenant"))
    .order_by(api_keys.c.created_s, api_keys.c.key_id)
)
_THIS_KEY = (api_keys.c.tenant_id == bindparam("tenant"), api_keys.c.key_id == bindparam("key"))
_REVOKE = (
    sa.update(api_keys)
    .where(*_THIS_KEY, api_keys.c.revoked_s.is_(None))
    .values(revoked_s=bindparam("now"))
)
_HAS_KEY = sa.select(api_keys.c.key_id).where(*_THIS_KEY)
_ADD_AUDIT = sa.insert(audit)
_AUDIT = (
    sa.select(audit)
    .where(audit.c.seq > bindparam("after"))
    .order_by(audit.c.seq)
    .limit(bindparam("limit"))
)


class Tenants(Jobs):
    """The part of `Store` that knows who may do what."""

    def add_tenant(self, tenant: Tenant) -> Tenant:
        """Take on a tenant; returned as stored, with the time.

        Raises:
            Conflict: there is one of that name.
            InvalidRequest: the name or the weight cannot be.
        """
        check_segment("tenant", tenant.tenant_id)
        if tenant.tenant_id == OPERATOR:
            raise InvalidRequest(f"{OPERATOR!r} is the name of operators: choose another one")
        row = {**_tenant_row(tenant), "created_s": runtime.wall_time_s()}
        with self._transaction() as db:
            if db.execute(_ONE, {"tenant": tenant.tenant_id}).first() is not None:
                raise Conflict(f"there is a tenant {tenant.tenant_id!r} already")
            db.execute(_ADD, row)
        return self.tenant(tenant.tenant_id)

    def tenant(self, tenant_id: TenantId) -> Tenant:
        """Return a tenant.

        Raises:
            NotFound: there is none of that name.
        """
        row = self._row(_ONE, {"tenant": tenant_id})
        if row is None:
            raise _no_tenant(tenant_id)
        return _tenant(row)

    def check_tenant(self, tenant_id: TenantId, *, created_s: float) -> None:
        """Check, in the same call as a write, that a tenant was not purged since it was looked up;
        another one that took its name since does not count.

        Raises:
            NotFound: it was.
        """
        if self.tenant(tenant_id).created_s != created_s:
            raise _no_tenant(tenant_id)

    def tenants(self) -> list[Tenant]:
        """Return every tenant, by name."""
        return [_tenant(row) for row in self._rows(_ALL, {})]

    def update_tenant(self, tenant: Tenant) -> Tenant:
        """Give a tenant another weight and other quotas.

        Raises:
            NotFound: there is none of that name.
            InvalidRequest: the weight cannot be.
        """
        row = _tenant_row(tenant)
        values = {
            "tenant": tenant.tenant_id,
            "new_weight": row["weight"],
            "new_quotas": row["quotas"],
        }
        with self._transaction() as db:
            if db.execute(_UPDATE, values).rowcount != 1:
                raise _no_tenant(tenant.tenant_id)
        return self.tenant(tenant.tenant_id)

    def purge_tenant(self, tenant_id: TenantId) -> None:
        """Delete everything of a tenant: jobs, sessions with what they made, history, usage,
        uploads, keys, files.

        Raises:
            NotFound: there is none of that name.
            Conflict: it has jobs that are queued or running, or runs that are at work.
        """
        self.tenant(tenant_id)
        active = (JobState.QUEUED.value, JobState.RUNNING.value)
        running = sa.select(schema.jobs.c.name).where(
            schema.jobs.c.tenant_id == tenant_id, schema.jobs.c.state.in_(active)
        )
        with self._transaction() as db:
            names = db.execute(running.limit(1)).scalars().all()
            if names:
                raise Conflict(f"job {names[0]!r} of {tenant_id!r} is active: cancel it first")
            values = {"tenant": tenant_id, "since": runtime.wall_time_s() - _BUSY_S}
            run_id = db.execute(_BUSY_RUN, values).scalar()
            if run_id is not None:
                raise Conflict(
                    f"run {run_id!r} of {tenant_id!r} is at work: revoke the tenant's keys, and "
                    f"try again once it was quiet for {_BUSY_S:g} s"
                )
            for table in _OWNED:
                db.execute(sa.delete(table).where(table.c.tenant_id == tenant_id))
        self.files.delete_tenant(tenant_id)

    # Keys ---------------------------------------------------------------------------------

    def add_key(self, tenant_id: TenantId, *, role: Role, label: str = "") -> tuple[ApiKey, str]:
        """Make a key; return what is kept of it, and its secret, which nobody can show again.

        Raises:
            NotFound: there is no such tenant.
            InvalidRequest: an operator's key belongs to `OPERATOR`, and only that.
        """
        role = Role(role)
        if (role is Role.OPERATOR) != (tenant_id == OPERATOR):
            raise InvalidRequest(f"a key of {tenant_id!r} cannot have the role {role.value!r}")
        if tenant_id != OPERATOR:
            self.tenant(tenant_id)
        random = base64.urlsafe_b64encode(runtime.unguessable_bytes(_SECRET_BYTES))
        secret = _SECRET_PREFIX + random.decode().rstrip("=")
        digest = _digest_of(secret)
        row = {
            "tenant_id": tenant_id,
            "key_id": digest[:_KEY_ID_CHARS],
            "role": role.value,
            "label": clean_text(label),
            "digest": digest,
            "created_s": runtime.wall_time_s(),
        }
        with self._transaction() as db:
            db.execute(_ADD_KEY, row)
        return _key(self._row(_KEY_OF, {"of_digest": digest})), secret

    def find_key(self, secret: str) -> ApiKey | None:
        """Return the key that a secret opens; None if there is none, or it was revoked.

        The work does not depend on the secret: one hash, one look into an index of hashes.
        """
        digest = _digest_of(secret)
        row = self._row(_KEY_OF, {"of_digest": digest})
        if row is None or not hmac.compare_digest(row.digest, digest) or row.revoked_s is not None:
            return None
        return _key(row)

    def keys(self, tenant_id: TenantId) -> list[ApiKey]:
        """Return a tenant's keys, oldest first, revoked ones too."""
        return [_key(row) for row in self._rows(_KEYS, {"tenant": tenant_id})]

    def revoke_key(self, tenant_id: TenantId, key_id: str) -> None:
        """Make a key useless; again changes nothing.

        Raises:
            NotFound: this tenant has no such key.
        """
        key = {"tenant": tenant_id, "key": key_id}
        with self._transaction() as db:
            if db.execute(_HAS_KEY, key).first() is None:
                raise NotFound(f"no key {key_id!r}")
            db.execute(_REVOKE, {**key, "now": runtime.wall_time_s()})

    # Audit --------------------------------------------------------------------------------

    def audit(self, actor: str, action: str, tenant_id: TenantId, detail: object) -> None:
        """Append to the operator's log: who did what to whom. `detail` is a JSON value."""
        with self._transaction() as db:
            row = {
                "seq": self._next_number(db, OPERATOR_COUNTERS, "audit"),
                "at_s": runtime.wall_time_s(),
                "actor": clean_text(actor),
                "action": clean_text(action),
                "tenant_id": clean_text(tenant_id),
                "detail": encode_json(detail),
            }
            db.execute(_ADD_AUDIT, row)

    def audit_log(self, *, after: int = 0, limit: int = 1000) -> list[AuditEntry]:
        """Return entries behind number `after`, oldest first."""
        return [
            AuditEntry(
                seq=row.seq,
                at_s=row.at_s,
                actor=row.actor,
                action=row.action,
                tenant_id=TenantId(row.tenant_id),
                detail=msgspec.json.decode(row.detail),
            )
            for row in self._rows(_AUDIT, {"after": after, "limit": limit})
        ]


def _no_tenant(tenant_id: TenantId) -> NotFound:
    return NotFound(f"no tenant {tenant_id!r}")


def _digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _tenant_row(tenant: Tenant) -> dict[str, object]:
    if not 0 < tenant.weight < float("inf"):
        raise InvalidRequest(f"weight {tenant.weight}: use a positive number")
    return {
        "tenant_id": tenant.tenant_id,
        "weight": tenant.weight,
        "quotas": encode_json(tenant.quotas),
    }


def _tenant(row: sa.Row) -> Tenant:
    return Tenant(
        tenant_id=TenantId(row.tenant_id),
        weight=row.weight,
        quotas=msgspec.json.decode(row.quotas, type=Quotas),
        created_s=row.created_s,
    )


def _key(row: sa.Row) -> ApiKey:
    return ApiKey(
        key_id=row.key_id,
        tenant_id=TenantId(row.tenant_id),
        role=Role(row.role),
        label=row.label,
        created_s=row.created_s,
        revoked_s=row.revoked_s,
    )
