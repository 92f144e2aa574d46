"""Requests to a service that survive what can be survived, and nothing else.

    call ──► answer ──► JSON
      │
      ├── refused for now (429, 503)         any request is repeated: the service did nothing
      ├── not reached (no connection made)   any request is repeated: it never arrived
      ├── lost (no whole answer)             repeated only where doing it twice is doing it once
      └── anything else                      raised, as the error that the service named

- Waits double, with jitter, so that the clients of a service that comes back do not all knock at
  once; the service's own `Retry-After` counts when it is longer.
- A stream of events goes on behind the last event that was read: none is missed, none comes twice.
- A download lands beside its place and is renamed once it is whole.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from marlaas import __version__, errors, runtime
from marlaas.errors import (
    EnvironmentFailure,
    InvalidRequest,
    MarlaasError,
    QuotaExceeded,
    Unreachable,
)

T = TypeVar("T")
Params = Mapping[str, object]

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 60.0
"""A service that says nothing for so long has lost the request; streams send a sign of life more
often than that."""
DOWNLOAD_TIMEOUT_S = 600.0
"""Merging an adapter into its base comes before the first byte."""
KEEPALIVE_S = 2.0
"""Idle connections are given up before a server gives them up: a request that crosses the server's
hanging up would be lost, and not every request may be repeated."""
MAX_RETRY_AFTER_S = 30.0
"""A service that asks for more than this (a full queue, a quota) is not waited for: the caller is
told how long it would take."""
REPEATABLE_METHODS = frozenset({"GET", "PUT", "DELETE"})
"""Methods that do the same twice as once, so an answer that was lost may be asked for again."""
REFUSED_FOR_NOW = (429, 503)
LOST_ON_THE_WAY = (502, 504)
"""A proxy answers with these when it lost the service: the request may have been done."""
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often and how long a request is repeated."""

    attempts: int = 6
    first_wait_s: float = 0.25
    max_wait_s: float = 8.0
    stream_s: float = 600.0
    """How long a stream tries to get back to a service that it has lost."""

    def wait_s(self, attempt: int, chance: float) -> float:
        """Return the pause after a failed attempt, 0 the first; `chance` lies in [0, 1)."""
        full = min(self.max_wait_s, self.first_wait_s * 2**attempt)
        return full * (0.5 + 0.5 * chance)


