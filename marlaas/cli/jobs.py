"""`marlaas jobs`, `pause`, `resume`, `cancel`, `delete`, `logs`: jobs from the command line."""

import argparse
from collections.abc import Iterable
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from marlaas.cli import display
from marlaas.cli.connection import (
    connected,
    console,
    located,
    new_table,
    print_json,
    print_json_line,
    tenants_in_view,
)
from marlaas.client.records import JobInfo
from marlaas.types import Event, EventKind, Role


def list_jobs(args: argparse.Namespace) -> int:
    """List jobs, of every tenant if an operator names none."""
    with connected(args) as client:
        rows = [
            (tenant, job.info)
            for tenant, acting in tenants_in_view(client, args).items()
            for job in acting.jobs.list(state=args.state)
        ]
        has_owners = not args.json and client.whoami().role is Role.OPERATOR
    if args.json:
        print_json([job_row(*row) for row in rows])
    elif rows:
        console().print(job_table(rows, has_owners=has_owners))
    else:
        print("No jobs. Hand some over: marlaas submit JOBS.yaml")
    return 0


def job_row(tenant: str, info: JobInfo) -> dict[str, object]:
    """Return a job as a script gets it."""
    return {"tenant": tenant, **{name: getattr(info, name) for name in JobInfo.__slots__}}


def job_table(rows: Iterable[tuple[str, JobInfo]], *, has_owners: bool) -> Table:
    """Return a line a job: how far it is, what it used, what it waits for.

    `has_owners` says whose it is, which a tenant knows of its own.
    """
    table = new_table(
        "job", "state", "step", "left", "tokens", "device", "because", right=("step", "tokens")
    )
    for tenant, info in rows:
        used = info.usage.sampled_tokens + info.usage.trained_tokens
        left = info.ends_in_s if info.state.is_active else None
        table.add_row(
            Text(f"{tenant}/{info.name}" if has_owners else info.name),
            Text(str(info.state), style=display.STATE_STYLES[info.state]),
            f"{info.step}/{info.steps}",
            "" if left is None else display.seconds(left),
            display.count(used),
            display.seconds(info.device_s),
            Text(_because(info), overflow="ellipsis"),
        )
    return table


def _because(info: JobInfo) -> str:
    words = info.reason or info.waits_for
    if info.place is None:
        return words
    starts = "" if info.starts_in_s is None else f", starts in {display.seconds(info.starts_in_s)}"
    return f"place {info.place}{starts}" + (f": {words}" if words else "")


def move(args: argparse.Namespace) -> int:
    """Pause, resume, cancel or delete jobs."""
    with connected(args) as client:
        for name in args.jobs:
            acting, own_name = located(client, args, name)
            job = acting.jobs.get(own_name)
            if args.verb == "delete":
                job.delete()
                print(f"{name}: deleted")
                continue
            moved = {"pause": job.pause, "resume": job.resume, "cancel": job.cancel}[args.verb]()
            print(f"{name}: {moved.state}" + (f" ({moved.reason})" if moved.reason else ""))
    return 0


def logs(args: argparse.Namespace) -> int:
    """Print what the tenant's own code said, and what stood still."""
    with connected(args) as client:
        acting, name = located(client, args, args.job)
        for event in acting.jobs.get(name).logs(after=args.after, follow=args.follow):
            if args.json:
                print_json_line(event)
            else:
                print(log_line(event), flush=True)
    return 0


def log_line(event: Event) -> str:
    """Return a line of the log: when it was, and what."""
    at = datetime.fromtimestamp(event.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    data = event.data
    if event.kind is EventKind.NOTICE:
        return f"{at}  [{data['stage']}] {data['cause']}"
    return f"{at}  {data['text']}"
