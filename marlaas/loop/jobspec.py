"""Reads a job document into `JobSpec`s, strictly, and reports every fault of every job at once.

    run:      {base: tiny, workers: 2, placement: replicated, mode: async}      # optional
    defaults: {steps: 20, learning_rate: 2e-3}                                  # optional
    jobs:
      - {tenant: acme, name: sums, env: {family: math}, algorithm: grpo}

- A job's own knob replaces the one in `defaults` whole; nothing is merged inside a knob.
- Nothing is ignored: an unknown key, a wrong type, a value out of range and a setting that could
  have no effect are all refused, each with its place, its line and what would be right.
- One bad knob hides no other: a check that needs a refused knob is skipped, the rest still run.

`read_jobs` takes parsed YAML or JSON; `marlaas.cli.jobfile` adds line numbers to a file's faults.
`read_job` takes one job as the service gets it.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from marlaas.config import Placement
from marlaas.envs.catalog import make_family
from marlaas.errors import InvalidRequest
from marlaas.loop import algorithms
from marlaas.types import (
    MAX_NAME_CHARS,
    RANK_BUCKETS,
    SEGMENT,
    TARGET_GROUPS,
    AdapterSpec,
    Fork,
    JobSpec,
    Latency,
    TenantId,
)

MODES = ("async", "lockstep")

Trail = tuple[str | int, ...]
"""Keys and indices from the top of a document down to a value."""

MAX_JOBS = 10_000
MAX_STEP_TRAJECTORIES = 16_384
"""Trajectories of one optimizer step; more than this fits no machine this runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """The `run:` section: how the jobs are run. None of it decides what a job learns."""

    base: str = "tiny"
    """Name of a base model, or path of a Hugging Face folder or GGUF file."""
    workers: int | None = None
    """Engine workers; None is one a core."""
    placement: Placement = Placement.REPLICATED
    mode: str = "async"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What a job file says."""

    run: RunSection
    jobs: tuple[JobSpec, ...]


def read_jobs(
    document: object,
    *,
    lines: Mapping[Trail, int] | None = None,
    problems: Sequence[str] = (),
    context_of: Callable[[str], int | None] | None = None,
) -> JobFile:
    """Turn a parsed document into jobs; `problems` are faults that its parser already saw.

    `lines` gives the line on which a value stands. `context_of` returns a base's context in tokens
    (None if it is not known yet) and raises `InvalidRequest` for a base that there is not.

    Raises:
        InvalidRequest: with one problem per fault.
    """
    top = Place(lines=lines or {}, problems=list(problems))
    if not isinstance(document, Mapping):
        raise InvalidRequest(
            *problems, f"job file: got {_shown(document)}; expected a mapping with a list `jobs`"
        )
    _refuse_unknown(document, ("run", "defaults", "jobs"), top)
    run = _read_run(document.get("run", {}), top / "run")
    max_context = _look_up(context_of, run.base, top / "run" / "base") if context_of else None
    defaults = Draft.read(document.get("defaults", {}), top / "defaults", _DEFAULT_KNOBS)
    jobs = _read_job_list(document.get("jobs"), top / "jobs", defaults, max_context)
    if top.problems:
        raise InvalidRequest(*top.problems)
    return JobFile(run=run, jobs=tuple(jobs))


def read_job(body: object, *, tenant: TenantId, max_context: int | None = None) -> JobSpec:
    """Turn one job, in a job file's words but for `tenant` and `replicate`, into a spec.

    Raises:
        InvalidRequest: with one problem per fault.
    """
    place = Place(lines={}, problems=[], title="job")
    if not isinstance(body, Mapping):
        raise InvalidRequest(f"job: got {_shown(body)}; expected a mapping")
    _refuse_unknown(body, tuple(ONE_JOB_KNOBS), place)
    known = {name: value for name, value in body.items() if name in ONE_JOB_KNOBS}
    draft = Draft.read({**known, "tenant": tenant}, place, _JOB_KNOBS)
    specs = _read_job(draft, place, max_context)
    if place.problems:
        raise InvalidRequest(*place.problems)
    return specs[0]


def describe_job(spec: JobSpec) -> dict[str, Any]:
    """Return a job in a job file's words, every knob resolved; reading it gives `spec` back."""
    fork = spec.fork
    forked = {} if fork is None else {"fork": {name: getattr(fork, name) for name in _FORK_KNOBS}}
    return forked | {
        "tenant": str(spec.tenant),
        "name": spec.name,
        "env": dict(spec.env),
        "algorithm": dict(spec.algorithm),
        "rank": spec.adapter.rank,
        "alpha": spec.adapter.alpha,
        "targets": list(spec.adapter.targets),
        "steps": spec.steps,
        "prompts_per_step": spec.prompts_per_step,
        "group_size": spec.group_size,
        "max_staleness": spec.max_staleness,
        "learning_rate": spec.learning_rate,
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "eval_every": spec.eval_every,
        "eval_prompts": spec.eval_prompts,
        "stop_at_success": spec.stop_at_success,
        "latency": {"median_s": spec.latency.median_s, "sigma": spec.latency.sigma},
        "rollout": "in_flight" if spec.is_in_flight else "pinned",
        "seeded": spec.is_seeded,
        "straggler_deadline_s": spec.straggler_deadline_s,
        "seed": spec.seed,
        "keep_versions": spec.keep_versions,
        "max_job_tokens": spec.max_job_tokens,
        "max_device_s": spec.max_device_s,
    }


