"""What only an operator's key opens: tenants, their keys and limits, the machine, the audit log."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from marlaas.client.records import AuditEntry, KeyInfo, NewKey, TenantInfo, read
from marlaas.client.transport import Transport


class Tenants:
    """The tenants of a service, and their keys."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, tenant: str, *, weight: float = 1.0, **quotas: float | None) -> TenantInfo:
        """Add a tenant. Quotas have the names of `types.Quotas`; None is no limit.

        Raises:
            Conflict: there is one of that name.
        """
        body = {"tenant": tenant, "weight": weight, "quotas": quotas}
        return read(TenantInfo, self._transport.call("POST", "/v1/tenants", body=body))

    def get(self, tenant: str) -> TenantInfo:
        return read(TenantInfo, self._transport.call("GET", _path(tenant)))

    def change(
        self, tenant: str, *, weight: float | None = None, **quotas: float | None
    ) -> TenantInfo:
        """Change what is named, and nothing else; a quota of None lifts that limit."""
        body: dict[str, Any] = {"quotas": quotas}
        if weight is not None:
            body["weight"] = weight
        answer = self._transport.call("PATCH", _path(tenant), body=body, is_repeatable=True)
        return read(TenantInfo, answer)

    def purge(self, tenant: str) -> None:
        """Remove a tenant with every row and file. Its jobs must have ended, or be paused."""
        self._transport.call("DELETE", _path(tenant))

    # Keys; without a tenant they are the operators' --------------------------------------------

    def keys(self, tenant: str | None) -> list[KeyInfo]:
        answer = self._transport.call("GET", _keys_path(tenant))
        return [read(KeyInfo, row) for row in answer["keys"]]

    def add_key(self, tenant: str | None, *, label: str = "") -> NewKey:
        """Make a key; its secret is in the answer and is never shown again.

        An operator's key may do everything that this one may.
        """
        answer = self._transport.call("POST", _keys_path(tenant), body={"label": label})
        return read(NewKey, answer)

    def revoke_key(self, tenant: str | None, key_id: str) -> None:
        """Make a key worthless, at once."""
        self._transport.call("DELETE", f"{_keys_path(tenant)}/{quote(key_id, safe='')}")

    def audit(self, *, after: int = 0) -> Iterator[AuditEntry]:
        """Yield what operators did, oldest first."""
        while True:
            page = self._transport.call("GET", "/v1/audit", params={"after": after})
            yield from (read(AuditEntry, entry) for entry in page["entries"])
            if not page["entries"]:
                return
            after = page["next"]

    def list(self) -> list[TenantInfo]:
        answer = self._transport.call("GET", "/v1/tenants")
        return [read(TenantInfo, row) for row in answer["tenants"]]


def _path(tenant: str) -> str:
    return f"/v1/tenants/{quote(tenant, safe='')}"


def _keys_path(tenant: str | None) -> str:
    return "/v1/operator/keys" if tenant is None else f"{_path(tenant)}/keys"
