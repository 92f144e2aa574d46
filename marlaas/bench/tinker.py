"""A Tinker server, ours or another one: start-up, every verb, one tenant and eight, whole RL loops.

    server: --server URL (runs already) | --start COMMAND | our own, on a free port
        │ start-up: until it answers, and until the first adapter is there
        ▼
    `tinker_client.py`, a process with the SDK of --python and --sdk ─► rows ─► table, JSON

- All servers are measured by the same lines, with whatever version of the SDK they need; only the
  time that a client sees counts.
- *before*: what came first and is not measured: start-up, compilation, warm-up.
- *train step*: forward_backward and optim_step, submitted together. *publish*: until the server
  has new weights to sample (some load them only then). *load*: a checkpoint with the optimizer's
  state, into a new adapter. *rl loop*: (publish, sample, train) again and again; several tenants do
  so without regard to each other; its tokens are the sampled ones.
- Medians over repetitions; with several tenants all begin at once and the last one ends it.
- `--against FILE` compares with what another run wrote by `--out FILE`: same plan, same machine.
  The first batch's log-likelihood under the base tells whether both computed the same model.

Our service gets a tenant with a key of its own for every tenant of the plan, without limits. Of a
server that runs already, give one key, or one for each tenant.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from marlaas import runtime
from marlaas.bench import tinker_client
from marlaas.bench.machine import describe
from marlaas.bench.processes import resident_bytes
from marlaas.errors import InvalidRequest
from marlaas.store.db import Store
from marlaas.text.bases import ensure_base
from marlaas.types import OPERATOR, Quotas, Role, Tenant, TenantId

START_LIMIT_S = 600.0
END_LIMIT_S = 30.0
POLL_S = 0.1

OWN_BASE, OWN_QUICK_BASE = "smollm2-135m", "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the measured server is, and what is known of it from outside."""

    url: str
    keys: list[str]
    base_model: str
    start_s: float | None = None
    """From its start to its first answer; None if it ran already."""
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def memory_gb(self) -> float | None:
        """Return what all its processes hold in memory now."""
        return resident_bytes(self.process.pid) / 1e9 if self.process is not None else None


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    plan = tinker_client.plan_of(args)
    other = _read_other(args.against, plan) if args.against else None
    environment = _client_environment(args.sdk)
    if not _has_sdk(args.python, environment):
        print(tinker_client.NO_SDK.format(python=args.python), file=sys.stderr)
        return 2
    with _server(args, plan) as server:
        measured = _run_client(args, plan, server, environment)
        memory_gb = server.memory_gb
    result = {
        "bench": "tinker",
        "name": args.name,
        "machine": describe(),
        **summarize(measured, start_s=server.start_s, memory_gb=memory_gb),
    }
    if other is not None:
        result["against"] = other["name"]
        result["times_as_fast"] = times_as_fast(result["rows"], other["rows"])
        result["nll_difference"] = difference(result["nll"], other["nll"])
    _print(Console(), result)
    line = json.dumps(result)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="marlaas bench tinker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--server", metavar="URL", help="a server that runs (default: our own)")
    where.add_argument("--start", metavar="COMMAND", help="starts a server at {port}, in front")
    parser.add_argument("--name", default="", help="what to call the server in the results")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the client")
    parser.add_argument("--sdk", type=Path, metavar="FOLDER", help="where its SDK lies, if apart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there too")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with such a file")
    tinker_client.add_flags(parser)
    args = parser.parse_args(argv)
    args.name = args.name or args.server or args.start or "marlaas"
    return args


# ---------------------------------------------------------------------------------------------
# The server


@contextmanager
def _server(args: argparse.Namespace, plan: tinker_client.Plan) -> Iterator[Server]:
    """Yield the server that the flags ask for; one that is started here ends with the block."""
    if args.server:
        yield Server(url=args.server, keys=args.key, base_model=args.base_model)
    elif args.start:
        port = _free_port()
        command = [part.replace("{port}", str(port)) for part in shlex.split(args.start)]
        with _started(command, port, args.key, args.base_model) as server:
            yield server
    else:
        base = args.base_model or (OWN_QUICK_BASE if args.quick else OWN_BASE)
        ensure_base(base)
        with tempfile.TemporaryDirectory(prefix="marlaas-bench-") as folder:
            keys, port = _make_tenants(Path(folder), plan.tenants), _free_port()
            command = [sys.executable, "-m", "marlaas.cli.main", "serve"]
            command += ["--data", folder, "--base", base, "--port", str(port)]
            with _started(command, port, keys, base) as server:
                yield server


def _make_tenants(folder: Path, number: int) -> list[str]:
    """Return the keys of new tenants without limits, in a folder that nobody serves yet.

    There is an operator's key too, so that the service does not make one and show it.
    """
    no_limits = Quotas(**dict.fromkeys((field.name for field in fields(Quotas)), None))
    store = Store.open(folder)
    try:
        store.add_key(OPERATOR, role=Role.OPERATOR, label="marlaas bench tinker")
        keys: list[str] = []
        for index in range(number):
            tenant = Tenant(tenant_id=TenantId(f"tenant-{index}"), quotas=no_limits)
            store.add_tenant(tenant)
            keys.append(store.add_key(tenant.tenant_id, role=Role.TENANT)[1])
        return keys
    finally:
        store.close()