class _Failed(Exception):
    """One attempt failed in a way that may pass."""

    def __init__(
        self, error: MarlaasError, *, retry_after_s: float = 0.0, is_lost: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s
        self.is_lost = is_lost
        """Whether the service may have done what it was asked."""


class Transport:
    """One service, seen by one key: constructed -> call* -> closed. Safe for several threads."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        tenant: str | None = None,
        patience: Patience | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.url = url
        self._tenant = tenant
        """On whose things an operator acts; goes along with every request."""
        self._patience = patience or Patience()
        self._sleep = sleep
        self._chance = runtime.rng("client", os.getpid(), str(runtime.wall_time_s()))
        self._http = httpx.Client(
            base_url=url,
            headers={"X-API-Key": api_key, "User-Agent": f"marlaas/{__version__}"},
            timeout=_timeout(ANSWER_TIMEOUT_S),
            # Every stream holds a connection, so their number has no bound here.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
        )

    def acting_for(self, tenant: str | None) -> "Transport":
        """Return a transport of the same connections that acts on the things of `tenant`."""
        other = copy(self)
        other._tenant = tenant
        return other

    def close(self) -> None:
        self._http.close()

    def _params(self, params: Params | None) -> dict[str, Any]:
        """Return the parameters that have a value, and on whose things to act."""
        wanted = {"tenant": self._tenant, **(params or {})}
        return {name: value for name, value in wanted.items() if value is not None}

    # Requests ---------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Any:
        """Return the JSON of the service's answer; None if it has none.

        `body` is sent as JSON; bytes and files are sent as they are. `is_repeatable` says whether
        doing the request twice is doing it once; without it the method decides.

        Raises:
            MarlaasError: what the service answered, or `Unreachable`.
        """
        may_repeat = method in REPEATABLE_METHODS if is_repeatable is None else is_repeatable
        is_raw = isinstance(body, bytes | Path)

        def attempt(was_lost: bool) -> Any:
            with (
                _sending(self.url, may_repeat=may_repeat),
                _opened(body) as data,
                self._http.stream(
                    method,
                    path,
                    params=self._params(params),
                    json=None if is_raw else body,
                    content=data,
                    headers={**_size_of(body), **(headers or {})},
                    timeout=_timeout(timeout_s),
                ) as answer,
            ):
                if was_lost and method == "DELETE" and answer.status_code == httpx.codes.NOT_FOUND:
                    return None  # an earlier attempt deleted it; only its answer was lost
                _refuse_errors(answer, may_repeat=may_repeat)
                return _json_of(answer)

        return self._repeat(attempt)

    def download(self, path: str, target: Path, *, params: Params | None = None) -> Path:
        """Write the body of the answer to `target`, which holds all of it or does not change.

        Raises:
            MarlaasError: what the service answered, or `Unreachable`.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".marlaas-", dir=target.parent) as folder:
            part = Path(folder) / target.name

            def attempt(_: bool) -> None:
                with (
                    _sending(self.url, may_repeat=True),
                    self._http.stream(
                        "GET",
                        path,
                        params=self._params(params),
                        timeout=_timeout(DOWNLOAD_TIMEOUT_S),
                    ) as answer,
                ):
                    _refuse_errors(answer, may_repeat=True)
                    with part.open("wb") as file:
                        for chunk in answer.iter_bytes():
                            file.write(chunk)

            self._repeat(attempt)
            part.replace(target)
        return target

    def _repeat(self, attempt: Callable[[bool], T]) -> T:
        """Make attempts until one is answered or patience ends; each hears whether one was lost."""
        was_lost = False
        for number in range(self._patience.attempts):
            try:
                return attempt(was_lost)
            except RuntimeError:
                if self._http.is_closed:  # another thread closed it: there is nobody to ask
                    raise Unreachable(f"the client of {self.url} was closed") from None
                raise
            except _Failed as failed:
                was_lost = was_lost or failed.is_lost
                is_last = number == self._patience.attempts - 1
                if is_last or failed.retry_after_s > MAX_RETRY_AFTER_S:
                    raise failed.error from failed.__cause__
                self._wait(number, failed.retry_after_s)
        raise AssertionError("unreachable")

    def _wait(self, number: int, at_least_s: float) -> None:
        chance = float(self._chance.random())
        self._sleep(max(at_least_s, self._patience.wait_s(number, chance)))

    # Streams ----------------------------------------------------------------------------------

    def stream(
        self, path: str, *, after: int | None, params: Params | None = None
    ) -> Iterator[Mapping[str, Any] | None]:
        """Yield the events behind number `after` as they happen, and None for signs of life.

        None as `after` begins with what comes next. A connection that ends or breaks is made again
        behind the last event that was yielded, so only `close` ends it; each one that stands gives
        a sign of life before anything else.

        Raises:
            MarlaasError: what the service answered; `Unreachable` once patience ends.
        """
        number, lost_at_s = 0, None
        while not self._http.is_closed:
            error: MarlaasError = Unreachable(f"{self.url} ended the stream of events")
            retry_after_s = 0.0
            try:
                for event in self._stream_once(path, after, params):
                    number, lost_at_s = 0, None
                    if event is None:
                        yield None
                    elif after is None or event["seq"] > after:
                        after = event["seq"]
                        yield event
            except _Failed as failed:
                error, retry_after_s = failed.error, failed.retry_after_s
            now_s = runtime.now_s()
            lost_at_s = now_s if lost_at_s is None else lost_at_s
            if now_s - lost_at_s > self._patience.stream_s:
                raise error
            self._wait(number, min(retry_after_s, MAX_RETRY_AFTER_S))
            number += 1

    def _stream_once(
        self, path: str, after: int | None, params: Params | None
    ) -> Iterator[Mapping[str, Any] | None]:
        behind = {} if after is None else {"Last-Event-ID": str(after)}
        with (
            _sending(self.url, may_repeat=True),
            self._http.stream(
                "GET",
                path,
                params=self._params(params),
                headers={"Accept": "text/event-stream", **behind},
                timeout=_timeout(ANSWER_TIMEOUT_S),
            ) as answer,
        ):
            _refuse_errors(answer, may_repeat=True)
            for data in read_events(answer.iter_lines()):
                yield json.loads(data) if data else None