# ---------------------------------------------------------------------------------------------
# Places and problems

"""Keys and indices from the top of the document down to a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a value stands in the document, and the one list that all problems go to."""

    lines: Mapping[Trail, int]
    problems: list[str]
    path: Trail = ()
    title: str = "job file"
    """What the document is called."""

    def __truediv__(self, key: str | int) -> "Place":
        return replace(self, path=(*self.path, key))

    def __str__(self) -> str:
        words = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return words.removeprefix(".") or self.title

    def refuse(self, problem: str, *, line_of: "Place | None" = None) -> None:
        """Report a fault here, with the line of the innermost value that has one."""
        path = (line_of or self).path
        for length in range(len(path), -1, -1):
            if line := self.lines.get(path[:length]):
                problem = f"{problem} (line {line})"
                break
        self.problems.append(f"{self}: {problem}")


class Refused(Exception):
    """One value is not what a knob takes; the reader that raises it knows what would be right."""


def _shown(value: object) -> str:
    """Return a value as its author wrote it, short enough for one line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 48 else text[:45] + "..."


def _refuse_unknown(mapping: Mapping[Any, object], known: Sequence[str], place: Place) -> None:
    for key in mapping:
        if key in known:
            continue
        if reason := _NEVER.get(key):
            (place / str(key)).refuse(f"cannot be set; {reason}")
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
        meant = _SYNONYMS.get(key) if _SYNONYMS.get(key) in known else next(iter(near), None)
        hint = f"did you mean `{meant}`?" if meant else f"expected one of {', '.join(known)}"
        (place / str(key)).refuse(f"unknown key; {hint}")


# ---------------------------------------------------------------------------------------------
# Readers: each takes a raw value, returns what the knob holds, or raises `Refused`

Reader = Callable[[Any, Place], Any]


def whole_number(low: int, high: int) -> Reader:
    """Read an integer in [low, high]."""

    def read(value: Any, _: Place) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            expected = f"expected a whole number from {low} to {high}"
            raise Refused(f"got {_shown(value)}; {expected}{_unquoted(value)}")
        return value

    return read


def number(low: float, high: float, *, is_open: bool = False) -> Reader:
    """Read a finite float in [low, high], or in (low, high] when `is_open`."""
    span = f"above {low:g}, at most {high:g}" if is_open else f"from {low:g} to {high:g}"

    def read(value: Any, _: Place) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (is_open and value == low):
            raise Refused(f"got {_shown(value)}; expected a number {span}{_unquoted(value)}")
        return float(value)

    return read


def _unquoted(value: object) -> str:
    """Return a hint for a number that was written as text."""
    is_quoted = isinstance(value, str) and re.fullmatch(r"[-+.0-9eE]*[0-9][-+.0-9eE]*", value)
    return ", without quotes" if is_quoted else ""


def choice(*names: str) -> Reader:
    """Read one of `names`."""

    def read(value: Any, _: Place) -> str:
        if not isinstance(value, str) or value not in names:
            near = difflib.get_close_matches(str(value), names, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise Refused(f"got {_shown(value)}; expected {' or '.join(names)}{hint}")
        return names[names.index(value)]

    return read


def _read_flag(value: Any, _: Place) -> bool:
    if not isinstance(value, bool):
        raise Refused(f"got {_shown(value)}; expected true or false")
    return value


def _read_segment(value: Any, _: Place) -> str:
    if not isinstance(value, str) or not SEGMENT.fullmatch(value):
        raise Refused(
            f"got {_shown(value)}; expected 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' or "
            "'-', the first a letter or digit (it names a folder)"
        )
    return value


def _refuse_shared(value: Any, _: Place) -> None:
    raise Refused(f"got {_shown(value)} for every job; expected it in each job that needs it")


def _read_base(value: Any, _: Place) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Refused(f"got {_shown(value)}; expected the name or path of a base model")
    return value


def _read_targets(value: Any, _: Place) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    expected = f"expected a list of {', '.join(TARGET_GROUPS)}, each at most once"
    if not isinstance(names, list) or not names:
        raise Refused(f"got {_shown(value) if value != [] else 'an empty list'}; {expected}")
    for name in names:
        if not isinstance(name, str) or name not in TARGET_GROUPS:
            raise Refused(f"got {_shown(name)} among the targets; {expected}")
    if len(set(names)) < len(names):
        raise Refused(f"names a target twice; {expected}")
    return tuple(name for name in TARGET_GROUPS if name in names)


def _read_latency(value: Any, place: Place) -> Latency:
    expected = "expected {median_s: SECONDS, sigma: SPREAD}, e.g. {median_s: 0.5, sigma: 1.0}"
    if not isinstance(value, Mapping):
        raise Refused(f"got {_shown(value)}; {expected}")
    draft = Draft.read(value, place, {"median_s": number(0, 3600), "sigma": number(0, 5)})
    latency = Latency(**draft.values)
    if draft.is_clean and latency.sigma > 0 and latency.median_s == 0:
        raise Refused(f"has a sigma and no median_s, so it would do nothing; {expected}")
    return latency


def _read_fork(value: Any, place: Place) -> Fork:
    expected = "expected {job: NAME, version: NUMBER, with_optimizer: true or false}"
    if not isinstance(value, Mapping):
        raise Refused(f"got {_shown(value)}; {expected}")
    draft = Draft.read(value, place, _FORK_KNOBS)
    if not draft.is_clean:
        raise Refused
    if not {"job", "version"} <= draft.values.keys():
        raise Refused(f"names no job or no version; {expected}")
    return Fork(**draft.values)


def _read_algorithm(value: Any, place: Place) -> Mapping[str, object]:
    mapping = {"preset": value} if isinstance(value, str) else value
    if not isinstance(mapping, Mapping) or not isinstance(mapping.get("preset", ""), str):
        raise Refused(
            f"got {_shown(value)}; expected the name of a preset, or {{preset: NAME, ...numbers}}; "
            f"presets are {', '.join(algorithms.PRESETS)}"
        )
    _check_elsewhere(algorithms.resolve, mapping, place)
    return mapping


def _read_env(value: Any, place: Place) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise Refused(f"got {_shown(value)}; expected {{family: NAME, ...its settings}}")
    _check_elsewhere(make_family, value, place)
    return value


def _check_elsewhere(
    check: Callable[[Mapping[str, object]], object], value: Mapping[str, object], place: Place
) -> None:
    """Let the owner of a mapping judge it; each problem gets the line of the key that it names."""
    try:
        check(value)
    except InvalidRequest as error:
        for problem in error.problems:
            words = re.findall(r"\w+", problem)
            key = next((key for key in value if str(key) in words), None)
            inner = place if key is None else place / key
            if problem.startswith(f"{key}: "):
                inner.refuse(problem.removeprefix(f"{key}: "))
            else:
                place.refuse(problem, line_of=inner)
        raise Refused from error


# ---------------------------------------------------------------------------------------------
# Knobs

_FORK_KNOBS: Mapping[str, Reader] = {
    "job": _read_segment,
    "version": whole_number(0, 1_000_000),
    "with_optimizer": _read_flag,
}
_JOB_KNOBS: Mapping[str, Reader] = {
    "tenant": _read_segment,
    "name": _read_segment,
    "env": _read_env,
    "algorithm": _read_algorithm,
    "rank": whole_number(1, RANK_BUCKETS[-1]),
    "alpha": number(0, 1024, is_open=True),
    "targets": _read_targets,
    "steps": whole_number(1, 100_000),
    "prompts_per_step": whole_number(1, 1024),
    "group_size": whole_number(1, 1024),
    "max_staleness": whole_number(0, 64),
    "learning_rate": number(0, 1, is_open=True),
    "max_tokens": whole_number(1, 32_768),
    "temperature": number(0, 10, is_open=True),
    "eval_every": whole_number(0, 100_000),
    "eval_prompts": whole_number(0, 100_000),
    "stop_at_success": number(0, 1),
    "latency": _read_latency,
    "rollout": choice("pinned", "in_flight"),
    "seeded": _read_flag,
    "straggler_deadline_s": number(0, 86_400, is_open=True),
    "seed": whole_number(0, 2**32 - 1),
    "keep_versions": whole_number(0, 10_000),
    "max_job_tokens": whole_number(0, 2**53),
    "max_device_s": number(0, 1e9),
    "fork": _read_fork,
    "replicate": whole_number(1, 1024),
}
ONE_JOB_KNOBS = tuple(name for name in _JOB_KNOBS if name not in ("tenant", "replicate"))
"""What one job of a known tenant may say."""

_REQUIRED = ("tenant", "name", "env")
_DEFAULT_KNOBS = {**_JOB_KNOBS, "name": _refuse_shared, "replicate": _refuse_shared}
_RUN_KNOBS: Mapping[str, Reader] = {
    "base": _read_base,
    "workers": whole_number(1, 256),
    "placement": choice(*Placement),
    "mode": choice(*MODES),
}

_TRUNCATION = (
    "a training job samples by temperature alone, because truncated sampling leaves the ratio of "
    "train to sampling probability undefined"
)
_NEVER: Mapping[object, str] = {
    "top_p": _TRUNCATION,
    "top_k": _TRUNCATION,
    "min_p": _TRUNCATION,
    "repetition_penalty": _TRUNCATION,
}
_SYNONYMS: Mapping[object, str] = {
    "lr": "learning_rate",
    "task": "env",
    "environment": "env",
    "family": "env",
    "user": "tenant",
    "preset": "algorithm",
    "loss": "algorithm",
    "r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "batch_size": "prompts_per_step",
    "prompts": "prompts_per_step",
    "num_generations": "group_size",
    "samples": "group_size",
    "staleness": "max_staleness",
    "max_new_tokens": "max_tokens",
    "num_steps": "steps",
    "epochs": "steps",
    "in_flight": "rollout",
    "repeat": "replicate",
    "base_model": "base",
    "model": "base",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The knobs of one mapping that could be read, and the names of those that could not."""

    values: Mapping[str, Any] = field(default_factory=dict)
    bad: frozenset[str] = frozenset()
    inherited: frozenset[str] = frozenset()
    """Knobs that `defaults` gave."""

    @property
    def is_clean(self) -> bool:
        return not self.bad

    @classmethod
    def read(cls, mapping: object, place: Place, knobs: Mapping[str, Reader]) -> "Draft":
        """Read every known key of `mapping`; report unknown keys and refused values."""
        if not isinstance(mapping, Mapping):
            place.refuse(f"got {_shown(mapping)}; expected a mapping")
            return cls(bad=frozenset(knobs))
        _refuse_unknown(mapping, tuple(knobs), place)
        values, bad = {}, set()
        for name, read in knobs.items():
            if name not in mapping:
                continue
            try:
                values[name] = read(mapping[name], place / name)
            except Refused as refused:
                bad.add(name)
                if refused.args:
                    (place / name).refuse(str(refused))
        return cls(values=values, bad=frozenset(bad))

    def over(self, defaults: "Draft") -> "Draft":
        """Return these knobs with the missing ones taken from `defaults`."""
        own = self.values.keys() | self.bad
        return Draft(
            values={**defaults.values, **self.values},
            bad=self.bad | defaults.bad - own,
            inherited=frozenset(defaults.values.keys() - own),
        )


