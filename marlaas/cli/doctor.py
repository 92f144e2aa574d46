"""`marlaas doctor`: what this machine can do, what is missing, and what to do about it.

Every check returns one `Finding` and never raises. Torch is looked at in a process of its own, so
that a broken installation is a finding and not a crash. The exit code is 1 only when something
that every run needs is missing.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlaas import __version__
from marlaas.envs import control_groups
from marlaas.envs.sandbox import Sandbox
from marlaas.errors import InvalidRequest, MarlaasError
from marlaas.text.bases import CONVERTED_BASES, PACKAGED_BASES, resolve_base

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 2 << 30
"""Two workers on the smallest base with torch loaded."""
MIN_DISK_BYTES = 1 << 30
TORCH_TIMEOUT_S = 120.0
"""Importing torch from a cold disk can take a minute."""

_TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "gpus": gpus}))
"""


class Status(StrEnum):
    """How a thing was found."""

    OK = "ok"
    ABSENT = "absent"
    """Optional, and not there."""
    MISSING = "missing"
    """Nothing runs without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    name: str
    status: Status
    detail: str
    advice: str = ""
    """What to do about it; empty when there is nothing to do."""


def command(args: argparse.Namespace) -> int:
    """Print all findings; return 1 when something essential is missing."""
    findings = look()
    console = Console(highlight=False)
    console.print(table_of(findings))
    missing = [finding.name for finding in findings if finding.status is Status.MISSING]
    console.print()
    if missing:
        console.print(f"Missing: {', '.join(missing)}. Nothing can run until that is put right.")
        return 1
    console.print("Everything that a run needs is there.")
    return 0


def look() -> list[Finding]:
    """Return every finding, essentials first."""
    findings = [_python(), *_torch(), _package("transformers", is_essential=True)]
    findings += [_cores(), _memory(), _disk(), _sandbox()]
    findings += [_base(name) for name in (*PACKAGED_BASES, *CONVERTED_BASES)]
    findings += [_package("peft"), _package("gguf")]
    return findings


def table_of(findings: Sequence[Finding]) -> Table:
    """Return the findings as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {Status.OK: "green", Status.ABSENT: "yellow", Status.MISSING: "bold red"}
    for finding in findings:
        words = Text(finding.detail)
        if finding.advice:
            words.append(f"\n{finding.advice}", style="bold")
        status = Text(finding.status.value, style=styles[finding.status])
        table.add_row(finding.name, status, words)
    return table


# ---------------------------------------------------------------------------------------------
# The checks


def _python() -> Finding:
    version = platform.python_version()
    is_right = sys.version_info >= MIN_PYTHON and sys.platform == "linux"
    return Finding(
        name="python",
        status=Status.OK if is_right else Status.MISSING,
        detail=f"{version} on {platform.system()} {platform.machine()}, marlaas {__version__}",
        advice="" if is_right else "Python 3.11 or newer on Linux is needed.",
    )


def _torch() -> list[Finding]:
    """Return what torch says of itself, and of the GPUs it sees."""
    advice = "Install it: pip install 'torch>=2.8'"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding(name="torch", status=Status.MISSING, detail=str(error), advice=advice)]
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return [Finding(name="torch", status=Status.MISSING, detail=last, advice=advice)]
    found = json.loads(probe.stdout.splitlines()[-1])
    gpus = ", ".join(found["gpus"])
    return [
        Finding(
            name="torch",
            status=Status.OK,
            detail=f"{found['version']}, {found['threads']} threads by default",
        ),
        Finding(
            name="gpu",
            status=Status.OK if gpus else Status.ABSENT,
            detail=gpus or "torch sees none: engines run on the CPU",
        ),
    ]


def _package(name: str, *, is_essential: bool = False) -> Finding:
    if importlib.util.find_spec(name) is not None:
        version = importlib.metadata.version(name)
        return Finding(name=name, status=Status.OK, detail=version)
    uses = {
        "peft": "only needed to load adapters elsewhere",
        "gguf": "only needed for bases in GGUF form",
    }
    return Finding(
        name=name,
        status=Status.MISSING if is_essential else Status.ABSENT,
        detail=uses.get(name, "not installed"),
        advice=f"Install it: pip install {name if is_essential else f'marlaas[{name}]'}",
    )


def _cores() -> Finding:
    num_cores = len(os.sched_getaffinity(0))
    detail = f"{num_cores}, load {os.getloadavg()[0]:.1f}"
    quota = _cpu_quota()
    if quota is not None and quota < num_cores:
        detail += f", of which the container may use {quota:.1f}"
    return Finding(name="cores", status=Status.OK, detail=detail)


def _cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """Return the cores that the control group may use, when it says so."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as error:
        return Finding(name="memory", status=Status.ABSENT, detail=f"cannot be read: {error}")
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    free, total = kilobytes["MemAvailable"] << 10, kilobytes["MemTotal"] << 10
    is_enough = free >= MIN_MEMORY_BYTES
    return Finding(
        name="memory",
        status=Status.OK if is_enough else Status.MISSING,
        detail=f"{_gib(free)} available of {_gib(total)}",
        advice="" if is_enough else f"At least {_gib(MIN_MEMORY_BYTES)} is needed: free some.",
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    is_enough = free >= MIN_DISK_BYTES
    return Finding(
        name="disk",
        status=Status.OK if is_enough else Status.MISSING,
        detail=f"{_gib(free)} free in {Path.cwd()}",
        advice="" if is_enough else f"A run folder may need {_gib(MIN_DISK_BYTES)}: free some.",
    )


def _sandbox() -> Finding:
    """Return whether code can be contained; without that only the families that run code fail."""
    try:
        problem = asyncio.run(Sandbox.probe())
    except (OSError, MarlaasError) as error:
        problem = str(error)
    if not problem:
        detail = f"code of models and tenants is contained; {control_groups.in_words()}"
        return Finding(name="sandbox", status=Status.OK, detail=detail)
    return Finding(
        name="sandbox",
        status=Status.ABSENT,
        detail=problem,
        advice="Jobs of the families code and custom cannot run here. Bubblewrap needs user "
        "namespaces.",
    )


def _base(name: str) -> Finding:
    try:
        folder = resolve_base(name)
    except InvalidRequest as error:
        return Finding(name=f"base {name}", status=Status.ABSENT, detail=str(error))
    if (folder / "model.safetensors").is_file() or list(folder.glob("*.safetensors")):
        return Finding(name=f"base {name}", status=Status.OK, detail=str(folder))
    return Finding(
        name=f"base {name}",
        status=Status.MISSING if name in PACKAGED_BASES else Status.ABSENT,
        detail=f"{folder} holds no weights",
        advice="Install marlaas anew." if name in PACKAGED_BASES else "",
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
