"""`marlaas run`: from a job file to a run folder.

    plan (job file, flags) ─► run folder ─► a service on it, under a display ─► report
                                                 │ SIGINT or SIGTERM
                                                 ├── first: cancelled, stops cleanly, can be resumed
                                                 └── second: the process ends at once

A run folder remembers its job file (`jobs.yaml`) and how it was run (`run.json`), so that
`--resume DIR` needs nothing else. The truth about the jobs is in its store. It is the data folder
of a service like any other (`cli/own_service.py`), and `marlaas serve --data DIR` serves it.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console

from marlaas import __version__
from marlaas.cli import display, report
from marlaas.cli.own_service import DRAIN_S, RunFigures, run_jobs
from marlaas.cli.submit import Submission, read_submission
from marlaas.config import Placement, ServeSettings
from marlaas.errors import InvalidRequest
from marlaas.loop.controller import Mode
from marlaas.loop.jobspec import RunSection
from marlaas.text.bases import CONVERTED_BASES, cache_folder, ensure_base, resolve_base
from marlaas.types import JobSpec, JobState

JOBS_FILE, RUN_FILE, STORE_FILE = "jobs.yaml", "run.json", "store.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run, where and how; all of it checked."""

    submission: Submission
    section: RunSection
    out: Path
    is_resumed: bool

    @property
    def specs(self) -> tuple[JobSpec, ...]:
        return self.submission.specs


def command(args: argparse.Namespace) -> int:
    """Run the jobs and return the exit code."""
    plan = make_plan(args)
    _prepare_folder(plan, args.jobs)
    console = Console(highlight=False)
    shown = _choose_display(plan, args, console)
    try:
        ended = asyncio.run(until_stopped(_start(plan, shown), shown, console.show_cursor))
    except BaseException:
        if (plan.out / STORE_FILE).exists():
            print(f"What is done is kept: marlaas run --resume {plan.out}", file=sys.stderr)
        raise
    jobs = report.write_report(plan.out)
    report.print_report(console, plan.out, jobs)
    if ended.result is not None:
        console.print(_where_time_went(ended.result), soft_wrap=True)
    # A signal that comes when every job is over stops nothing.
    is_over = all(JobState(job.state).is_terminal for job in jobs)
    if ended.signal is not None and not is_over:
        console.print(f"Stopped. To go on: marlaas run --resume {plan.out}", soft_wrap=True)
        return 128 + ended.signal
    return 0 if all(job.state == JobState.DONE for job in jobs) else 1


# ---------------------------------------------------------------------------------------------
# The plan


def make_plan(args: argparse.Namespace) -> Plan:
    """Check flags, job file and folders.

    Raises:
        InvalidRequest: with every fault found.
    """
    if args.workers is not None and not 1 <= args.workers <= 256:
        raise InvalidRequest(f"--workers: got {args.workers}; expected from 1 to 256")
    if args.resume is not None:
        return _plan_resumed(args)
    if args.jobs is None:
        raise InvalidRequest("run: got no job file; expected `marlaas run JOBS.yaml`")
    out = args.out or _free_folder(Path("runs") / args.jobs.stem)
    if _is_taken(out):
        if (out / STORE_FILE).exists():
            raise InvalidRequest(
                f"--out: {out} holds a run already; expected another folder, or "
                f"`marlaas run --resume {out}` to go on with it"
            )
        raise InvalidRequest(f"--out: {out} exists and is not empty; expected a new folder")
    return _plan(args, args.jobs, RunSection(), out)


def _plan_resumed(args: argparse.Namespace) -> Plan:
    out = args.out if args.resume == Path() else args.resume
    if out is None:
        raise InvalidRequest("--resume: got no folder; expected --resume DIR, or --out DIR with it")
    if not (out / STORE_FILE).exists() or not (out / JOBS_FILE).exists():
        raise InvalidRequest(f"--resume: {out} holds no run; expected the folder of an earlier run")
    earlier = json.loads((out / RUN_FILE).read_text(encoding="utf-8"))
    section = RunSection(
        base=earlier["base"],
        workers=earlier["workers"],
        placement=Placement(earlier["placement"]),
        mode=earlier["mode"],
    )
    # Runs of the first release had no files of their own.
    digests = earlier.get("files", {})
    if args.base and args.base != section.base:
        raise InvalidRequest(f"--base: the run in {out} is on {section.base}; expected no --base")
    plan = _plan(args, out / JOBS_FILE, section, out, digests=digests)
    if args.jobs is not None and read_submission(args.jobs).specs != plan.specs:
        raise InvalidRequest(
            f"{args.jobs}: has other jobs than the run in {out}; expected the same, or none"
        )
    return plan


