"""An engine worker as the loop sees it: `Generator` and `Trainer`, the engine a local process.

Torch-free: this half lives in the server. `start` launches the process and waits for its
self-check; every call is a message and its answer a future. When the process goes away, every open
call fails with `WorkerLost`, and `start` may be called again.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from marlaas import errors
from marlaas.config import EngineSettings
from marlaas.errors import InvalidRequest, MarlaasError, WorkerLost
from marlaas.store.codec import encode
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Capabilities,
    Completion,
    Datum,
    DatumOutput,
    GenerateRequest,
    Objective,
    PolicyId,
    StepResult,
    WorkerStats,
)
from marlaas.workers import messages as m
from marlaas.workers.framing import FrameReader

R = TypeVar("R")

SHUTDOWN_TIMEOUT_S = 5.0


MERGE_REFUSED = 3
"""Exit status of `engine/merge.py` when it says what was wrong with the request."""

MAX_STARTS = 3
"""Attempts to bring a lost process back before the worker is given up."""


class LocalWorker:
    """`new -> start -> ready -> (calls) -> lost -> recover -> ready ... -> stopped`.

    worker = LocalWorker(settings)
    await worker.start()
    completion = await worker.generate(request)
    await worker.stop()
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.name = settings.name
        self.incarnation = 0
        """Grows whenever a process starts; it knows no policy then."""
        self.self_check: dict[str, float] = {}
        self.lost = asyncio.Event()
        """Set while there is no process that could answer."""
        self.lost.set()
        self._process: asyncio.subprocess.Process | None = None
        self._connection: Connection | None = None
        self._calls: dict[int, asyncio.Future[m.Reply]] = {}
        self._ids = itertools.count(1)
        self._capabilities = Capabilities(max_context=settings.max_context)
        self._recovering = asyncio.Lock()
        self._is_stopped = False

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def generator(self) -> "LocalWorker":
        return self

    @property
    def trainer(self) -> "LocalWorker":
        return self

    @property
    def max_decoding(self) -> int:
        return self.settings.max_batch

    @property
    def kv_capacity_tokens(self) -> int:
        return self.settings.kv_capacity_tokens

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Launch the process and wait until its base has passed the self-check.

        Raises:
            InvalidRequest: the base was refused, with the reason.
            WorkerLost: the process ended before it was ready.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "marlaas.workers.process", str(theirs.fileno())),
                env={**os.environ, **self.settings.environment()},
                pass_fds=[theirs.fileno()],
            )
        ready = self._expect(0)
        _, self._connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._take, self._end_calls), sock=ours
        )
        blob = encode(self.settings)
        self._connection.send(len(blob).to_bytes(4, "little") + blob)
        reply = _checked(await ready, m.ReplyReady)
        self.self_check = dict(reply.self_check)
        self._capabilities = replace(
            self._capabilities, max_trained_tokens=reply.max_trained_tokens
        )
        self.incarnation += 1
        self.lost.clear()

    async def recover(self) -> None:
        """Return once the process answers; start a new one if it has ended.

        Raises:
            WorkerLost: it would not start again, or the worker was stopped.
        """
        async with self._recovering:
            for _ in range(MAX_STARTS):
                if self._is_stopped:
                    break
                if not self.lost.is_set():
                    return
                await self._end_process()
                with contextlib.suppress(WorkerLost):
                    await self.start()
            raise WorkerLost(f"{self.name} does not come back")

    async def stop(self) -> None:
        """End the process; open calls fail. Idempotent."""
        self._is_stopped = True
        await self._end_process()

    async def _end_process(self) -> None:
        if self._process is None:
            return
        if not self.lost.is_set():
            with contextlib.suppress(WorkerLost, TimeoutError):
                await asyncio.wait_for(self._call(m.Shutdown()), SHUTDOWN_TIMEOUT_S)
        if self._connection is not None:
            self._connection.close()
        try:
            await asyncio.wait_for(self._process.wait(), SHUTDOWN_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._connection is not None:
            await self._connection.ended.wait()
        self._process = None

    # Generator -----------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        try:
            reply = await self._call(m.Generate(request))
        except asyncio.CancelledError:
            if not self.lost.is_set():
                self._send(next(self._ids), m.Cancel(request.request_id))
            raise
        return _checked(reply, m.ReplyCompletion).completion

    async def release(self, sequence_ids: Sequence[str]) -> None:
        if not self.lost.is_set():  # with the process its memory went, too
            self._send(next(self._ids), m.Release(sequence_ids))

    # Trainer -------------------------------------------------------------------------------

    async def create(self, policy_id: PolicyId, spec: AdapterSpec) -> str:
        return _checked(await self._call(m.Create(policy_id, spec)), m.ReplyHash).adapter_hash

    async def create_from(self, policy_id: PolicyId, spec: AdapterSpec, source: str) -> str:
        reply = await self._call(m.CreateFrom(policy_id, spec, source))
        return _checked(reply, m.ReplyHash).adapter_hash

    async def load(self, policy_id: PolicyId, snapshot: str) -> StepResult:
        return _checked(await self._call(m.Load(policy_id, snapshot)), m.ReplyStep).result

    async def load_version(self, policy_id: PolicyId, version: int, folder: str) -> str:
        reply = await self._call(m.LoadVersion(policy_id, version, folder))
        return _checked(reply, m.ReplyHash).adapter_hash

    async def forward_backward(
        self, policy_id: PolicyId, data: Sequence[Datum], objective: Objective
    ) -> list[DatumOutput]:
        reply = await self._call(m.ForwardBackward(policy_id, data, objective))
        return _checked(reply, m.ReplyOutputs).outputs

    async def forward(
        self, policy_id: PolicyId | None, version: int, data: Sequence[Datum]
    ) -> list[DatumOutput]:
        reply = await self._call(m.Forward(policy_id, version, data))
        return _checked(reply, m.ReplyOutputs).outputs

    async def optim_step(
        self, policy_id: PolicyId, adam: AdamParams, snapshot: str | None = None
    ) -> StepResult:
        reply = await self._call(m.OptimStep(policy_id, adam, snapshot))
        return _checked(reply, m.ReplyStep).result

    async def zero_grad(self, policy_id: PolicyId) -> None:
        await self._done(m.ZeroGrad(policy_id))

    async def save_state(self, policy_id: PolicyId, path: str) -> None:
        await self._done(m.SaveState(policy_id, path))

    async def publish(self, policy_id: PolicyId, version: int) -> None:
        await self._done(m.Publish(policy_id, version))

    async def retire(self, policy_id: PolicyId, version: int) -> None:
        await self._done(m.Retire(policy_id, version))

    async def save_adapter(self, policy_id: PolicyId, version: int, folder: str) -> str:
        reply = await self._call(m.SaveAdapter(policy_id, version, folder))
        return _checked(reply, m.ReplyHash).adapter_hash

    async def merge(self, adapter_folder: str, out_folder: str) -> None:
        """See `Trainer.merge`. A process of its own does it, which needs no engine: it works while
        the worker is lost, too."""
        settings = self.settings
        merging = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "marlaas.engine.merge"),
            *(settings.base_folder, adapter_folder, out_folder),
            *(settings.dtype, settings.durability),
            env={**os.environ, **replace(settings, num_threads=1).environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            said, complained = await merging.communicate()
        except asyncio.CancelledError:
            merging.terminate()
            await merging.wait()
            raise
        if merging.returncode == MERGE_REFUSED:
            code, _, message = said.decode().partition("\n")
            raise _error(code, message)
        if merging.returncode:
            last = complained.decode(errors="replace").strip().rpartition("\n")[2]
            raise WorkerLost(f"the merge ended with status {merging.returncode}: {last}")

    async def remove(self, policy_id: PolicyId) -> None:
        await self._done(m.Remove(policy_id))

    # Between workers, and about this one -----------------------------------------------------

    async def export_version(self, policy_id: PolicyId, version: int) -> m.ReplyVersion:
        """Return a live version's weights, to be imported elsewhere."""
        return _checked(await self._call(m.ExportVersion(policy_id, version)), m.ReplyVersion)

    async def import_version(
        self, policy_id: PolicyId, version: int, exported: m.ReplyVersion
    ) -> None:
        """Make another worker's version live here, for sampling only."""
        message = m.ImportVersion(
            policy_id, version, exported.spec, exported.adapter_hash, exported.row
        )
        await self._done(message)

    async def stats(self) -> WorkerStats:
        return _checked(await self._call(m.GetStats()), m.ReplyStats).stats

    # Messages ------------------------------------------------------------------------------

    async def _done(self, message: m.Call) -> None:
        _checked(await self._call(message), m.ReplyNone)

    async def _call(self, message: m.Call) -> m.Reply:
        if self.lost.is_set():
            raise WorkerLost(f"{self.name} is not running")
        call_id = next(self._ids)
        future = self._expect(call_id)
        self._send(call_id, message)
        return await future

    def _expect(self, call_id: int) -> asyncio.Future[m.Reply]:
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        return future

    def _send(self, call_id: int, message: m.Call) -> None:
        assert self._connection is not None
        self._connection.send(m.pack(call_id, message))

    def _take(self, call_id: int, reply: m.Call | m.Reply) -> None:
        """Hand a reply to its waiting call."""
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(reply)  # type: ignore[arg-type]

    def _end_calls(self) -> None:
        """Nobody is there any more: fail the calls that are left."""
        self.lost.set()
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(WorkerLost(f"the process of {self.name} has ended"))


class Connection(asyncio.Protocol):
    """The server's end of a worker's socket: `connected -> (send, on_message)* -> ended`.

    What is sent within one turn of the event loop leaves in one write: a group's sequences, say,
    which the worker then finds all at once, too.
    """

    def __init__(
        self, on_message: Callable[[int, m.Call | m.Reply], None], on_end: Callable[[], None]
    ) -> None:
        self.ended = asyncio.Event()
        self._on_message = on_message
        self._on_end = on_end
        self._frames = FrameReader()
        self._outbox: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def send(self, frame: bytes) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for call_id, message in self._frames.feed(data):
            self._on_message(call_id, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()
        self.ended.set()

    def _flush(self) -> None:
        frames, self._outbox = self._outbox, []
        if frames and self._transport is not None:
            self._transport.write(b"".join(frames))


def _checked(reply: m.Reply, expected: type[R]) -> R:
    """Return the reply as the expected type, or raise the error that it carries."""
    if isinstance(reply, m.ReplyError):
        raise _error(reply.code, reply.message)
    assert isinstance(reply, expected), f"expected {expected.__name__}, got {reply!r:.200}"
    return reply


def _error(code: str, message: str) -> MarlaasError:
    """Return the error that another process named by its class."""
    kind = getattr(errors, code, None)
    if isinstance(kind, type) and issubclass(kind, MarlaasError):
        return kind(message)
    return InvalidRequest(f"{code}: {message}")