def _read_run(mapping: object, place: Place) -> RunSection:
    return RunSection(**Draft.read(mapping, place, _RUN_KNOBS).values)


def _look_up(context_of: Callable[[str], int | None], base: str, place: Place) -> int | None:
    try:
        return context_of(base)
    except InvalidRequest as error:
        for problem in error.problems:
            place.refuse(problem)
        return None


def _read_job_list(
    entries: object, place: Place, defaults: Draft, max_context: int | None
) -> list[JobSpec]:
    if not isinstance(entries, list) or not entries:
        shown = "an empty list" if entries == [] else _shown(entries)
        place.refuse(f"got {shown}; expected a list of at least one job")
        return []
    jobs: list[JobSpec] = []
    first_place: dict[tuple[str, str], Place] = {}
    for index, entry in enumerate(entries):
        here = place / index
        draft = Draft.read(entry, here, _JOB_KNOBS).over(defaults)
        for spec in _read_job(draft, here, max_context):
            key = (spec.tenant, spec.name)
            if key in first_place:
                (here / "name").refuse(
                    f"tenant {spec.tenant!r} has a job {spec.name!r} already at "
                    f"{first_place[key]}; expected a name of its own"
                )
            first_place.setdefault(key, here)
            jobs.append(spec)
        if len(jobs) > MAX_JOBS:
            here.refuse(f"is beyond job {MAX_JOBS}; expected at most {MAX_JOBS} jobs in a file")
            break
    return jobs


