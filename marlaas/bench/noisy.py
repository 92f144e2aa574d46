"""Bad neighbours: what a tenant's throughput and its exact result are beside each of them.

    victim alone ─┐                                        ┌─► steps a second
    victim beside ┴─► one real engine worker, one loop ────┴─► every step record and adapter hash

One worker, so that all compete for it. The neighbour is a tenant of the same weight with the quotas
that every tenant begins with; its environment is the family `custom`: code of its own in a sandbox.
It is at work before the victim begins, and begins anew whatever ends.

A neighbour may take what it would get if it behaved: a hungry tenant of equal weight half of the
worker, so a ratio of 0.5 is owed and anything far below it is damage. Neighbours that cannot use
their half leave more. In seeded mode the victim's curve must be the same, bit for bit.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from marlaas.bench.control import LagMeter
from marlaas.bench.machine import describe
from marlaas.bench.onlooker import Onlooker
from marlaas.bench.workload import MAX_TOKENS
from marlaas.config import RunSettings
from marlaas.envs.base import Family
from marlaas.envs.catalog import make_family
from marlaas.errors import MarlaasError
from marlaas.launch import engine_settings, started
from marlaas.loop.controller import Controller
from marlaas.store.async_store import AsyncStore
from marlaas.store.codec import encode
from marlaas.store.db import Store
from marlaas.text.bases import ensure_base
from marlaas.text.chat import ChatTokenizer
from marlaas.types import (
    JobSpec,
    JobState,
    Latency,
    Quotas,
    Tenant,
    TenantId,
)
from marlaas.workers.local import LocalWorker

VICTIM, NEIGHBOUR = TenantId("victim"), TenantId("neighbour")
FAIR_SHARE = 0.5
"""Of the worker, for one of two tenants of equal weight that both want all of it."""

LEAD_S = 3.0
"""How long the neighbour is at work before the victim begins."""

TRIAL_LIMIT_S = 600.0

PROMPTS = b'{"prompt": "What is 3 + 4?"}\n{"prompt": "Name a colour."}\n{"prompt": "Say a word."}\n'

NEVER_RETURNS = b"""
import time

def start(prompt):
    return {}

def step(state, reply, is_last):
    while True:
        time.sleep(3600)
"""

GIANT_ANSWERS = b"""
def start(prompt):
    return {}

def step(state, reply, is_last):
    if is_last:
        return {"reward": float(len(reply) % 2)}
    return {"state": {}, "messages": [{"role": "tool", "content": "spam " * 700_000}]}
"""

CRASHES = b"""
import os, signal

def reward(prompt, reply):
    os.kill(os.getppid(), signal.SIGKILL)
    os.abort()
"""

BURNS = b"""
import time

def reward(prompt, reply):
    began = time.process_time()
    while time.process_time() - began < 1.0:
        pass
    return float(len(reply) % 2)
"""

COIN = b"""
def reward(prompt, reply):
    return float(len(reply) % 2)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One way to be a burden."""

    name: str
    what: str
    environment: bytes = COIN
    env: Mapping[str, object] = field(default_factory=dict)
    """Settings of the family `custom` beside its files."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Fields of its jobs."""
    num_jobs: int = 8
    """Handed over at once."""

    def job(self, number: int) -> JobSpec:
        """Return its job of a number."""
        fields: dict[str, object] = {
            "tenant": NEIGHBOUR,
            "name": f"{self.name}-{number:05d}",
            "env": {"family": "custom", "environment": "file", "prompts": "prompts", **self.env},
            "steps": 1000,
            "max_tokens": MAX_TOKENS["math"],
            "eval_prompts": 0,
            "seed": number,
            **self.changes,
        }
        return JobSpec(**fields)  # type: ignore[arg-type]

    def family(self, spec: JobSpec) -> Family:
        """Return the environment of one of its jobs."""
        uploads = {"file": self.environment, "prompts": PROMPTS}
        return make_family(spec.env, read_upload=uploads.__getitem__, log=lambda text: None)


