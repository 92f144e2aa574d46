"""What keeps one caller from taking the service away from the others: sizes, rates, turns.

- A body is refused by its announced length before a byte of it is read, and by its real length
  while it arrives: nothing larger than its limit is ever held.
- JSON is checked for what later stages cannot hold (depth, huge integers, NaN, lone surrogates), so
  that it is refused as the caller's fault and not found as ours.
- A tenant's requests are paced by a token bucket; other tenants do not feel it.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marlaas import runtime
from marlaas.errors import InvalidRequest, QuotaExceeded

BURST_S = 2.0
"""Seconds' worth of requests that a tenant who was quiet may send at once."""

FULL_RETRY_S = 30.0
"""When a place may be free again."""

MAX_WAIT_S = 3600.0
"""The longest that anybody is told to wait for a token."""

MAX_DEPTH = 16
"""Nesting of a JSON body: no knob of a job nests deeper than four."""

HTTP_TOO_LARGE = 413


# ---------------------------------------------------------------------------------------------
# Sizes


class BodyLimit:
    """Middleware: no body larger than `limit_of(path)` gets through."""

    def __init__(self, app: ASGIApp, limit_of: Callable[[str], int]) -> None:
        self._app = app
        self._limit_of = limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_of(scope["path"])
        announced = _announced_bytes(scope)
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            # Refused at the first read: what the route decides without the body, such as a missing
            # key, is answered as that.
            if announced is not None and announced > limit:
                raise _too_large(limit)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, limited, send)


def _announced_bytes(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def _too_large(limit: int) -> HTTPException:
    # The web framework lets this kind through where it reads bodies; the app words it as ours.
    return HTTPException(HTTP_TOO_LARGE, f"the body is larger than {limit} bytes")


async def read_body(request: Request) -> bytes:
    """Return the body of a request, which `BodyLimit` bounds."""
    pieces = [piece async for piece in request.stream()]
    return b"".join(pieces)


class BodyReader:
    """The body of a request in two steps, so that its beginning can say what the rest will take.

    body = BodyReader(request)
    first = await body.begin(18)
    whole = await body.rest()
    """

    def __init__(self, request: Request) -> None:
        self._stream = request.stream()
        self._pieces: list[bytes] = []

    async def begin(self, num_bytes: int) -> bytes:
        """Return the first bytes, at least so many if there are."""
        while sum(map(len, self._pieces)) < num_bytes:
            piece = await anext(self._stream, None)
            if piece is None:
                break
            self._pieces.append(piece)
        return b"".join(self._pieces)

    async def rest(self) -> bytes:
        """Return the whole body."""
        async for piece in self._stream:
            self._pieces.append(piece)
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole


# ---------------------------------------------------------------------------------------------
# JSON


async def well_formed(request: Request) -> None:
    """Refuse a JSON body that could be parsed and cannot be kept.

    Raises:
        InvalidRequest: says where it is.
    """
    if request.method in ("POST", "PATCH") and await request.body():
        check_json(await request.json())


def check_json(value: object, path: str = "body") -> None:
    """Refuse numbers and strings that a database or another language would not take back.

    Raises:
        InvalidRequest: says where it is.
    """
    fault = _json_fault(value, 0)
    if fault is not None:
        raise InvalidRequest(f"{path}{fault[0]}: {fault[1]}")


def _json_fault(value: object, depth: int) -> tuple[str, str] | None:
    """Return where the first fault is and what would be right. Bodies of a million numbers come by
    here, so a place is only worded once there is a fault."""
    if depth > MAX_DEPTH:
        return "", f"nested deeper than {MAX_DEPTH}"
    if isinstance(value, str):
        return ("", _UNICODE) if has_bad_text(value) else None
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**63 else ("", "expected a whole number of 64 bits")
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", "expected a finite number")
    if isinstance(value, list):
        for index, inner in enumerate(value):
            if fault := _json_fault(inner, depth + 1):
                return f"[{index}]{fault[0]}", fault[1]
    if isinstance(value, dict):
        for key, inner in value.items():
            if has_bad_text(key):
                return "", f"a key: {_UNICODE}"
            if fault := _json_fault(inner, depth + 1):
                return f".{key}{fault[0]}", fault[1]
    return None


_UNICODE = "expected Unicode text without NUL"


def has_bad_text(text: str) -> bool:
    """Return whether text is not Unicode, or holds what no database keeps in text."""
    if "\x00" in text:
        return True
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# ---------------------------------------------------------------------------------------------
# Rates and turns


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class Rates:
    """A token bucket per tenant: full after a quiet time, one token a request."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def take(self, tenant: str, requests_a_second: float | None) -> None:
        """Count one request.

        Raises:
            QuotaExceeded: it is one too many for now; says when there is a token again.
        """
        if requests_a_second is None:
            return
        if requests_a_second <= 0:
            raise QuotaExceeded("this tenant may send no requests", MAX_WAIT_S)
        now_s = runtime.now_s()
        size = max(1.0, requests_a_second * BURST_S)
        bucket = self._buckets.setdefault(tenant, _Bucket(size, now_s))
        gained = (now_s - bucket.at_s) * requests_a_second
        bucket.tokens, bucket.at_s = min(size, bucket.tokens + gained), now_s
        if bucket.tokens < 1:
            wait_s = min((1 - bucket.tokens) / requests_a_second, MAX_WAIT_S)
            raise QuotaExceeded(f"over {requests_a_second:g} requests a second", wait_s)
        bucket.tokens -= 1

    def forget(self, tenant: str) -> None:
        """A tenant is gone."""
        self._buckets.pop(tenant, None)


class Turns:
    """One at a time for each name; names that nobody waits for take no memory."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Wait for this name's turn and hold it."""
        lock, num_users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, num_users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks.pop(name)
            if num_users > 1:
                self._locks[name] = (lock, num_users - 1)


class Room:
    """So many bytes of each name at once; whoever has no room waits. What is larger than all the
    room there is goes alone."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._taken: Counter[str] = Counter()
        self._left = asyncio.Condition()

    @asynccontextmanager
    async def of(self, name: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait until there is room for so many bytes, and hold it."""
        num_bytes = min(num_bytes, self._most_bytes)
        async with self._left:
            await self._left.wait_for(lambda: self._taken[name] + num_bytes <= self._most_bytes)
            self._taken[name] += num_bytes
        try:
            yield
        finally:
            self._taken[name] -= num_bytes
            self._taken += Counter()  # forgets whom nothing is left of
            async with self._left:
                self._left.notify_all()


class Places:
    """As many at a time as there are places, and of one tenant as many as it may have."""

    def __init__(self, what: str, *, most: int, most_of_one: int) -> None:
        self._what = what
        self._most, self._most_of_one = most, most_of_one
        self._taken: Counter[str] = Counter()

    @contextmanager
    def of(self, tenant: str) -> Iterator[None]:
        """Take a place and hold it.

        Raises:
            QuotaExceeded: none is free.
        """
        if self._taken[tenant] >= self._most_of_one:
            raise QuotaExceeded(
                f"{self._most_of_one} {self._what} of this tenant are under way, as many as it may "
                "have",
                FULL_RETRY_S,
            )
        if self._taken.total() >= self._most:
            raise QuotaExceeded(
                f"{self._most} {self._what} are under way, as many as there may be", FULL_RETRY_S
            )
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # forgets whom nothing is left of
