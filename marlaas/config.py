"""Frozen settings of the machine side, read once and printed at start. A tenant's knobs are in
`types.JobSpec`, not here.

    file (YAML or TOML)  <  MARLAAS_* environment variables  <  flags  ──► ServeSettings

`read_serve_settings` reads the service's settings strictly. `resolve` turns what the operator asked
for into what will run, filling in everything that depends on the machine; nothing changes after
that.
"""

import contextlib
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import yaml

from marlaas.errors import InvalidRequest


class Placement(StrEnum):
    """Which workers sample and which train."""

    REPLICATED = "replicated"
    """Every worker does both for its share of the policies; no core waits for the other stage."""
    SPLIT = "split"
    """One worker trains, the others sample; adapters are carried over at publish."""


class Durability(StrEnum):
    """Which end of a process or machine leaves everything that was recorded on disk."""

    PROCESS = "process"
    """A kill. Files are renamed into place and never synced: a step pays nothing for it."""
    POWER = "power"
    """A loss of power, too. Snapshots and adapters are synced, with the folders that name them,
    before their row is written: a few milliseconds a step on an SSD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the operator asks for; None means: choose for this machine."""

    num_workers: int | None = None
    placement: Placement = Placement.REPLICATED
    kv_capacity_tokens: int | None = None
    max_batch: int | None = None
    """Sequences in one worker's decode batch."""
    pass_memory_bytes: int | None = None
    """Most memory that one training pass of a worker may take at its peak."""
    durability: Durability = Durability.PROCESS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything one engine worker is started with."""

    name: str
    base_name: str
    base_folder: str
    num_threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    kv_capacity_tokens: int = 65536
    max_batch: int = 64
    max_context: int = 2048
    prefill_budget_tokens: int = 512
    train_budget_tokens: int = 1024
    """Tokens of one fused training pass."""
    pass_memory_bytes: int = 4 << 30
    """Most memory that one training pass may take at its peak, as predicted."""
    is_exact: bool = False
    """Every result is independent of neighbours, bit for bit (seeded jobs need it)."""
    is_prepacked: bool = False
    """Keep copies of the base's weights for faster products, if they turn out faster here."""
    durability: Durability = Durability.PROCESS
    """How far the files that it writes are on disk when the call that wrote them is answered."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables to start the worker with, set before torch is loaded."""
        threads = str(self.num_threads)
        return {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }


def resolve(
    run: RunSettings,
    *,
    base_name: str,
    base_folder: str,
    max_context: int,
    kv_bytes_per_token: int,
    base_bytes: int,
    is_exact: bool = False,
) -> list[EngineSettings]:
    """Return the settings of every engine worker of a run.

    Raises:
        InvalidRequest: the combination cannot run here.
    """
    cores = len(os.sched_getaffinity(0))
    num_workers = run.num_workers or cores
    if num_workers < 1:
        raise InvalidRequest(f"workers: got {num_workers}; expected at least 1")
    if run.placement is Placement.SPLIT and num_workers < 2:
        raise InvalidRequest(
            "placement split needs at least 2 workers (one trains, the others sample); "
            "expected --workers 2 or more, or --placement replicated"
        )
    is_small = kv_bytes_per_token <= SMALL_KV_BYTES
    capacity = run.kv_capacity_tokens or _kv_capacity(kv_bytes_per_token, num_workers)
    is_prepacked = not is_exact and _has_room_to_prepack(base_bytes, num_workers)
    own_bytes = PROCESS_BYTES + capacity * kv_bytes_per_token + 2 * base_bytes * is_prepacked
    return [
        EngineSettings(
            name=f"engine-{idx}",
            base_name=base_name,
            base_folder=base_folder,
            # How threads share a product depends on its size, hence on the company.
            num_threads=1 if is_exact else max(1, cores // num_workers),
            kv_capacity_tokens=capacity,
            max_batch=run.max_batch or (128 if is_small else 64),
            train_budget_tokens=1024 if is_small else 256,
            max_context=max_context,
            is_exact=is_exact,
            is_prepacked=is_prepacked,
            pass_memory_bytes=run.pass_memory_bytes
            or _pass_memory(base_bytes, own_bytes, num_workers),
            durability=run.durability,
        )
        for idx in range(num_workers)
    ]


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

MIN_SLAB_TOKENS = 64
"""Capacity of the smallest slab of KV; each larger one doubles it."""


def slab_tokens(num_tokens: int) -> int:
    """Return the capacity of the smallest slab of KV that holds so many tokens."""
    return max(MIN_SLAB_TOKENS, 1 << max(0, num_tokens - 1).bit_length())


KV_MEMORY_SHARE = 0.25
"""Share of the machine's memory that all workers' KV may take together."""

MAX_KV_TOKENS = 1 << 18

SMALL_KV_BYTES = 8192
"""A base whose KV takes at most this much a token is small. A decode step is then mostly overhead,
which a batch of 128 halves against one of 64, and a training pass of 1,024 tokens takes about 0.1 s
on a core. On a larger base 256 tokens are a second or more already, and fuse as well."""


PREPACK_MEMORY_SHARE = 0.25
"""Share of the machine's memory that all workers' copies of the weights may take together: each has
one for forward and one for backward products."""


PROCESS_BYTES = 600 << 20
"""What a worker takes beside weights, KV, adapters and passes: the interpreter and torch."""

SPARE_MEMORY_SHARE = 0.25
"""Share of the machine's memory that is left to adapters, the server, sandboxes and the system."""

MIN_PASS_BYTES = 256 << 20
"""A worker's passes get as much in any case; a machine that has less is too small for the base."""


def _pass_memory(base_bytes: int, own_bytes: int, num_workers: int) -> int:
    """Return what is left for one worker's pass; `own_bytes` is what it holds all the time, and the
    base's pages are shared."""
    left_bytes = (1 - SPARE_MEMORY_SHARE) * _memory_bytes() - base_bytes
    return max(MIN_PASS_BYTES, int(left_bytes / num_workers) - own_bytes)


def _memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its control group's."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no control groups, or `max`
        memory_bytes = min(memory_bytes, int(CGROUP_LIMIT.read_text()))
    return memory_bytes


def _has_room_to_prepack(base_bytes: int, num_workers: int) -> bool:
    return 2 * base_bytes * num_workers <= PREPACK_MEMORY_SHARE * _memory_bytes()


def _kv_capacity(kv_bytes_per_token: int, num_workers: int) -> int:
    tokens = int(_memory_bytes() * KV_MEMORY_SHARE / num_workers / kv_bytes_per_token)
    return max(1024, min(MAX_KV_TOKENS, tokens // 1024 * 1024))


# ---------------------------------------------------------------------------------------------
# The service


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Everything an operator decides about a service."""

    base: str = "tiny"
    """Name of a base model, or path of a Hugging Face folder or GGUF file. One base a service."""
    folder: str = "marlaas-data"
    """Where the database and all files lie."""
    database: str = ""
    """`postgresql://USER:PASSWORD@HOST/NAME`; empty: SQLite in the folder."""
    durability: Durability = Durability.PROCESS
    """What a commit survives: `process` a kill, `power` a loss of power too."""
    host: str = "127.0.0.1"
    port: int = 8642
    """0 takes a free one."""
    forwarded_allow_ips: str = "127.0.0.1"
    """Proxies whose `X-Forwarded-*` headers are believed, comma-separated."""
    workers: int | None = None
    """Engine workers; none is one a core."""
    placement: Placement = Placement.REPLICATED
    kv_capacity_tokens: int | None = None
    max_batch: int | None = None
    """Sequences in one worker's decode batch."""
    pass_memory_bytes: int | None = None
    """Most memory that one training pass of a worker may take; none is what the machine leaves. It
    bounds how long trajectories may become."""
    exact: bool = False
    """Every result is independent of neighbours, bit for bit: slower, and needed by seeded jobs."""
    model_aliases: tuple[str, ...] = ()
    """Further names of the base for `tinker` clients, whose recipes know a model by its name on the
    hub: `Qwen/Qwen3-8B`. In text, separated by commas."""
    tokenizer_id: str = ""
    """Where `tinker` clients find the tokenizer, a folder or a name on the hub; empty: the base's
    own folder, right for clients on this machine."""
    max_running_jobs: int = 64
    """Jobs that run at once, all tenants together; the others queue."""
    gap_bound: float = 1e-3
    """Most |train - sampling logprob| under one version before a job is held."""
    max_body_bytes: int = 1 << 20
    """Largest JSON body."""
    max_tinker_body_bytes: int = 64 << 20
    """Largest request of a `tinker` client to train or sample, decompressed."""
    tinker_gap_s: float = 60.0
    """How long an operation of a `tinker` client waits for one of a smaller number that has not
    come; those behind it then fail."""
    max_upload_bytes: int = 64 << 20
    """Largest upload of prompts."""
    max_archive_bytes: int = 64 << 30
    """Largest adapter or merged model that may be downloaded."""
    max_streams: int = 10_000
    """Event streams open at once."""
    heartbeat_s: float = 15.0
    """A stream without events says so this often, so that proxies keep it open."""
    drain_s: float = 30.0
    """After SIGTERM: how long running steps may take to commit, and requests to end."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    trace_spans: int = 50_000
    """Newest spans kept for `/v1/trace`."""

    def engines(self) -> RunSettings:
        """Return what the engine workers are asked to be."""
        return RunSettings(
            num_workers=self.workers,
            placement=self.placement,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_batch=self.max_batch,
            pass_memory_bytes=self.pass_memory_bytes,
            durability=self.durability,
        )

    def shown(self) -> list[str]:
        """Return one line per setting, secrets masked."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        masked = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", self.database)
        values["database"] = re.sub(r"(password=)[^&]*", r"\1***", masked)
        return [f"{name}: {_as_written(value)}" for name, value in values.items()]


ENVIRONMENT_PREFIX = "MARLAAS_"
OTHER_VARIABLES = frozenset(
    {"MARLAAS_CACHE", "MARLAAS_URL", "MARLAAS_API_KEY", "MARLAAS_TEST_POSTGRES_URL"}
)
"""Variables with our prefix that are no settings of the service."""

_ENUMS: Mapping[str, type[StrEnum]] = {"durability": Durability, "placement": Placement}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(kind) for name, kind in _ENUMS.items()},
    "log_level": ("debug", "info", "warning", "error"),
}
_MAY_BE_EMPTY = frozenset({"database", "tokenizer_id"})
_RANGES: Mapping[str, tuple[float, float]] = {
    "port": (0, 65_535),
    "workers": (1, 256),
    "kv_capacity_tokens": (1024, 1 << 30),
    "max_batch": (1, 4096),
    "pass_memory_bytes": (1 << 24, 1 << 44),
    "max_running_jobs": (1, 10_000),
    "gap_bound": (1e-9, 1.0),
    "max_body_bytes": (1024, 1 << 30),
    "max_tinker_body_bytes": (1024, 1 << 30),
    "tinker_gap_s": (0.1, 3600.0),
    "max_upload_bytes": (1024, 4 << 30),
    "max_archive_bytes": (1 << 20, 1 << 50),
    "max_streams": (0, 1_000_000),
    "heartbeat_s": (0.05, 3600),
    "drain_s": (0, 3600),
    "trace_spans": (0, 10_000_000),
}


