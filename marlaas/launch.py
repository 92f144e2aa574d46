"""The composition root: builds store, workers, families and controller, and connects them.

Nothing here decides anything; what runs where follows from `config.resolve`.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from marlaas import runtime
from marlaas.config import EngineSettings, Placement, RunSettings, ServeSettings, resolve
from marlaas.envs.base import Family
from marlaas.envs.catalog import make_family
from marlaas.errors import InvalidRequest, WorkerLost
from marlaas.loop.controller import Controller, LoopSettings, Mode
from marlaas.loop.runner import RunnerSettings
from marlaas.loop.runs import Runs
from marlaas.loop.samplers import Samplers
from marlaas.loop.serving import Serving
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.store.uploads import read_content
from marlaas.text.bases import ensure_base, num_weights
from marlaas.text.chat import ChatTokenizer
from marlaas.types import (
    OPERATOR,
    GenerateRequest,
    JobObserver,
    JobSpec,
    Message,
    PolicyId,
    Role,
    SamplingParams,
    WorkerStats,
)
from marlaas.workers.local import LocalWorker
from marlaas.workers.split import SplitWorker

if TYPE_CHECKING:
    from marlaas.service.parts import Parts, ServedBase

ENGINES_FILE = "engines.json"
"""In the run folder: what every engine worker was started with, all defaults resolved."""

STATS_EVERY_S = 0.5
"""How often the workers are asked where their time goes, for the display."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Where the time of a run went."""

    makespan_s: float
    """From the first job's admission to the last one's end; start-up of the workers excluded."""
    start_up_s: float
    workers: tuple[WorkerStats, ...]
    sandbox_cpu_s: float
    server_cpu_s: float
    """CPU seconds of the server process during the makespan."""


async def run_jobs(
    specs: Sequence[JobSpec],
    *,
    base: str,
    out: Path,
    run: RunSettings,
    observer: JobObserver,
    mode: Mode = Mode.ASYNC,
) -> RunSummary:
    """Run jobs to their end in a run folder; one that holds unfinished jobs goes on with them.

    Cancelling stops cleanly: steps that run are finished and kept.

    Raises:
        InvalidRequest: base, placement or jobs cannot run here.
        StoreUnavailable: another process runs the jobs of that folder.
    """
    started_s = runtime.now_s()
    is_exact = any(spec.is_seeded for spec in specs)
    async with AsyncExitStack() as stack:
        store = AsyncStore(Store(out, runs_jobs=True))
        stack.push_async_callback(store.close)
        settings = engine_settings(run, base, is_exact=is_exact)
        resolved = [asdict(one) for one in settings]
        (out / ENGINES_FILE).write_text(json.dumps(resolved, indent=2) + "\n")
        engines = await stack.enter_async_context(started(settings))
        families = Families()
        controller = Controller(
            store,
            arrange(engines, run.placement),
            ChatTokenizer.load(settings[0].base_folder),
            make_family=families.make,
            observer=observer,
            mode=mode,
        )
        for spec in specs:
            await controller.submit(spec)
        runtime.settle_heap()
        began_s, began_cpu_s = runtime.now_s(), runtime.cpu_s()
        watching = asyncio.create_task(_watch(engines, observer), name="worker stats")
        stack.callback(watching.cancel)
        await _run_to_a_boundary(controller)
        return RunSummary(
            makespan_s=runtime.now_s() - began_s,
            start_up_s=began_s - started_s,
            workers=tuple([await engine.stats() for engine in engines]),
            sandbox_cpu_s=families.cpu_s(),
            server_cpu_s=runtime.cpu_s() - began_cpu_s,
        )


async def _run_to_a_boundary(controller: Controller) -> None:
    """Run every job to its end; when cancelled, let running steps end first."""
    running = asyncio.ensure_future(controller.run())
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        controller.stop()
        await running
        raise


class Families:
    """Makes the jobs' task families and remembers them, to add up what their sandboxes used."""

    def __init__(self) -> None:
        self._made: list[Family] = []

    def make(self, spec: JobSpec) -> Family:
        self._made.append(make_family(spec.env))
        return self._made[-1]

    def cpu_s(self) -> float:
        return sum(family.cpu_s() for family in self._made)


def engine_settings(run: RunSettings, base: str, *, is_exact: bool = False) -> list[EngineSettings]:
    """Return what every engine worker of a run is started with."""
    folder = ensure_base(base)
    config = json.loads((folder / "config.json").read_text())
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    kv_width = (config.get("num_key_value_heads") or num_heads) * head_dim
    return resolve(
        run,
        base_name=base,
        base_folder=str(folder),
        max_context=config["max_position_embeddings"],
        kv_bytes_per_token=2 * 4 * config["num_hidden_layers"] * kv_width,
        base_bytes=4 * num_weights(folder),
        is_exact=is_exact,
    )


