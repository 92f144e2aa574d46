"""`marlaas adapters`: the versions of a job, and what can be done with one."""

import argparse
from pathlib import Path

from rich.table import Table

from marlaas.cli.connection import connected, console, located, new_table, print_json
from marlaas.client.jobs import VersionName
from marlaas.client.records import Version
from marlaas.errors import InvalidRequest

NAMED = ("latest", "best", "promoted")


def command(args: argparse.Namespace) -> int:
    """List versions, or download, promote or merge one."""
    version = version_of(args.version)
    if args.out is not None and args.action not in ("download", "merged"):
        raise InvalidRequest(
            "--out: says where a download goes; expected download or merged with it"
        )
    with connected(args) as client:
        acting, name = located(client, args, args.job)
        job = acting.jobs.get(name)
        adapter = job.adapter(version)
        if args.action == "download":
            out = args.out or Path(f"{name}-{version}")
            print(f"PEFT folder: {adapter.download(out)}")
        elif args.action == "merged":
            out = args.out or Path(f"{name}-{version}-merged")
            print(f"Model folder: {adapter.merged(out)}")
        elif args.action == "promote":
            print(f"{name}@promoted is now version {adapter.promote().version}")
        elif args.json:
            print_json(job.versions())
        else:
            console().print(version_table(job.versions()))
    return 0


def version_of(text: str) -> VersionName:
    """Return a version by number or by name.

    Raises:
        InvalidRequest: it is neither.
    """
    if text.isdecimal():
        return int(text)
    if text not in NAMED:
        raise InvalidRequest(f"--version: got {text!r}; expected a number or {', '.join(NAMED)}")
    return text


def version_table(versions: list[Version]) -> Table:
    numbers = ("version", "held-out success")
    table = new_table("version", "held-out success", "is", "kept", "hash", right=numbers)
    for version in versions:
        names = ("latest", "best", "promoted")
        marks = [name for name in names if getattr(version, f"is_{name}")]
        kept = [
            word
            for word, is_kept in (("adapter", version.has_adapter), ("state", version.has_state))
            if is_kept
        ]
        table.add_row(
            str(version.version),
            "·" if version.success is None else f"{version.success:.1%}",
            ", ".join(marks),
            ", ".join(kept),
            version.adapter_hash[:12],
        )
    return table
