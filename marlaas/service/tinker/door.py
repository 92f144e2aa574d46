"""Who comes to `/api/v1`, and how they are answered.

- Everybody who comes is a tenant's client: an operator's key owns no session and no run, and is
  refused.
- `requests_a_second` paces what makes or changes something. Polls, samples, heartbeats and
  telemetry have bounds of their own: there are as many as there are samples.
- Conflicts go out as 400: these clients take 409 for something that passes, and repeat it for
  minutes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Request, Response, Security
from msgspec import Struct

from marlaas.errors import Forbidden
from marlaas.service.auth import KEY_HEADER, identify, refuse_unknown_parameters
from marlaas.service.limits import read_body
from marlaas.service.parts import WithParts
from marlaas.service.tinker.bodies import read_json
from marlaas.types import TenantId

B = TypeVar("B", bound=Struct)

PREFIX = "/api/v1"

_UNPACED = frozenset(
    f"{PREFIX}/{name}"
    for name in (
        "asample",
        "retrieve_future",
        "retrieve_futures",
        "cancel_future",
        "session_heartbeat",
        "telemetry",
    )
)

ANY_BODY: dict[str, Any] = {
    "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}
}
"""What the OpenAPI document says of a body that nobody reads."""

_ENCODER = msgspec.json.Encoder()


async def client(
    request: Request,
    parts: WithParts,
    header: Annotated[str | None, Security(KEY_HEADER)] = None,
) -> TenantId:
    """Return the tenant whose client it is; count the request.

    Raises:
        Unauthorized: no key, or none that is good.
        Forbidden: it is an operator's.
        QuotaExceeded: the tenant sends too much.
    """
    identity = await identify(request, parts, header or _bearer(request))
    if identity.tenant is None:
        raise Forbidden(
            "an operator's key owns no sessions and no runs; expected a tenant's key (X-API-Key)"
        )
    tenant = identity.tenant
    if request.scope["path"] not in _UNPACED:
        parts.rates.take(tenant.tenant_id, tenant.quotas.requests_a_second)
    return tenant.tenant_id


WithTenant = Annotated[TenantId, Depends(client)]


async def known_parameters_only(request: Request) -> None:
    """Refuse a query parameter that the route does not know: no filter is silently left out."""
    refuse_unknown_parameters(request)


def _bearer(request: Request) -> str:
    scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
    return secret if scheme.lower() == "bearer" else ""


def is_here(request: Request) -> bool:
    """Return whether a request came to this surface."""
    return request.scope["path"].startswith(f"{PREFIX}/")


async def read(request: Request, kind: type[B]) -> B:
    """Return the body of a request as a record.

    Raises:
        InvalidRequest: it is none.
    """
    return read_json(await read_body(request), kind)


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON. What is None in a mapping is left out."""
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if inner is not None}
    return Response(
        _ENCODER.encode(value),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def says(kind: type[Struct]) -> dict[str, Any]:
    """Return what the OpenAPI document says of a body."""
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inlined(schema, definitions)}},
        }
    }


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with every definition in the place that refers to it."""
    if isinstance(schema, list):
        return [_inlined(inner, definitions) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(inner, definitions) for name, inner in schema.items()}