@asynccontextmanager
async def started(settings: Sequence[EngineSettings]) -> AsyncIterator[list[LocalWorker]]:
    """Start engine workers side by side; they are ended with the block, whatever happens."""
    workers = [LocalWorker(one) for one in settings]
    try:
        async with asyncio.TaskGroup() as starting:
            for worker in workers:
                starting.create_task(worker.start())
        yield workers
    except* InvalidRequest as refusals:
        raise refusals.exceptions[0] from None
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))


def arrange(
    engines: Sequence[LocalWorker], placement: Placement
) -> list[LocalWorker] | list[SplitWorker]:
    """Return the workers as the loop sees them."""
    if placement is Placement.SPLIT:
        training, *sampling = engines
        return [SplitWorker(worker, training) for worker in sampling]
    return list(engines)


async def _watch(
    engines: Sequence[LocalWorker], observer: JobObserver, *, every_s: float = STATS_EVERY_S
) -> None:
    """Hand the workers' statistics to whoever shows them."""
    while True:
        with suppress(WorkerLost):  # it comes back, or the loop will say that it does not
            stats = await asyncio.gather(
                *(engine.stats() for engine in engines if not engine.lost.is_set())
            )
            observer.workers_seen(tuple(stats))
        await asyncio.sleep(every_s)


# ---------------------------------------------------------------------------------------------
# The service

SCRATCH_FOLDER = "scratch"
"""In the service's folder: archives while they are sent."""

DOWNLOAD_KEY_FILE = "download.key"

SERVICE_STATS_EVERY_S = 2.0


def service_store(settings: ServeSettings) -> AsyncStore:
    """Open the store that the settings of a service name."""
    url, folder = settings.database or None, Path(settings.folder)
    return AsyncStore(Store.open(folder, url=url, durability=settings.durability, runs_jobs=True))


async def serve(
    settings: ServeSettings,
    *,
    mode: Mode = Mode.ASYNC,
    say: Callable[[str], None] = print,
    opened: Callable[[str, str], object] | None = None,
    until: Callable[[], Coroutine[object, object, object]] | None = None,
    stats_every_s: float = SERVICE_STATS_EVERY_S,
    open_store: Callable[[ServeSettings], AsyncStore] = service_store,
) -> None:
    """Serve until a signal: store, engines, loop and HTTP in one process; then drain and return.

    `say` shows a person what runs here. `opened` is told, once connections are taken, the address
    and the first operator's key, empty if there was one already; without it `say` shows the key,
    this once. `until` takes the place of signals. `stats_every_s` says how often workers are asked
    where their time goes. `open_store` opens the store, if not the one that the settings name.

    Raises:
        InvalidRequest: base, placement, address or database cannot be had.
        StoreUnavailable: the database cannot be reached, or is of a newer release; or another
            process serves it.
    """
    # `marlaas run` does without the web framework.
    from marlaas.service import logs, server
    from marlaas.service.app import make_app

    logs.set_up(settings.log_level)
    server.allow_many_connections()
    for line in settings.shown():
        say(line)
    # Before anything is made: a base that there is not leaves no folder behind.
    engines = engine_settings(settings.engines(), settings.base, is_exact=settings.exact)
    async with AsyncExitStack() as stack:
        store = open_store(
            settings
        )  # first: of two servers on a store, one is to hear of the other
        stack.push_async_callback(store.close)
        listener = stack.enter_context(server.bind(settings.host, settings.port))
        key = await store.call(first_operator_key)
        parts = await _service_parts(
            settings, engines, store, stack, mode=mode, stats_every_s=stats_every_s
        )
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"listening on {url}")
        if opened is not None:
            opened(url, key)
        elif key:
            say(f"operator key, shown this once: {key}")
        app = make_app(parts)
        runtime.settle_heap()
        await server.run(app, parts, listener, until)


