"""The process that serves: loop and HTTP side by side until a signal, then a bounded drain.

    bind ─► serve ──SIGTERM──► not ready, no new connections ─► streams end, running steps commit
                                                               └─ at most `drain_s` ─► return

- If the loop ends by itself, something is broken: HTTP ends too, and the error goes up.
- A second signal ends the process at once; the store brings everything back.
"""

import asyncio
import logging
import math
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from marlaas.errors import InvalidRequest, StoreUnavailable
from marlaas.service.parts import Parts
from marlaas.store.db import Store

_LOG = logging.getLogger(__name__)

EXPIRY_PERIOD_S = 600.0
"""How often versions whose time to live is over are looked for."""

BACKLOG = 128
"""Connections that may wait, hence how many are accepted in one turn of the event loop: thousands
of streams come back at once after a start, and the jobs want turns in between."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a port that is taken is found before anything starts.

    Raises:
        InvalidRequest: it cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidRequest(
            f"{host}:{port}: cannot be listened on ({error.strerror}); expected another port, or "
            "the end of what listens there"
        ) from error


def allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows: a stream is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(
    app: FastAPI,
    parts: Parts,
    listener: socket.socket,
    until: Callable[[], Coroutine[object, object, object]] | None = None,
) -> None:
    """Run jobs and answer requests until a signal, or until `until` returns; then drain."""
    drain_s = parts.settings.drain_s
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            backlog=BACKLOG,
            lifespan="on",
            forwarded_allow_ips=parts.settings.forwarded_allow_ips,
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
    )
    looping = asyncio.create_task(parts.controller.serve(), name="controller")
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stopping = asyncio.create_task((until or _signalled)(), name="end")
    tidying = asyncio.create_task(_drop_expired(parts), name="expiry")
    try:
        await asyncio.wait({looping, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        _LOG.info("draining", extra={"drain_s": drain_s})
        parts.draining.set()
        server.should_exit = True
        parts.hub.close()
        parts.controller.stop()
        _, late = await asyncio.wait({looping, serving}, timeout=drain_s)
        if late:
            _LOG.warning("not drained in time", extra={"late": [task.get_name() for task in late]})
    finally:
        for task in (looping, serving, stopping, tidying):
            task.cancel()
        ends = await asyncio.gather(looping, serving, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end


async def _drop_expired(parts: Parts) -> None:
    """Delete versions, checkpoints and results whose time is over, now and then."""
    while True:
        try:
            await parts.store.call(Store.drop_expired)
            while await parts.store.call(Store.drop_results):
                pass  # a few at a time: other calls come in between
        except StoreUnavailable as error:
            _LOG.warning("what has expired stays for now", extra={"reason": str(error)})
        await asyncio.sleep(EXPIRY_PERIOD_S)


class _Server(uvicorn.Server):
    """A server that leaves signals to the drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _signalled() -> None:
    """Return at the first signal; the next one has its usual effect."""
    loop = asyncio.get_running_loop()
    is_told = asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, is_told.set)
    try:
        await is_told.wait()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