NEIGHBOURS = (
    Neighbour(name="behaves", what="eight jobs that always have work: what is fair"),
    Neighbour(name="floods", what="hands over 1,000 jobs at once", num_jobs=1000),
    Neighbour(
        name="stalls",
        what="tools that never return",
        environment=NEVER_RETURNS,
        env={"max_turns": 3, "time_limit_s": 300.0},
    ),
    Neighbour(
        name="giant",
        what="tools that answer with 3.5 MB",
        environment=GIANT_ANSWERS,
        env={"max_turns": 3, "output_kb": 4096, "memory_mb": 512},
    ),
    Neighbour(
        name="diverges",
        what="a learning rate of 1e30: weights and logits that are not finite",
        changes={"learning_rate": 1e30, "prompts_per_step": 1},
    ),
    Neighbour(name="burns", what="takes a CPU second for every verdict", environment=BURNS),
    Neighbour(name="crashes", what="kills its own sandbox at every call", environment=CRASHES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The victim's run, alone or beside one neighbour."""

    neighbour: str
    steps_per_s: float
    curve: tuple[bytes, ...]
    """Every step record, without times; as bytes, since a metric may be NaN."""
    lag_max_s: float
    """Of the event loop, while the victim ran."""
    num_neighbour_jobs: int
    """That the neighbour had got accepted by the end."""
    num_neighbour_ends: int
    """Those that had ended, however."""
    device_s: float
    """Charged to the victim."""
    neighbour_device_s: float
    """Charged to the neighbour from the victim's beginning to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One neighbour against nobody."""

    neighbour: str
    is_seeded: bool
    alone_per_s: float
    """Mean of two trials, before and after those with neighbours."""
    alone_spread: float
    """How far each of the two lies from it, relative to it."""
    beside_per_s: float
    ratio: float
    is_identical: bool | None
    """None where results need not be the same."""
    lag_max_s: float
    num_neighbour_jobs: int
    num_neighbour_ends: int
    share: float
    """The victim's part of the device seconds that were charged while it ran, for what was done: a
    neighbour whose groups never end has been charged nothing yet."""


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    rows: list[Row] = []
    for is_seeded in (True,) if args.quick else (True, False):
        rows += asyncio.run(_measure(args, is_seeded=is_seeded))
    _print(Console(), rows)
    result = {
        "bench": "noisy",
        "machine": describe(),
        "base": args.base,
        "fair_share": FAIR_SHARE,
        "rows": [asdict(row) for row in rows],
        "ratio_min": min(row.ratio for row in rows),
        "ratio_beside_a_good_neighbour": min(
            (row.ratio for row in rows if row.neighbour == NEIGHBOURS[0].name), default=None
        ),
        "exact_identical": all(row.is_identical for row in rows if row.is_seeded),
    }
    print(json.dumps(result))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    names = [neighbour.name for neighbour in NEIGHBOURS]
    parser = argparse.ArgumentParser(prog="marlaas bench noisy", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seeded mode only, few steps")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps of the victim")
    parser.add_argument("--neighbours", nargs="+", default=names, choices=names)
    parser.add_argument("--base", default="tiny")
    args = parser.parse_args(argv)
    args.steps = args.steps or (12 if args.quick else 40)
    return args


async def _measure(args: argparse.Namespace, *, is_seeded: bool) -> list[Row]:
    """Return a row per neighbour, all of them on one worker that is started once."""
    settings = engine_settings(RunSettings(num_workers=1), args.base, is_exact=is_seeded)
    tokenizer = ChatTokenizer.load(ensure_base(args.base))
    spec = victim(args.steps, is_seeded=is_seeded)
    async with started(settings) as workers:
        alone = [await run_trial(spec, None, workers, tokenizer)]
        beside = [
            await run_trial(spec, neighbour, workers, tokenizer)
            for neighbour in NEIGHBOURS
            if neighbour.name in args.neighbours
        ]
        # Again, after all of them: what a machine does in the meantime shows in the difference.
        alone.append(await run_trial(spec, None, workers, tokenizer))
    return [_row(alone, trial, is_seeded=is_seeded) for trial in beside]


def victim(steps: int, *, is_seeded: bool) -> JobSpec:
    """Return the job that is watched: it can use the whole worker, as nothing else holds it up."""
    return JobSpec(
        tenant=VICTIM,
        name="sums",
        env={"family": "math"},
        steps=steps,
        max_tokens=MAX_TOKENS["math"],
        latency=Latency(median_s=0.02, sigma=0.5),
        eval_prompts=0,
        is_seeded=is_seeded,
    )


def _row(alone: Sequence[Trial], beside: Trial, *, is_seeded: bool) -> Row:
    alone_per_s = fmean(trial.steps_per_s for trial in alone)
    is_identical = all(trial.curve == beside.curve for trial in alone)
    return Row(
        neighbour=beside.neighbour,
        is_seeded=is_seeded,
        alone_per_s=alone_per_s,
        alone_spread=max(abs(trial.steps_per_s - alone_per_s) for trial in alone) / alone_per_s,
        beside_per_s=beside.steps_per_s,
        ratio=beside.steps_per_s / alone_per_s,
        is_identical=is_identical if is_seeded else None,
        lag_max_s=beside.lag_max_s,
        num_neighbour_jobs=beside.num_neighbour_jobs,
        num_neighbour_ends=beside.num_neighbour_ends,
        share=beside.device_s / (beside.device_s + beside.neighbour_device_s),
    )


# ---------------------------------------------------------------------------------------------
# One trial


async def run_trial(
    spec: JobSpec,
    neighbour: Neighbour | None,
    workers: Sequence[LocalWorker],
    tokenizer: ChatTokenizer,
) -> Trial:
    """Run the victim to its end beside a neighbour, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as folder:
        store = AsyncStore(Store(Path(folder)))
        try:
            return await _run_trial(spec, neighbour, workers, tokenizer, store)
        finally:
            await store.close()


async def _run_trial(
    spec: JobSpec,
    neighbour: Neighbour | None,
    workers: Sequence[LocalWorker],
    tokenizer: ChatTokenizer,
    store: AsyncStore,
) -> Trial:
    watching, lag = Watching(), LagMeter()

    def family(one: JobSpec) -> Family:
        if neighbour is not None and one.tenant == NEIGHBOUR:
            return neighbour.family(one)
        return make_family(one.env)

    controller = Controller(store, workers, tokenizer, make_family=family, observer=watching)
    # The queue is without a bound, so that a flood is accepted, not refused: the harder case.
    quotas = replace(Quotas(), max_queued_jobs=None)
    controller.tenants_changed([Tenant(tenant_id=NEIGHBOUR, quotas=quotas)])
    async with asyncio.timeout(TRIAL_LIMIT_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(controller.serve())
        helpers = [tasks.create_task(lag.run())]
        if neighbour is not None:
            helpers.append(tasks.create_task(watching.burden(controller, neighbour)))
            await asyncio.sleep(LEAD_S)
        lag.take()
        before_s = watching.device_s(controller)
        await controller.submit(spec)
        await watching.victim_ended.wait()
        lags, device_s = lag.take(), watching.device_s(controller) - before_s
        for helper in helpers:
            helper.cancel()
        controller.stop()
        await serving
    stored = await store.call(Store.job, spec.tenant, spec.name)
    if stored.state is not JobState.DONE:
        raise RuntimeError(f"the victim ended as {stored.state}: {stored.reason}")
    records = await store.call(Store.steps, spec.tenant, spec.name)
    return Trial(
        neighbour=neighbour.name if neighbour else "",
        steps_per_s=len(records) / records[-1].elapsed_s,
        curve=tuple(encode(replace(record, elapsed_s=0.0)) for record in records),
        lag_max_s=max(lags),
        num_neighbour_jobs=watching.num_accepted,
        num_neighbour_ends=watching.num_ended,
        device_s=stored.device_s,
        neighbour_device_s=device_s,
    )


class Watching(Onlooker):
    """Sees when the victim ends, and when the neighbour needs a new job."""

    def __init__(self) -> None:
        self.victim_ended = asyncio.Event()
        self.num_accepted = 0
        self.num_ended = 0
        self._names: list[str] = []
        self._device_s: dict[str, float] = {}
        """Of each job, when it was last looked at; what it used after that is left out."""
        self._places: asyncio.Queue[None] = asyncio.Queue()

    async def burden(self, controller: Controller, neighbour: Neighbour) -> None:
        """Hand over the neighbour's jobs, and another one for each that ends."""
        for _ in range(neighbour.num_jobs):
            self._places.put_nowait(None)
        while True:
            await self._places.get()
            spec = neighbour.job(self.num_accepted)
            with suppress(MarlaasError):  # a tenant who is refused tries again with its next job
                await controller.submit(spec)
                self._names.append(spec.name)
            self.num_accepted += 1

    def device_s(self, controller: Controller) -> float:
        """Return the device seconds that the neighbour's jobs have been charged."""
        for name in self._names:
            charged_s = controller.status(NEIGHBOUR, name).device_s
            self._device_s[name] = max(charged_s, self._device_s.get(name, 0.0))
        return sum(self._device_s.values())

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        if not state.is_terminal:
            return
        if spec.tenant == VICTIM:
            self.victim_ended.set()
        else:
            self.num_ended += 1
            self._places.put_nowait(None)


# ---------------------------------------------------------------------------------------------


def _print(console: Console, rows: Sequence[Row]) -> None:
    for is_seeded in (True, False):
        shown = [row for row in rows if row.is_seeded is is_seeded]
        if shown:
            console.print(_table(shown, is_seeded=is_seeded))
    for neighbour in NEIGHBOURS:
        console.print(f"{neighbour.name}: {neighbour.what}")


def _table(rows: Sequence[Row], *, is_seeded: bool) -> Table:
    table = Table(
        title=f"one worker, {'seeded' if is_seeded else 'usual'} mode; "
        f"alone {rows[0].alone_per_s:.2f} steps/s +- {rows[0].alone_spread:.0%}",
        caption="a hungry neighbour of equal weight is owed half of the worker",
    )
    columns = (
        "neighbour",
        "beside, steps/s",
        "ratio",
        "owed",
        "share",
        "exact",
        "lag max ms",
        "its jobs",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "neighbour" else "right")
    for row in rows:
        exact = {True: "yes", False: "NO", None: "-"}[row.is_identical]
        table.add_row(
            row.neighbour,
            f"{row.beside_per_s:.2f}",
            f"{row.ratio:.2f}",
            f">= {FAIR_SHARE}",
            f"{row.share:.2f}",
            exact,
            f"{1000 * row.lag_max_s:.0f}",
            f"{row.num_neighbour_jobs} ({row.num_neighbour_ends} ended)",
        )
    return table
