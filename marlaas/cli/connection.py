"""What every command against a service shares: the client, whose things, JSON for scripts."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from marlaas.client import Client, Patience
from marlaas.errors import InvalidRequest
from marlaas.types import Role

PATIENCE = Patience(attempts=4)
"""A person who waits wants to hear soon that nobody answers; a stream is patient all the same."""


@contextmanager
def connected(args: argparse.Namespace) -> Iterator[Client]:
    """Open the client that the flags, the environment and the credentials file describe."""
    with Client(args.url, tenant=args.tenant, patience=PATIENCE) as client:
        yield client


def located(client: Client, args: argparse.Namespace, name: str) -> tuple[Client, str]:
    """Return a client that acts for the owner of a job, and the job's own name.

    A job is named `JOB` or `TENANT/JOB`, as the tables show it.

    Raises:
        InvalidRequest: it is nobody's, or another tenant's than the flag or the key says.
    """
    tenant, slash, job = name.rpartition("/")
    if not slash and args.tenant is not None:
        return client, job
    if args.tenant is not None:
        if tenant != args.tenant:
            raise InvalidRequest(f"{name}: is not of --tenant {args.tenant}; expected one of them")
        return client, job
    who = client.whoami()
    if who.role is Role.OPERATOR:
        if not slash:
            raise InvalidRequest(
                f"{name}: an operator's key acts for a tenant; expected --tenant NAME, or "
                f"NAME/{job}"
            )
        return client.acting_for(tenant), job
    if slash and tenant != who.tenant:
        raise InvalidRequest(f"{name}: the key is {who.tenant}'s; expected {who.tenant}/{job}")
    return client, job


def tenants_in_view(client: Client, args: argparse.Namespace) -> dict[str, Client]:
    """Return a client per tenant: the one that was named or has the key; for an operator, all."""
    if args.tenant is not None:
        return {args.tenant: client}
    who = client.whoami()
    if who.role is Role.TENANT:
        return {who.tenant: client}
    names = sorted(tenant.tenant for tenant in client.tenants.list())
    return {name: client.acting_for(name) for name in names}


def console() -> Console:
    """Return where tables go; a pipe is as wide as it needs to be."""
    shown = Console(highlight=False)
    return shown if shown.is_terminal else Console(highlight=False, width=200)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return a table without lines; columns named in `right` hold numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def print_json(value: object) -> None:
    """Print records as JSON for a script."""
    json.dump(as_json(value), sys.stdout, indent=2)
    print()


def print_json_line(value: object) -> None:
    print(json.dumps(as_json(value)), flush=True)


def as_json(value: Any) -> Any:
    """Return records and numbers as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value
