"""`marlaas tenants`, `keys` and `usage`: who may use the machine, how much, and what they used."""

import argparse
import sys
from collections.abc import Mapping

from rich.table import Table

from marlaas.cli import display
from marlaas.cli.connection import connected, console, new_table, print_json, tenants_in_view
from marlaas.client.records import KeyInfo, NewKey, TenantInfo, UsageReport
from marlaas.errors import InvalidRequest
from marlaas.types import Quotas, Usage

# ---------------------------------------------------------------------------------------------
# Tenants


def tenants(args: argparse.Namespace) -> int:
    """List, add, change or purge tenants."""
    if (args.action == "list") == (args.name is not None):
        raise InvalidRequest(f"tenants {args.action}: expected NAME with add, set and purge only")
    quotas = quotas_of(args)
    if args.action == "set" and not quotas and args.weight is None:
        raise InvalidRequest("tenants set: got nothing to set; expected --weight or a quota")
    if args.action in ("list", "purge") and (quotas or args.weight is not None):
        raise InvalidRequest(f"tenants {args.action}: sets nothing; expected add or set with flags")
    if args.action == "purge" and not args.yes and not _is_sure(args.name):
        raise InvalidRequest("tenants purge: not confirmed; nothing was removed")
    with connected(args) as client:
        if args.action == "list":
            _show(client.tenants.list(), is_json=args.json)
        elif args.action == "add":
            weight = 1.0 if args.weight is None else args.weight
            _show([client.tenants.create(args.name, weight=weight, **quotas)], is_json=args.json)
            print(f"A key for it: marlaas keys add --tenant {args.name}", file=sys.stderr)
        elif args.action == "set":
            changed = client.tenants.change(args.name, weight=args.weight, **quotas)
            _show([changed], is_json=args.json)
        else:
            client.tenants.purge(args.name)
            print(f"{args.name}: every row and file is gone")
    return 0


def _show(found: list[TenantInfo], *, is_json: bool) -> None:
    if is_json:
        print_json(found)
    else:
        console().print(tenant_table(found))


def quotas_of(args: argparse.Namespace) -> dict[str, float | None]:
    """Return the quotas that flags name; `none` lifts a limit.

    Raises:
        InvalidRequest: one is no number.
    """
    quotas: dict[str, float | None] = {}
    problems = []
    for name in Quotas.__slots__:
        text = getattr(args, name)
        if text is None:
            continue
        try:
            quotas[name] = None if text == "none" else float(text)
        except ValueError:
            flag = f"--{name.replace('_', '-')}"
            problems.append(f"{flag}: got {text!r}; expected a number, or none for no limit")
            continue
        value = quotas[name]
        if value is not None and value == int(value):
            quotas[name] = int(value)
    if problems:
        raise InvalidRequest(*problems)
    return quotas


def tenant_table(found: list[TenantInfo]) -> Table:
    numbers = (
        "weight",
        "max running",
        "max queued",
        "max runs",
        "max tokens a day",
        "max stored",
        "max CPU s a day",
        "max requests/s",
    )
    table = new_table("tenant", *numbers, right=numbers)
    for info in found:
        quotas = info.quotas
        table.add_row(
            info.tenant,
            f"{info.weight:g}",
            _limit(quotas.max_running_jobs),
            _limit(quotas.max_queued_jobs),
            _limit(quotas.max_runs),
            _limit(quotas.tokens_a_day),
            _limit(quotas.stored_bytes),
            _limit(quotas.sandbox_cpu_s_a_day),
            _limit(quotas.requests_a_second),
        )
    return table


def _limit(value: float | None) -> str:
    return "no limit" if value is None else display.count(value)


def _is_sure(name: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidRequest("tenants purge: expected --yes, since there is nobody to ask")
    return input(f"Remove {name} with all jobs, adapters and keys? Type its name: ") == name


# ---------------------------------------------------------------------------------------------
# Keys


def keys(args: argparse.Namespace) -> int:
    """List, add or revoke the keys of a tenant."""
    tenant = _owner(args)
    with connected(args) as client:
        if args.action == "list":
            found = client.tenants.keys(tenant)
            if args.json:
                print_json(found)
            else:
                console().print(key_table(found))
        elif args.action == "add":
            key = client.tenants.add_key(tenant, label=args.label)
            _hand_out(key, is_json=args.json)
        else:
            client.tenants.revoke_key(tenant, args.key_id)
            print(f"{args.key_id}: revoked")
    return 0


def _owner(args: argparse.Namespace) -> str | None:
    """Return the tenant whose keys are meant, None for the operators'.

    Raises:
        InvalidRequest: the flags do not go together.
    """
    if (args.action == "revoke") != (args.key_id is not None):
        raise InvalidRequest("keys: expected the id of a key with revoke, and only there")
    if (args.tenant is None) != args.operator:
        raise InvalidRequest("keys: expected either --tenant NAME or --operator")
    return args.tenant


def _hand_out(key: NewKey, *, is_json: bool) -> None:
    """Print a new key, the only time that it is seen; alone, so that a shell can take it."""
    if is_json:
        print_json(key)
        return
    print(f"Key {key.key_id}; it is shown this once:", file=sys.stderr)
    print(key.secret)


def key_table(found: list[KeyInfo]) -> Table:
    table = new_table("key", "label", "state")
    for key in found:
        table.add_row(key.key_id, key.label, "good" if key.revoked_s is None else "revoked")
    return table


# ---------------------------------------------------------------------------------------------
# Usage


def usage(args: argparse.Namespace) -> int:
    """Print what tenants used, by job and by day."""
    with connected(args) as client:
        clients = tenants_in_view(client, args)
        reports = {name: acting.usage(days=args.days) for name, acting in clients.items()}
    if args.json:
        print_json(reports)
    elif len(reports) == 1:
        (report,) = reports.values()
        by_job = {name or "(chat, tinker)": used for name, used in report.by_job.items()}
        for first, rows in (("day", report.by_day), ("job", by_job), ("", {"all": report.total})):
            console().print(usage_table(first, rows))
            print()
        print(f"{_bytes(report)} stored")
    else:
        rows = {name: report.total for name, report in reports.items()}
        stored = {name: _bytes(report) for name, report in reports.items()}
        console().print(usage_table("tenant", rows, stored))
    return 0


def usage_table(
    first: str, rows: Mapping[str, Usage], stored: Mapping[str, str] | None = None
) -> Table:
    numbers = ("sampled", "trained", "evaluated", "served", "prefill", "device", "sandbox CPU")
    if stored is not None:
        numbers = (*numbers, "stored")
    table = new_table(first, *numbers, right=numbers)
    for name, used in rows.items():
        last = () if stored is None else (stored[name],)
        table.add_row(
            name,
            display.count(used.sampled_tokens),
            display.count(used.trained_tokens),
            display.count(used.evaluated_tokens),
            display.count(used.served_tokens),
            display.count(used.prefill_tokens),
            display.seconds(used.device_s),
            display.seconds(used.sandbox_cpu_s),
            *last,
        )
    return table


def _bytes(report: UsageReport) -> str:
    return f"{display.count(report.stored_bytes)}B"
