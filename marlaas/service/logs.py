"""Structured logs, and the middleware that writes one line per request.

    {"at": "2026-12-01T09:59:22.410Z", "level": "info", "logger": "marlaas.service.logs",
     "message": "request", "request": "1f3a-2c", "method": "GET", "route": "/v1/jobs/{job}",
     "status": 200, "duration_s": 0.0031, "tenant": "acme", "job": "sums"}

- A line says who asked for what and how it ended; never a key, a prompt, a body or a query.
- An exception nobody expected is logged as its type and where it was raised, without its message,
  which may quote what a tenant sent.
"""

import contextvars
import datetime
import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from itertools import count
from typing import Any, TextIO

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marlaas import runtime
from marlaas.service.telemetry import Telemetry

_LOG = logging.getLogger(__name__)

_REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
"""What every record has; whatever else it has was given as `extra`."""

_NOT_SHOWN = _STANDARD | {"color_message"}
"""uvicorn says its lines a second time, with colours."""

_QUIET = ("alembic", "asyncio")
"""Loggers of others that say nothing of use below a warning."""

_SECRET = re.compile(r"tml-[A-Za-z0-9_-]{8,}|(?<=://)[^/\s@]+(?=@)")
"""Keys, and the password in an address: masked wherever they turn up."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Any word may be sent as a method; only these become a label."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := _REQUEST.get():
            line["request"] = request
        extra = {name: value for name, value in vars(record).items() if name not in _NOT_SHOWN}
        if record.exc_info and record.exc_info[1] is not None:
            extra |= where_raised(record.exc_info[1])
        return mask(json.dumps({**line, **extra}, default=str, ensure_ascii=False))


def mask(text: str) -> str:
    """Return text without keys and passwords."""
    return _SECRET.sub("***", text)


def where_raised(error: BaseException) -> Mapping[str, object]:
    """Return the type of an exception and its stack, without what it says."""
    frames = traceback.extract_tb(error.__traceback__)
    stack = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "stack": stack[-12:]}


def set_up(level: str, stream: TextIO = sys.stderr) -> None:
    """Send all logs of this process to a stream, one JSON object a line."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # One line a request is written here; the server's own would repeat it, with the query.
    logging.getLogger("uvicorn.access").disabled = True
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


class RequestLog:
    """Middleware: names each request, counts it, logs it, and answers for what nobody expected."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry
        self._numbers = count(1)
        self._start = f"{int(runtime.wall_time_s()):x}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = runtime.now_s()
        request_id = self._name(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        token = _REQUEST.set(request_id)
        status, is_stream = 0, False

        async def noted(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", request_id.encode())],
                }
                is_stream = any(
                    name == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            # The boundary of one request: the others go on, and its caller is told.
            _LOG.error("unexpected exception", extra=where_raised(error))
            if status == 0:
                await _internal_error(request_id)(scope, receive, noted)
        finally:
            self._note(scope, state, status, began_s, is_stream=is_stream)
            _REQUEST.reset(token)

    def _name(self, scope: Scope) -> str:
        """Return the caller's name for the request if it is one, else one of our own."""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin1")):
                return value.decode("latin1")
        return f"{self._start}-{next(self._numbers):x}"

    def _note(
        self,
        scope: Scope,
        state: MutableMapping[str, Any],
        status: int,
        began_s: float,
        *,
        is_stream: bool,
    ) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        tenant = state.get("tenant", "")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._telemetry.request_done(
            route=route,
            method=method,
            status=status,
            tenant=tenant,
            began_s=began_s,
            is_stream=is_stream,
        )
        job = scope.get("path_params", {}).get("job", "")
        _LOG.info(
            "request",
            extra={
                "method": method,
                "route": route,
                "status": status,
                "duration_s": round(runtime.now_s() - began_s, 6),
                "tenant": tenant,
                "job": job,
                "key_id": state.get("key_id", ""),
            },
        )


def _internal_error(request_id: str) -> JSONResponse:
    message = "a fault of the service; its log has more under this request id"
    problem = {"code": "internal", "message": message, "problems": [], "request_id": request_id}
    return JSONResponse({"error": problem}, 500)
