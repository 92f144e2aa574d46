"""`marlaas runs`: what Tinker clients drive; whose it is, how far, and what it holds."""

import argparse
from collections.abc import Iterable
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from marlaas import runtime
from marlaas.cli import display
from marlaas.cli.connection import connected, console, new_table, print_json, tenants_in_view
from marlaas.client.records import RunInfo
from marlaas.types import Role


def command(args: argparse.Namespace) -> int:
    """List runs, of every tenant if an operator names none."""
    with connected(args) as client:
        rows = [
            (tenant, info)
            for tenant, acting in tenants_in_view(client, args).items()
            for info in acting.runs()
            if info.is_live or not args.live
        ]
        has_owners = not args.json and client.whoami().role is Role.OPERATOR
    if args.json:
        print_json([{"tenant": tenant, **asdict(info)} for tenant, info in rows])
    elif rows:
        console().print(run_table(rows, now_s=runtime.wall_time_s(), has_owners=has_owners))
    else:
        print("No runs. docs/tinker.md says how a script of yours makes one.")
    return 0


def run_table(rows: Iterable[tuple[str, RunInfo]], *, now_s: float, has_owners: bool) -> Table:
    """Return a line a run. `has_owners` says whose it is, which a tenant knows of its own."""
    numbers = ("rank", "step", "waiting", "checkpoints", "stored", "used")
    owner = ("tenant",) if has_owners else ()
    table = new_table(*owner, "run", "state", *numbers, right=numbers)
    for tenant, info in rows:
        table.add_row(
            *((tenant,) if has_owners else ()),
            Text(info.run),
            "live" if info.is_live else "over",
            str(info.rank),
            str(info.version),
            str(info.num_waiting),
            str(info.num_checkpoints),
            f"{display.count(info.stored_bytes)}B",
            f"{display.seconds(max(0.0, now_s - info.used_s))} ago",
        )
    return table