def read_serve_settings(
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    flags: Mapping[str, object] | None = None,
) -> ServeSettings:
    """Read the service's settings; a flag wins over a variable, and that over the file.

    A flag that is None was not given.

    Raises:
        InvalidRequest: names every unknown key and every value that cannot be.
    """
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in _file_values(file).items():
        typed = _from_text(str(name), value) if isinstance(value, str) else value
        _take(values, str(name), typed, f"{file}: {name}", problems)
    for variable, text in sorted(environment.items()):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            _take(values, name, _from_text(name, text), variable, problems)
    for name, value in (flags or {}).items():
        if value is not None:
            _take(values, name, value, f"--{name.replace('_', '-')}", problems)
    if problems:
        raise InvalidRequest(*problems)
    return ServeSettings(**values)


def _file_values(file: Path | None) -> Mapping[Any, object]:
    if file is None:
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        read = tomllib.loads(text) if file.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"{file}: cannot be read ({error})") from error
    if not isinstance(read or {}, Mapping):
        raise InvalidRequest(f"{file}: expected `setting: value` lines")
    return read or {}


def _take(
    values: dict[str, Any], name: str, value: object, place: str, problems: list[str]
) -> None:
    """Add one setting to `values`, or what is wrong with it to `problems`."""
    names = [field.name for field in fields(ServeSettings)]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"expected one of {', '.join(names)}"
        problems.append(f"{place}: unknown setting; {hint}")
        return
    if fault := _fault(name, value):
        problems.append(f"{place}: got {_masked(name, value)}; expected {fault}")
        return
    values[name] = _ENUMS[name](value) if name in _ENUMS else value
    if isinstance(value, list):
        values[name] = tuple(value)


def _fault(name: str, value: Any) -> str:
    """Return what would be right for a setting; empty if `value` is."""
    kind = {field.name: field.type for field in fields(ServeSettings)}[name]
    if kind == tuple[str, ...]:
        is_right = isinstance(value, list | tuple) and all(
            isinstance(one, str) and one for one in value
        )
        return "" if is_right else "a list of texts"
    kinds = get_args(kind) or (kind,)
    if name in _CHOICES:
        return "" if value in _CHOICES[name] else " or ".join(_CHOICES[name])
    if value is None and type(None) in kinds:
        return ""
    if kinds[0] is bool:
        return "" if isinstance(value, bool) else "true or false"
    if kinds[0] is str:
        return "" if isinstance(value, str) and (value or name in _MAY_BE_EMPTY) else "text"
    low, high = _RANGES[name]
    wanted = int if kinds[0] is int else int | float
    is_right = isinstance(value, wanted) and not isinstance(value, bool) and low <= value <= high
    word = "a whole number" if kinds[0] is int else "a number"
    return "" if is_right else f"{word} from {low:g} to {high:g}"


def _from_text(name: str, text: str) -> object:
    """Return what text stands for, typed as its setting is; YAML 1.1 takes 1e-3 for text too."""
    kind = {field.name: field.type for field in fields(ServeSettings)}.get(name)
    if kind == tuple[str, ...]:
        return [one.strip() for one in text.split(",")] if text.strip() else []
    kinds = get_args(kind) or (kind,)
    if kinds[0] is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                return text
    return text


def _masked(name: str, value: object) -> str:
    return "something else" if name == "database" else repr(value)


def _as_written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(value) or "[]"
    return str(value) if value != "" else '""'
