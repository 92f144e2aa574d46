"""The service's HTTP side, put together: routes, one door, one table of errors.

    request ─► RequestLog ─► BodyLimit ─► route ─► key ─► well-formed body ─► handler ─► answer
                                                                    │ MarlaasError
                                                                    ▼
                                       status and stable code from `STATUS`, in one shape

- A route that is added to one of the routers below goes through the door; only health and the
  documents are open.
- The surface of `tinker` clients (`/api/v1/...`) has a door of its own, see `service/tinker/`.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from math import ceil

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from marlaas import __version__
from marlaas.config import ServeSettings
from marlaas.errors import (
    CapacityExceeded,
    Conflict,
    EnvironmentFailure,
    Expired,
    Forbidden,
    InvalidRequest,
    MarlaasError,
    NotFound,
    PolicyDiverged,
    QuotaExceeded,
    StoreUnavailable,
    TooLarge,
    Unauthorized,
    WorkerLost,
)
from marlaas.service import adapters, jobs, operating, records, runs, sampling, tenants, uploads
from marlaas.service.auth import authenticated
from marlaas.service.faults import no_route, other_methods, problems_of
from marlaas.service.limits import BodyLimit, well_formed
from marlaas.service.logs import RequestLog
from marlaas.service.parts import Parts
from marlaas.service.tinker import routes as tinker
from marlaas.service.tinker.door import is_here as is_from_tinker
from marlaas.service.wire.common import ErrorAnswer, Problem, Responses

CLIENT_LEFT = 499
"""In the log, as other servers have it; nobody gets it."""

STATUS: Mapping[type[MarlaasError], int] = {
    InvalidRequest: 422,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    Expired: 410,
    Conflict: 409,
    QuotaExceeded: 429,
    CapacityExceeded: 422,
    TooLarge: 413,
    EnvironmentFailure: 503,
    WorkerLost: 503,
    StoreUnavailable: 503,
    PolicyDiverged: 409,
    MarlaasError: 500,
}
"""What an error is over HTTP. An error that is not named has the status of its nearest ancestor."""

RETRY_AFTER_S = 5
"""What a caller is told to wait where something of ours went away for a while."""

_CODES: Mapping[int, str] = {
    404: NotFound.code,
    405: "method_not_allowed",
    413: TooLarge.code,
}
"""Codes of what the web framework refuses by itself; anything else is an invalid request."""

_WORDS: Mapping[int, str] = {
    401: "No key, or none that is good",
    403: "The key is for another role",
    404: "No such thing, or another tenant's",
    408: "Not yet: ask again",
    409: "It is in a state that forbids this",
    410: "There was one, and it is not kept",
    413: "Larger than the operator allows",
    422: "Cannot be honoured as written",
    429: "Over a limit of the tenant; see Retry-After",
    503: "Not now; see Retry-After",
}
_ERRORS: Responses = {
    status: {"model": ErrorAnswer, "description": words} for status, words in _WORDS.items()
}

_LARGE = frozenset({"/api/v1/forward_backward", "/api/v1/asample"})
"""Paths whose bodies hold tokens."""

DESCRIPTION = (
    "Many tenants improve one language model by reinforcement learning, each with an adapter of "
    "its own. `docs/api.md` has an example for every surface, `docs/jobs.md` what a job may say."
)


def make_app(parts: Parts) -> FastAPI:
    """Return the application over `parts`; nothing runs yet."""
    app = FastAPI(
        title="MARLaaS",
        version=__version__,
        description=DESCRIPTION,
        lifespan=_lifespan,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
        responses={422: _ERRORS[422], 503: _ERRORS[503]},
    )
    app.state.parts = parts
    app.include_router(operating.open_routes)
    door = [Depends(authenticated), Depends(well_formed)]
    for surface in (jobs, records, adapters, runs, sampling, tenants, operating):
        app.include_router(surface.router, dependencies=door, responses=_ERRORS)
    app.include_router(tenants.operators, dependencies=door, responses=_ERRORS)
    # Their bodies are files, which are judged by what they are.
    app.include_router(uploads.router, dependencies=[Depends(authenticated)], responses=_ERRORS)
    app.include_router(tinker.router, responses={**_ERRORS, 400: _ERRORS[409]})
    app.include_router(tinker.open_routes, responses=_ERRORS)
    app.add_exception_handler(MarlaasError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_refused)
    app.add_exception_handler(ClientDisconnect, _on_left)
    app.add_middleware(BodyLimit, limit_of=_limits(parts.settings))
    app.add_middleware(RequestLog, telemetry=parts.telemetry)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    parts: Parts = app.state.parts
    parts.hub.start()
    yield
    parts.hub.close()


def _operation_id(route: APIRoute) -> str:
    return route.name


def _limits(settings: ServeSettings) -> Callable[[str], int]:
    """Return how large a body may be, by path."""

    def limit_of(path: str) -> int:
        if path in _LARGE:
            return settings.max_tinker_body_bytes
        is_upload = path.startswith("/v1/prompts/")
        return settings.max_upload_bytes if is_upload else settings.max_body_bytes

    return limit_of


# ---------------------------------------------------------------------------------------------
# Errors


def status_of(error: MarlaasError) -> int:
    """Return the HTTP status of an error."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, MarlaasError)
    status = status_of(error)
    if status == 409 and is_from_tinker(request):
        status = 400  # these clients take 409 for something that passes
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, QuotaExceeded):
        headers["Retry-After"] = str(max(1, ceil(error.retry_after_s)))
    elif status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    problems = list(error.problems) if isinstance(error, InvalidRequest) else []
    return _answer(request, status, error.code, str(error), problems, headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """Word what the schemas refuse as our own readers do."""
    assert isinstance(error, RequestValidationError)
    problems = problems_of(request, error)
    return _answer(request, 422, InvalidRequest.code, "\n".join(problems), problems)


async def _on_refused(request: Request, error: Exception) -> JSONResponse:
    """Word what the web framework refuses; our own routes never raise this with a bare status."""
    assert isinstance(error, HTTPException)
    status, words = error.status_code, str(error.detail)
    if status == 400:
        status, words = 422, "body: cannot be read; expected JSON in UTF-8"
    elif status == 404:
        words = no_route(request)
    elif status == 405:
        words = other_methods(request)
    code = _CODES.get(error.status_code, InvalidRequest.code)
    return _answer(request, status, code, words, [], dict(error.headers or {}))


async def _on_left(request: Request, error: Exception) -> Response:
    """Note that a client left while its request was read: nobody's fault, and nobody to answer."""
    return Response(status_code=CLIENT_LEFT)


def _answer(
    request: Request,
    status: int,
    code: str,
    message: str,
    problems: list[str],
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    problem = Problem(
        code=code,
        message=message,
        problems=problems,
        request_id=getattr(request.state, "request_id", ""),
    )
    body = ErrorAnswer(error=problem).model_dump()
    return JSONResponse(body, status, headers=dict(headers or {}))