@contextmanager
def _started(
    command: Sequence[str], port: int, keys: list[str], base_model: str
) -> Iterator[Server]:
    """Run a command that serves at a port, in a group of its own, from its first answer on."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        began_s = runtime.now_s()
        # Whoever ends the benchmark must not leave a server of gigabytes behind.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while not _answers(url, keys):
                if process.poll() is not None or runtime.now_s() - began_s > START_LIMIT_S:
                    raise RuntimeError(f"the server does not start:\n{_last_words(log)}")
                time.sleep(POLL_S)
            start_s = runtime.now_s() - began_s
            yield Server(
                url=url, keys=keys, base_model=base_model, start_s=start_s, process=process
            )
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, before)


def _answers(url: str, keys: Sequence[str]) -> bool:
    headers = {"X-API-Key": keys[0] if keys else tinker_client.NO_KEY}
    try:
        return httpx.get(f"{url}/api/v1/healthz", headers=headers, timeout=5.0).is_success
    except httpx.TransportError:
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a server and whatever it has started, first by asking."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(END_LIMIT_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _last_words(log: Any) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-4000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------------------------------------
# The client


def _client_environment(sdk: Path | None) -> dict[str, str]:
    return {**os.environ, **({"PYTHONPATH": str(sdk.resolve())} if sdk else {})}


def _has_sdk(python: str, environment: Mapping[str, str]) -> bool:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tinker') is None)"
    # In a folder of its own: the current one may hold a module of that name.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([python, "-c", look], check=False, env=dict(environment), cwd=folder)
    return done.returncode == 0


def _run_client(
    args: argparse.Namespace,
    plan: tinker_client.Plan,
    server: Server,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return what the client measured; its progress goes to the terminal."""
    command = [args.python, tinker_client.__file__, "--server", server.url]
    command += [*tinker_client.flags_of(plan)]
    if server.base_model:
        command += ["--base-model", server.base_model]
    if server.keys:
        command += ["--key", *server.keys]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, env=dict(environment))
    if done.returncode:
        raise RuntimeError(f"the client ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------
# What it amounts to


def summarize(
    measured: Mapping[str, Any], *, start_s: float | None, memory_gb: float | None
) -> dict[str, Any]:
    """Return what the client measured, with start-up, memory and every failure by name."""
    rows = measured["rows"]
    created = next((row for row in rows if row["name"] == "create"), None)
    first_s = created["first_s"] if created else None
    ready_s = None if start_s is None or first_s is None else start_s + first_s
    return {
        **{name: value for name, value in measured.items() if name != "bench"},
        "start_s": start_s,
        "ready_s": ready_s,
        "memory_gb": memory_gb,
        "warm_up_s": sum(row["first_s"] or 0.0 for row in rows),
        "failed": [_key(row) for row in rows if row["error"]],
    }


def times_as_fast(
    rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return our pace over the other's of every row that both have: tokens a second where there
    are tokens, since answers may end early, otherwise times a second."""
    theirs = {_key(row): pace for row in others if (pace := _pace(row))}
    return {
        key: pace / theirs[key]
        for row in rows
        if (key := _key(row)) in theirs and (pace := _pace(row))
    }


def difference(ours: float | None, theirs: float | None) -> float | None:
    """Return how far two values lie apart; None where one is missing."""
    return None if ours is None or theirs is None else abs(ours - theirs)


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['name']}, {row['tenants']}"


def _pace(row: Mapping[str, Any]) -> float | None:
    if row["error"] or not row["median_s"]:
        return None
    return row["tokens_per_s"] or 1 / row["median_s"]


def _read_other(path: Path, plan: tinker_client.Plan) -> dict[str, Any]:
    """Return another run's result.

    Raises:
        InvalidRequest: it did something else.
    """
    other = json.loads(path.read_text())
    mine = {field.name: getattr(plan, field.name) for field in fields(plan)}
    if other.get("bench") != "tinker" or other.get("plan") != mine:
        raise InvalidRequest(
            f"--against: {path} was measured with {other.get('plan')}; this run has {mine}"
        )
    return other


def _print(console: Console, result: Mapping[str, Any]) -> None:
    console.print(_table(result))
    if "nll_difference" in result:
        apart = _shown(result["nll_difference"], 6)
        console.print(f"the first batch's log-likelihood differs by {apart} nats a token")
    console.print(
        f"start {_shown(result['start_s'], 1)} s, first adapter after "
        f"{_shown(result['ready_s'], 1)} s, warm-up {_shown(result['warm_up_s'], 1)} s, "
        f"memory {_shown(result['memory_gb'], 1)} GB; client {result['client_cpu_s']:.1f} s of CPU"
    )
    for row in result["rows"]:
        if row["error"]:
            console.print(f"{_key(row)}: {row['error']}", markup=False)


def _table(result: Mapping[str, Any]) -> Table:
    ratios = result.get("times_as_fast")
    plan = result["plan"]
    against = f" against {result['against']}" if ratios is not None else ""
    table = Table(
        title=f"{result['name']}{against}, tinker SDK {result['sdk']}",
        caption=f"{plan['samples']} x ({plan['prompt_tokens']} + {plan['answer_tokens']}) tokens "
        f"a tenant, rank {plan['rank']}; {plan['repeats']} repetitions",
    )
    columns = ["measure", "tenants", "before s", "median s", "range s", "tokens/s"]
    if ratios is not None:
        columns.append("times as fast")
    for name in columns:
        table.add_column(name, justify="left" if name == "measure" else "right", no_wrap=True)
    for row in result["rows"]:
        seconds = row["seconds"]
        cells = [
            row["name"],
            str(row["tenants"]),
            _shown(row["first_s"], 1),
            "failed" if row["error"] else _shown(row["median_s"], 3),
            f"{min(seconds):.3f} - {max(seconds):.3f}" if len(seconds) > 1 else "",
            _shown(row["tokens_per_s"], 1),
        ]
        if ratios is not None:
            cells.append(_shown(ratios.get(_key(row)), 2))
        table.add_row(*cells)
    return table


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