def _plan(
    args: argparse.Namespace,
    jobs: Path,
    earlier: RunSection,
    out: Path,
    digests: Mapping[str, str] | None = None,
) -> Plan:
    """Read the job file; flags win over the earlier run's settings, those over its `run:`.

    `digests` are those of the files that the run of a folder uploaded, if one is resumed.
    """
    is_resumed = digests is not None
    base = args.base or (earlier.base if is_resumed else None)

    def read() -> Submission:
        return read_submission(
            jobs, digests=digests, context_of=lambda name: base_context(base or name)
        )

    submission = read()
    if base_context(base or submission.run.base) is None:
        print("Converting the base model; this happens once.", file=sys.stderr)
        ensure_base(base or submission.run.base)
        submission = read()
    section = earlier if is_resumed else submission.run
    flags = {
        "base": args.base,
        "workers": args.workers,
        "placement": args.placement and Placement(args.placement),
        "mode": args.mode,
    }
    section = replace(section, **{name: value for name, value in flags.items() if value})
    if section.placement is Placement.SPLIT and section.workers == 1:
        raise InvalidRequest(
            "placement split: got 1 worker; expected at least 2, since one trains and the others "
            "sample"
        )
    return Plan(submission=submission, section=section, out=out, is_resumed=is_resumed)


def base_context(base: str) -> int | None:
    """Return how many tokens a base can attend to; None if it must be converted first.

    Raises:
        InvalidRequest: there is no such base.
    """
    is_convertible = base in CONVERTED_BASES or base.endswith(".gguf")
    if is_convertible and not (cache_folder(base) / "config.json").is_file():
        return None
    config = json.loads((resolve_base(base) / "config.json").read_text(encoding="utf-8"))
    return config.get("max_position_embeddings")


def _is_taken(folder: Path) -> bool:
    """Return whether something lies there that is not just the notes of a run that never began."""
    if not folder.is_dir():
        return folder.exists()
    return any(path.name not in (JOBS_FILE, RUN_FILE) for path in folder.iterdir())


def _free_folder(wanted: Path) -> Path:
    """Return the folder, or the first of `wanted-2`, `wanted-3`, ... that is not taken."""
    folder, number = wanted, 1
    while _is_taken(folder):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _prepare_folder(plan: Plan, jobs: Path | None) -> None:
    """Make the run folder, and note in it what is about to be run."""
    plan.out.mkdir(parents=True, exist_ok=True)
    files = {file.written: file.digest for file in plan.submission.files}
    if not plan.is_resumed and jobs is not None:
        shutil.copyfile(jobs, plan.out / JOBS_FILE)
    else:
        files = json.loads((plan.out / RUN_FILE).read_text(encoding="utf-8")).get("files", {})
    section = plan.section
    settings = {
        "version": __version__,
        "base": section.base,
        "workers": section.workers,
        "placement": section.placement.value,
        "mode": section.mode,
        "files": files,
    }
    (plan.out / RUN_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _where_time_went(summary: RunFigures) -> str:
    """Return one line on how long it took and what the workers were busy with."""
    line = f"{display.seconds(summary.makespan_s)} on {len(summary.workers)} workers"
    shares = [display.shares_of_time(stats) for stats in summary.workers]
    if not shares:
        return line
    means = {kind: sum(share[kind] for share in shares) / len(shares) for kind in shares[0]}
    return f"{line}: " + ", ".join(f"{kind} {display.percent(m)}" for kind, m in means.items())


# ---------------------------------------------------------------------------------------------
# The run

ResultT = TypeVar("ResultT")


def _choose_display(plan: Plan, args: argparse.Namespace, console: Console) -> display.Lines:
    section = plan.section
    title = f"{plan.out}   {section.base}, {section.placement}, {section.mode}"
    if args.quiet:
        shown: display.Lines = display.Lines()
    elif args.plain or not console.is_terminal:
        shown = display.PlainLog(console)
    else:
        shown = display.LiveDisplay(console, title)
    for spec in plan.specs:
        shown.line(spec)
    return shown


def _start(plan: Plan, shown: display.Lines) -> Coroutine[object, object, RunFigures]:
    """Return the run itself, not yet started; cancelling it stops it cleanly."""
    section = plan.section
    settings = ServeSettings(
        base=section.base,
        folder=str(plan.out),
        port=0,
        workers=section.workers,
        placement=section.placement,
        exact=any(spec.is_seeded for spec in plan.specs),
        max_running_jobs=max(64, len(plan.specs)),
        drain_s=DRAIN_S,
        log_level="error",
    )
    return run_jobs(plan.submission, settings, Mode(section.mode), shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Generic[ResultT]):
    """How a run ended: by itself, with a result, or by a signal."""

    signal: int | None
    result: ResultT | None


async def until_stopped(
    jobs: Coroutine[object, object, ResultT],
    shown: display.Lines,
    show_cursor: Callable[[], object],
) -> Ended[ResultT]:
    """Run `jobs` to their end, or until a signal cancels them."""
    result = None
    async with shown.shown():
        running = asyncio.ensure_future(jobs)
        stop = _Stop(running, shown, show_cursor)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.on_signal, number)
        try:
            result = await running
        except asyncio.CancelledError:
            if stop.number is None:
                raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
    return Ended(signal=stop.number, result=result)


class _Stop:
    """Turns the first signal into a clean stop and the second into an immediate end."""

    def __init__(
        self, running: asyncio.Future, shown: display.Lines, show_cursor: Callable[[], object]
    ) -> None:
        self._running = running
        self._shown = shown
        self._show_cursor = show_cursor
        self.number: int | None = None
        """The first signal."""

    def on_signal(self, number: int) -> None:
        if self.number is None:
            self.number = number
            self._shown.say("Stopping cleanly; what is done is kept. Once more to end at once.")
            self._running.cancel()
            return
        # A live board hides the cursor; nothing else of ours outlives the process.
        self._show_cursor()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