async def _service_parts(
    settings: ServeSettings,
    chosen: Sequence[EngineSettings],
    store: AsyncStore,
    stack: AsyncExitStack,
    *,
    mode: Mode,
    stats_every_s: float,
) -> "Parts":
    """Start what a service consists of, to be ended with the stack."""
    from marlaas.service.joblog import JobLogs
    from marlaas.service.parts import Parts
    from marlaas.service.streams import Hub
    from marlaas.service.telemetry import Telemetry

    folder = Path(settings.folder)
    shutil.rmtree(folder / SCRATCH_FOLDER, ignore_errors=True)
    (folder / ENGINES_FILE).write_text(json.dumps([asdict(one) for one in chosen], indent=2) + "\n")
    engines = await stack.enter_async_context(started(chosen))
    tokenizer = ChatTokenizer.load(chosen[0].base_folder)
    telemetry = Telemetry(max_spans=settings.trace_spans)
    job_logs = JobLogs(store)
    stack.push_async_callback(job_logs.close)

    def family_of(spec: JobSpec) -> Family:
        async def read_upload(digest: str) -> bytes:
            path = await store.call(Store.upload_file, spec.tenant, digest)
            return await asyncio.to_thread(read_content, path)

        return make_family(spec.env, read_upload=read_upload, log=job_logs.of(spec))

    controller = Controller(
        store,
        arrange(engines, settings.placement),
        tokenizer,
        make_family=family_of,
        observer=telemetry,
        on_stage=telemetry.stage_done,
        mode=mode,
        settings=LoopSettings(
            max_running_jobs=settings.max_running_jobs, gap_bound=settings.gap_bound
        ),
    )
    controller.tenants_changed(await store.call(Store.tenants))
    serving = Serving(controller.placement, store, tokenizer, tenants=controller.tenants)
    stack.push_async_callback(serving.close)
    samplers = Samplers(serving, store)
    stack.push_async_callback(samplers.close)
    runs = Runs(
        controller.placement,
        store,
        tenants=controller.tenants,
        settings=RunnerSettings(gap_timeout_s=settings.tinker_gap_s),
    )
    stack.push_async_callback(runs.close)
    await runs.start()
    watching = asyncio.create_task(
        _watch(engines, telemetry, every_s=stats_every_s), name="worker stats"
    )
    stack.callback(watching.cancel)
    return Parts(
        settings=settings,
        store=store,
        controller=controller,
        serving=serving,
        runs=runs,
        samplers=samplers,
        base=_served_base(settings, chosen[0]),
        download_key=await asyncio.to_thread(_download_key, folder),
        telemetry=telemetry,
        hub=Hub(store, heartbeat_s=settings.heartbeat_s, max_streams=settings.max_streams),
        max_context=chosen[0].max_context,
        scratch=folder / SCRATCH_FOLDER,
    )


def _served_base(settings: ServeSettings, engine: EngineSettings) -> "ServedBase":
    """Return what `tinker` clients are told of the base."""
    from marlaas.service.parts import ServedBase

    config = json.loads((Path(engine.base_folder) / "config.json").read_text())
    return ServedBase(
        names=tuple(dict.fromkeys((settings.base, *settings.model_aliases))),
        architecture=(config.get("architectures") or [config.get("model_type", "")])[0],
        tokenizer_id=settings.tokenizer_id or engine.base_folder,
        vocab_size=config["vocab_size"],
    )


def _download_key(folder: Path) -> bytes:
    """Return the key that signs addresses of downloads; made once for a service's folder."""
    path = folder / DOWNLOAD_KEY_FILE
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.touch(mode=0o600)
        partial.write_bytes(runtime.unguessable_bytes(32))
        partial.rename(path)
    return path.read_bytes()


def first_operator_key(store: Store) -> str:
    """Return a new operator's key if there is none that opens anything; else nothing."""
    if any(key.revoked_s is None for key in store.keys(OPERATOR)):
        return ""
    _, secret = store.add_key(OPERATOR, role=Role.OPERATOR, label="first")
    store.audit("start", "add key", OPERATOR, {"label": "first"})
    return secret


# ---------------------------------------------------------------------------------------------
# Talking to a model


class Chat:
    """A base model, or an adapter on it, behind one worker: `open_chat -> reply* -> close`."""

    def __init__(
        self, worker: LocalWorker, tokenizer: ChatTokenizer, policy_id: PolicyId | None
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._policy_id = policy_id
        self._num_turns = 0

    async def reply(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        """Return the model's reply to a conversation."""
        self._num_turns += 1
        tokenizer = self._tokenizer
        tokens = np.asarray(tokenizer.render_opening(messages), dtype=np.int32)
        completion = await self._worker.generate(
            GenerateRequest(
                request_id=f"chat/{self._num_turns}",
                sequence_id="chat",
                policy_id=self._policy_id,
                version=0,
                tokens=tokens,
                sampling=replace(sampling, stop_token_ids=tuple(tokenizer.stop_token_ids)),
            )
        )
        return tokenizer.decode(completion.reply_tokens.tolist())

    async def close(self) -> None:
        """End the worker."""
        await self._worker.stop()


async def open_chat(base: str, adapter: str | Path | None = None) -> Chat:
    """Start one worker on a base and, if given, load a PEFT folder onto it.

    Raises:
        InvalidRequest: no such base, or an adapter that does not fit it.
    """
    settings = engine_settings(RunSettings(num_workers=1), base)[0]
    worker = LocalWorker(settings)
    try:
        await worker.start()
        policy_id = PolicyId("chat") if adapter is not None else None
        if policy_id is not None:
            await worker.load_version(policy_id, 0, str(adapter))
    except BaseException:
        await worker.stop()
        raise
    return Chat(worker, ChatTokenizer.load(settings.base_folder), policy_id)