def read_events(lines: Iterator[str]) -> Iterator[str]:
    """Yield the data of each whole event of a `text/event-stream`, and "" for signs of life.

    These are comments and the line that a stream begins with (`retry`). The number that goes back
    as `Last-Event-ID` is part of the data, so ids need not be read. An event without its closing
    empty line was cut off.
    """
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith((":", "retry:")):
            yield ""
        elif line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))


# ---------------------------------------------------------------------------------------------
# What went wrong


@contextmanager
def _sending(url: str, *, may_repeat: bool) -> Iterator[None]:
    """Turn what breaks on the way into a failed attempt, or the error that ends the request."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise _Failed(
            Unreachable(
                f"no service answers at {url} ({_words(error)}); start one with `marlaas serve`, "
                "or say where it runs with MARLAAS_URL"
            )
        ) from error
    except httpx.TransportError as error:
        if may_repeat:
            lost = Unreachable(f"lost the service at {url} ({_words(error)})")
            raise _Failed(lost, is_lost=True) from error
        raise Unreachable(
            f"lost the service at {url} before it answered ({_words(error)}); it may have done "
            "what was asked: look before asking again"
        ) from error


def _refuse_errors(answer: httpx.Response, *, may_repeat: bool) -> None:
    """Raise what the service answered, unless that is a success."""
    if answer.is_success:
        return
    error = error_of(answer)
    if answer.status_code in REFUSED_FOR_NOW:
        raise _Failed(error, retry_after_s=_retry_after_s(answer))
    if answer.status_code in LOST_ON_THE_WAY and may_repeat:
        raise _Failed(error, is_lost=True)
    raise error


def error_of(answer: httpx.Response) -> MarlaasError:
    """Return the error that an answer carries, as the class that its stable code names."""
    answer.read()
    try:
        fault = answer.json()["error"]
        code, message = str(fault["code"]), str(fault["message"])
        problems = [str(problem) for problem in fault.get("problems") or [message]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return MarlaasError(
            f"{answer.request.url.copy_with(query=None)} answered {answer.status_code} "
            f"{answer.reason_phrase}, in words that are not a MARLaaS service's"
        )
    kind = _KINDS.get(code, MarlaasError)
    if issubclass(kind, InvalidRequest):
        return kind(*problems)
    if kind is QuotaExceeded:
        return QuotaExceeded(message, _retry_after_s(answer))
    error = kind(message)
    error.code = code
    return error


def _kinds() -> dict[str, type[MarlaasError]]:
    """Return the classes of errors by their code; those that need more than words are left out."""
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return {
        kind.code: kind
        for kind in found
        if issubclass(kind, MarlaasError) and kind is not EnvironmentFailure
    }


_KINDS = _kinds()


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds that the service asks for; its own answers never name a date."""
    try:
        return max(0.0, float(answer.headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


# ---------------------------------------------------------------------------------------------
# Parts of a request


def _timeout(answer_s: float) -> httpx.Timeout:
    return httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S)


def _size_of(body: object) -> dict[str, str]:
    """Return the size of a file as a header: a body of known size is not sent in chunks."""
    if isinstance(body, Path):
        return {"Content-Length": str(body.stat().st_size)}
    return {}


@contextmanager
def _opened(body: object) -> Iterator[bytes | Iterator[bytes] | None]:
    """Open what is sent as it is; a file is read anew for every attempt, a piece at a time."""
    if isinstance(body, Path):
        with body.open("rb") as file:
            yield iter(lambda: file.read(PIECE_BYTES), b"")
    else:
        yield body if isinstance(body, bytes) else None


def _json_of(answer: httpx.Response) -> Any:
    content = answer.read()
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        raise MarlaasError(
            f"{answer.request.url.copy_with(query=None)} did not answer in JSON; "
            "expected the address of a MARLaaS service"
        ) from error