def _read_job(draft: Draft, place: Place, max_context: int | None) -> list[JobSpec]:
    """Return the jobs of one entry; none when it has no usable tenant and name."""
    for name in _REQUIRED:
        if name not in draft.values and name not in draft.bad:
            place.refuse(f"has no `{name}`; expected {_EXPECTED[name]}")
    values = {"tenant": "", "name": "", "env": {}, **draft.values}
    spec = _make_spec(values)
    for knobs, fault in _RULES:
        if draft.bad.isdisjoint(knobs) and (problem := fault(spec)):
            source = ", from `defaults`" if knobs[0] in draft.inherited else ""
            (place / knobs[0]).refuse(problem + source)
    limit = max_context if "max_tokens" not in draft.bad else None
    if limit is not None and spec.max_tokens >= limit:
        (place / "max_tokens").refuse(
            f"got {spec.max_tokens}; expected less than the base's context of {limit} "
            "tokens, which must hold the prompt too"
        )
    if not spec.tenant or not spec.name:
        return []
    copies = values.get("replicate")
    if copies is None:
        return [spec]
    specs = [_make_spec(values, suffix=f"-{copy}", shift=copy) for copy in range(copies)]
    if not SEGMENT.fullmatch(specs[-1].name):
        (place / "name").refuse(f"is too long once replicated to {specs[-1].name!r}")
    return specs


