"""`marlaas watch` and `marlaas top`: what happens on a service, while it happens.

`watch` is the board of `marlaas run` for the jobs of a service. `top` is for operators: workers,
tenants, the queue, and what stands still. Both print plain words where there is no terminal.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marlaas.cli import display
from marlaas.cli.connection import (
    connected,
    console,
    located,
    new_table,
    print_json,
    tenants_in_view,
)
from marlaas.cli.feed import Feed
from marlaas.client import Client
from marlaas.client.records import JobInfo, Machine, Notice, TenantInfo
from marlaas.types import JobState, Role, Usage, WorkerStats

TOP_EVERY_S = 2.0
PAGE_COLUMNS = 140
"""Width of the page where it goes into a pipe."""

# ---------------------------------------------------------------------------------------------
# watch


def watch(args: argparse.Namespace) -> int:
    """Show jobs until none of them is queued or running."""
    shown = Console(highlight=False)
    with connected(args) as client:
        is_board = shown.is_terminal and not args.plain
        lines = display.Board(client.url) if is_board else display.PlainLog(shown)
        feed = Feed(lines)
        try:
            for tenant, acting, only in _followed(client, args):
                feed.follow(tenant, acting, only=only)
            if client.whoami().role is Role.OPERATOR:
                feed.watch_workers(client)
            if isinstance(lines, display.Board):
                _draw_until(shown, lines.render, feed)
            else:
                while not feed.is_over:
                    feed.drain(display.REFRESH_S)
        finally:
            feed.close()
    states = [line.state for line in lines.jobs.values()]
    if not states:
        print("No job is queued or running.")
    return 0 if all(state is JobState.DONE for state in states) else 1


def _followed(client: Client, args: argparse.Namespace) -> Iterator[tuple[str, Client, str | None]]:
    """Yield whose jobs are watched, with the one job if one was named."""
    if args.job is None:
        for tenant, acting in tenants_in_view(client, args).items():
            yield tenant, acting, None
        return
    acting, name = located(client, args, args.job)
    owner, slash, _ = args.job.rpartition("/")
    yield owner if slash else args.tenant or client.whoami().tenant, acting, name


def _draw_until(shown: Console, render: Callable[[int, int], RenderableType], feed: Feed) -> None:
    with Live(console=shown, auto_refresh=False) as live:
        while not feed.is_over:
            feed.drain(display.REFRESH_S)
            # What else came in within the same quarter of a second is drawn with it.
            size = shown.size
            live.update(render(size.width, size.height - 1), refresh=True)


# ---------------------------------------------------------------------------------------------
# top


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantNow:
    """What a tenant has, uses and waits for."""

    tenant: TenantInfo
    jobs: list[JobInfo]
    """Queued and running ones."""
    today: Usage
    live_runs: int = 0
    """Of Tinker clients."""
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole service at one moment."""

    machine: Machine
    tenants: list[TenantNow]


def top(args: argparse.Namespace) -> int:
    """Show the machine until the operator has seen enough; once, if nobody watches."""
    shown = Console(highlight=False)
    with connected(args) as client:
        if args.json:
            print_json(take_snapshot(client))
            return 0
        if not shown.is_terminal:
            console().print(render_top(take_snapshot(client), client.url, PAGE_COLUMNS, 1000))
            return 0
        with Live(console=shown, auto_refresh=False, screen=True) as live:
            before: Snapshot | None = None
            while True:
                now = take_snapshot(client)
                size = shown.size
                recent = now if before is None else since(before, now)
                live.update(render_top(recent, client.url, size.width, size.height), refresh=True)
                before = now
                time.sleep(TOP_EVERY_S)


