"""Who is calling, and for whom: the one door that every route but health and docs goes through.

    key ──► authenticated ──► caller         a tenant's own rows, or any tenant's for an operator
                          └─► operator       what only an operator may do

- A key that is missing, unknown or revoked gets 401; a tenant's key on an operator's route 403.
- A tenant names no other tenant: `?tenant=` other than its own is 404, as is one that does not
  exist. An operator says with `?tenant=` for whom it acts.
- Who a key belongs to is remembered for a second, and forgotten at once when keys or tenants
  change here: what another process changes in the store acts within that time, and a request costs
  no visit to it.
- A query parameter that the route does not know is refused: a filter is never silently left out.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from marlaas.errors import Forbidden, InvalidRequest, NotFound, Unauthorized
from marlaas.service.identities import Identity
from marlaas.service.parts import Parts, WithParts
from marlaas.service.places import named
from marlaas.store.db import Store
from marlaas.types import Role, Tenant, TenantId

KEY_HEADER = APIKeyHeader(
    name="X-API-Key", scheme_name="ApiKey", auto_error=False, description="`tml-...`"
)
_BEARER = HTTPBearer(scheme_name="Bearer", auto_error=False, description="The same key.")

MAX_KEY_CHARS = 200
"""Nothing longer is a key; it is not even hashed."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling, and the tenant on whose rows the route works."""

    identity: Identity
    tenant: Tenant

    @property
    def tenant_id(self) -> TenantId:
        return self.tenant.tenant_id


async def authenticated(
    request: Request,
    parts: WithParts,
    header: Annotated[str | None, Security(KEY_HEADER)] = None,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)] = None,
) -> Identity:
    """Return whose key came with the request; count the request.

    Raises:
        Unauthorized: no key, or none that is good.
        QuotaExceeded: the tenant sends too much.
    """
    secret = header or (bearer.credentials if bearer else "")
    identity = await identify(request, parts, secret)
    if identity.tenant is not None:
        parts.rates.take(identity.tenant.tenant_id, identity.tenant.quotas.requests_a_second)
    refuse_unknown_parameters(request)
    return identity


async def identify(request: Request, parts: Parts, secret: str) -> Identity:
    """Return whose key it is, and note it with the request.

    Raises:
        Unauthorized: no key, or none that is good.
    """
    if not secret:
        raise Unauthorized("no key: send it as `X-API-Key: tml-...` or `Authorization: Bearer`")
    identity = None
    if len(secret) <= MAX_KEY_CHARS and secret.isascii():
        identity = await _remembered(parts, secret)
    if identity is None:
        raise Unauthorized("this key is not known, or was revoked")
    request.state.tenant = identity.key.tenant_id
    request.state.key_id = identity.key.key_id
    return identity


async def _remembered(parts: Parts, secret: str) -> Identity | None:
    digest = hashlib.sha256(secret.encode()).digest()
    known = parts.identities.get(digest)
    if known is None:
        generation = parts.identities.generation
        known = await parts.store.call(_find_identity, secret)
        if known is not None:
            parts.identities.put(digest, known, generation)
    return known


WithIdentity = Annotated[Identity, Depends(authenticated)]


def _find_identity(store: Store, secret: str) -> Identity | None:
    """Return the key and its tenant in one visit to the store."""
    key = store.find_key(secret)
    if key is None:
        return None
    if key.role is Role.OPERATOR:
        return Identity(key, None)
    try:
        return Identity(key, store.tenant(key.tenant_id))
    except NotFound:
        return None


async def caller(
    request: Request,
    parts: WithParts,
    identity: WithIdentity,
    tenant: Annotated[
        str | None, Query(description="For an operator: the tenant to act for.", max_length=200)
    ] = None,
) -> Caller:
    """Return the tenant that the request is about.

    Raises:
        NotFound: no such tenant, or it is not the caller's to name.
        InvalidRequest: an operator did not say for whom.
    """
    if identity.tenant is not None:
        if tenant not in (None, identity.tenant.tenant_id):
            raise NotFound(f"no tenant {tenant!r}")
        return Caller(identity, identity.tenant)
    if tenant is None:
        raise InvalidRequest("tenant: an operator's key acts for a tenant; expected ?tenant=NAME")
    acting_for = await parts.store.call(Store.tenant, TenantId(named("tenant", tenant)))
    request.state.tenant = acting_for.tenant_id
    if request.method != "GET":
        action = f"{request.method} {request.url.path}"
        await parts.store.call(Store.audit, identity.actor, action, acting_for.tenant_id, {})
    return Caller(identity, acting_for)


WithCaller = Annotated[Caller, Depends(caller)]


async def operator(identity: WithIdentity) -> Identity:
    """Return the operator who is calling.

    Raises:
        Forbidden: it is a tenant's key.
    """
    if identity.key.role is not Role.OPERATOR:
        raise Forbidden("this is for an operator's key")
    return identity


WithOperator = Annotated[Identity, Depends(operator)]


def refuse_unknown_parameters(request: Request) -> None:
    if not request.query_params:
        return
    known = known_parameters(request.scope.get("route"))
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        expected = f"expected {', '.join(known)}" if known else "expected none"
        raise InvalidRequest(*(f"{name}: unknown query parameter; {expected}" for name in unknown))


def known_parameters(route: object) -> tuple[str, ...]:
    """Return the query parameters that a route takes, itself or by what it depends on."""
    return tuple(sorted(_parameters(route.dependant))) if isinstance(route, APIRoute) else ()


def _parameters(dependant: Dependant) -> set[str]:
    own = {param.alias for param in dependant.query_params}
    return own.union(*(_parameters(inner) for inner in dependant.dependencies))