_EXPECTED = {
    "tenant": "the name of the tenant who owns the job",
    "name": "a name that this tenant has not used yet",
    "env": "{family: NAME, ...its settings}",
}


def _make_spec(values: Mapping[str, Any], *, suffix: str = "", shift: int = 0) -> JobSpec:
    seed = values.get("seed", 0) + shift
    adapter = {name: values[name] for name in ("rank", "alpha", "targets") if name in values}
    renamed = {
        "tenant": TenantId(values["tenant"]),
        "name": values["name"] + suffix,
        "adapter": AdapterSpec(seed=seed, **adapter),
        "seed": seed,
        "is_in_flight": values.get("rollout") == "in_flight",
        "is_seeded": values.get("seeded", False),
    }
    same = {name: value for name, value in values.items() if name in _SAME_NAME}
    return JobSpec(**{**same, **renamed})


_SAME_NAME = frozenset(_JOB_KNOBS) & frozenset(JobSpec.__dataclass_fields__)
"""Knobs that are fields of `JobSpec` under the same name."""


# ---------------------------------------------------------------------------------------------
# Rules between knobs: the first knob named is where a fault is reported


def _group_fault(spec: JobSpec) -> str | None:
    # Every preset is asked: the job's own may not be known, if its `algorithm` has faults too.
    if spec.group_size == 1 and all(
        preset.advantage(np.ones(1))[0] == 0 for preset in algorithms.PRESETS.values()
    ):
        return (
            "got 1; expected at least 2, because the trajectories of a group are compared, and one "
            "alone teaches nothing"
        )
    return None


def _step_size_fault(spec: JobSpec) -> str | None:
    size = spec.prompts_per_step * spec.group_size
    if size > MAX_STEP_TRAJECTORIES:
        return (
            f"times group_size is {size} trajectories a step; expected at most "
            f"{MAX_STEP_TRAJECTORIES}"
        )
    return None


def _stop_fault(spec: JobSpec) -> str | None:
    if spec.stop_at_success > 0 and (spec.eval_every == 0 or spec.eval_prompts == 0):
        return "can only act at an evaluation; expected eval_every and eval_prompts above 0 with it"
    return None


def _rollout_fault(spec: JobSpec) -> str | None:
    if spec.is_in_flight and spec.is_seeded:
        return (
            "in_flight takes new weights when they happen to arrive, which no seed fixes; expected "
            "pinned with seeded: true"
        )
    if spec.is_in_flight and spec.max_staleness == 0:
        return (
            "in_flight would do nothing: at max_staleness 0 no new weights arrive during a "
            "rollout; expected pinned, or max_staleness of at least 1"
        )
    return None


_RULES: Sequence[tuple[tuple[str, ...], Callable[[JobSpec], str | None]]] = (
    (("group_size",), _group_fault),
    (("prompts_per_step", "group_size"), _step_size_fault),
    (("stop_at_success", "eval_every", "eval_prompts"), _stop_fault),
    (("rollout", "seeded", "max_staleness"), _rollout_fault),
)