def take_snapshot(client: Client) -> Snapshot:
    tenants = []
    for info in client.tenants.list():
        acting = client.acting_for(info.tenant)
        jobs = [
            job.info
            for state in (JobState.RUNNING, JobState.QUEUED)
            for job in acting.jobs.list(state=state)
        ]
        report = acting.usage(days=1)
        tenants.append(
            TenantNow(
                tenant=info,
                jobs=jobs,
                today=report.today,
                live_runs=report.live_runs,
                stored_bytes=report.stored_bytes,
            )
        )
    return Snapshot(machine=client.machine(), tenants=tenants)


def since(before: Snapshot, now: Snapshot) -> Snapshot:
    """Return a snapshot whose workers' times are those between two, not those since the start."""
    earlier = {stats.name: stats for stats in before.machine.workers}
    workers = [_between(earlier.get(stats.name), stats) for stats in now.machine.workers]
    return replace(now, machine=replace(now.machine, workers=workers))


def _between(before: WorkerStats | None, now: WorkerStats) -> WorkerStats:
    # A worker that was started anew begins at zero, and figures may be the same ones again.
    if before is None or now.elapsed_s <= before.elapsed_s:
        return now
    busy_s = {kind: total - before.busy_s.get(kind, 0.0) for kind, total in now.busy_s.items()}
    return replace(now, elapsed_s=now.elapsed_s - before.elapsed_s, busy_s=busy_s)


def render_top(snapshot: Snapshot, url: str, width: int, height: int) -> RenderableType:
    """Return the page, never more than `height` lines."""
    machine = snapshot.machine
    heading = (
        f"{url}   {machine.base}   event loop {1000 * machine.loop_lag_s:.0f} ms late   "
        f"server {display.count(machine.server_rss_bytes)}B   {machine.num_streams} streams"
    )
    parts: list[RenderableType] = [Text(heading, style="bold", no_wrap=True, overflow="ellipsis")]
    if machine.workers:
        parts += [Text(""), *display.worker_bars(machine.workers, width, max(1, height // 4))]
    parts += [Text(notice_line(notice), style="bold yellow") for notice in machine.notices[:3]]
    busy = sorted(
        snapshot.tenants, key=lambda now: (-len(now.jobs) - now.live_runs, now.tenant.tenant)
    )
    room = max(4, height - len(parts) - (len(machine.workers) if machine.workers else 0) - 6)
    parts += [Text(""), _tenants(busy[: room // 2])]
    waiting = [
        (now.tenant.tenant, job)
        for now in snapshot.tenants
        for job in now.jobs
        if job.state is JobState.QUEUED
    ]
    if waiting:
        waiting.sort(key=lambda row: row[1].place or 0)
        parts += [Text(""), _queue(waiting[: max(1, room // 2 - 2)])]
    return Stack(*parts)


def notice_line(notice: Notice) -> str:
    job = f" {notice.tenant}/{notice.job}" if notice.job else ""
    return f"{notice.stage}{job}: {notice.cause}, for {display.seconds(notice.since_s)}"


def _tenants(rows: list[TenantNow]) -> Table:
    numbers = (
        *("weight", "running", "queued", "runs", "sampled", "trained", "served", "device"),
        "stored",
    )
    table = new_table("tenant today", *numbers, right=numbers)
    for now in rows:
        states = [job.state for job in now.jobs]
        table.add_row(
            now.tenant.tenant,
            f"{now.tenant.weight:g}",
            str(states.count(JobState.RUNNING)),
            str(states.count(JobState.QUEUED)),
            str(now.live_runs),
            display.count(now.today.sampled_tokens),
            display.count(now.today.trained_tokens),
            display.count(now.today.served_tokens),
            display.seconds(now.today.device_s),
            f"{display.count(now.stored_bytes)}B",
        )
    return table


def _queue(rows: list[tuple[str, JobInfo]]) -> Table:
    table = new_table("place", "queued job", "starts in", "because", right=("place", "starts in"))
    for tenant, job in rows:
        table.add_row(
            "·" if job.place is None else str(job.place),
            Text(f"{tenant}/{job.name}"),
            "·" if job.starts_in_s is None else display.seconds(job.starts_in_s),
            Text(job.waits_for),
        )
    return table
