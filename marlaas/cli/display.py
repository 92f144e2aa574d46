"""What a person sees while jobs run: a live board on a terminal, plain lines elsewhere.

    observer events ─► JobLine per job ─► LiveDisplay   (terminal: a board, 4 times a second)
                                     ├──► PlainLog      (pipe, log: one line an event)
                                     └──► Lines         (quiet)

All three implement `types.JobObserver` and take `workers_seen` beside it. They only ever read
records: nothing that is shown here decides anything.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marlaas import runtime
from marlaas.types import (
    EvalRecord,
    Group,
    JobId,
    JobSpec,
    JobState,
    Notice,
    StepRecord,
    WorkerStats,
)

REFRESH_S = 0.25
RATE_WINDOW_S = 30.0
"""Tokens a second are counted over this much of the recent past."""
BURST_S = 0.2
"""What is heard of within so short a time happened before, and says nothing of the pace."""
PACE_STEPS = 8
"""The time left is judged by the pace of this many steps."""
WIDE_COLUMNS = 116
"""From this width on there is room for progress bars and longer sparklines."""

STARTING = "Starting the engines: each loads the base and checks it against the stock model."

_LEVELS = "▁▂▃▄▅▆▇█"
_WORK_STYLES = {
    "decode": "green",
    "prefill": "cyan",
    "train": "magenta",
    "score": "bright_magenta",
    "publish": "yellow",
    "other": "blue",
    "idle": "bright_black",
}
STATE_STYLES = {
    JobState.QUEUED: "dim",
    JobState.RUNNING: "",
    JobState.PAUSED: "cyan",
    JobState.DONE: "green",
    JobState.HELD: "yellow",
    JobState.FAILED: "red",
    JobState.CANCELLED: "yellow",
}


# ---------------------------------------------------------------------------------------------
# What is known of a job


@dataclass(slots=True, kw_only=True)
class JobLine:
    """One job's line: `job_state` opens it, events fill it, nothing ever removes it."""

    spec: JobSpec
    state: JobState = JobState.QUEUED
    reason: str = ""
    step: int = 0
    reward: float = math.nan
    success: float = math.nan
    staleness: float = math.nan
    successes: list[float] = field(default_factory=list)
    """Training success of every step seen."""
    first_eval: float = math.nan
    last_eval: float = math.nan
    num_tokens: int = 0
    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 1))
    tokens_at: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, tokens sampled in what ended then: a group or a step), for the recent past."""

    def note_step(self, record: StepRecord, now_s: float) -> None:
        self.step = record.step
        self.reward = record.metrics.get("reward_mean", math.nan)
        self.success = record.metrics.get("success", math.nan)
        self.staleness = record.metrics.get("staleness_mean", math.nan)
        self.successes.append(self.success)
        self.step_times_s.append(now_s)

    def note_eval(self, record: EvalRecord) -> None:
        if math.isnan(self.first_eval):
            self.first_eval = record.success
        self.last_eval = record.success

    def note_group(self, group: Group, now_s: float) -> None:
        self.note_tokens(
            sum(int(trajectory.loss_mask.sum()) for trajectory in group.trajectories), now_s
        )

    def note_tokens(self, num_tokens: int, now_s: float) -> None:
        self.num_tokens += num_tokens
        self.tokens_at.append((now_s, num_tokens))

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate over the window, or since the first group if that is later."""
        while self.tokens_at and self.tokens_at[0][0] < now_s - RATE_WINDOW_S:
            self.tokens_at.popleft()
        if len(self.tokens_at) < 2:
            return math.nan
        elapsed_s = now_s - self.tokens_at[0][0]
        if elapsed_s < BURST_S:
            return math.nan
        return sum(tokens for _, tokens in self.tokens_at) / elapsed_s

    def left_s(self, now_s: float) -> float:
        """Return the seconds to the last step at the recent pace; NaN before two steps."""
        if len(self.step_times_s) < 2:
            return math.nan
        first, last = self.step_times_s[0], self.step_times_s[-1]
        if last - first < BURST_S:
            return math.nan
        pace_s = (last - first) / (len(self.step_times_s) - 1)
        return max(0.0, pace_s * (self.spec.steps - self.step) - (now_s - last))


class Lines:
    """The lines of all jobs, in the order in which they were first heard of; shows nothing."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, JobLine] = {}
        self.workers: tuple[WorkerStats, ...] = ()

    def line(self, spec: JobSpec) -> JobLine:
        return self.jobs.setdefault(spec.job_id, JobLine(spec=spec))

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        line = self.line(spec)
        line.state, line.reason = state, reason

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        self.line(spec).note_step(record, runtime.now_s())

    def eval_done(self, spec: JobSpec, record: EvalRecord) -> None:
        self.line(spec).note_eval(record)

    def group_done(self, spec: JobSpec, group: Group) -> None:
        self.line(spec).note_group(group, runtime.now_s())

    def recall(
        self, spec: JobSpec, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]
    ) -> None:
        """Begin a job's line with what earlier runs of it recorded."""
        line = self.line(spec)
        for record in steps:
            line.note_step(record, runtime.now_s())
        line.step_times_s.clear()
        for record in evals:
            line.note_eval(record)

    def say(self, words: str) -> None:
        """Tell the person something about the run as a whole."""

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[Self]:
        """Show progress as long as the block runs."""
        yield self

    def notice(self, spec: JobSpec, notice: Notice) -> None:
        """Say what holds a job up."""
        self.say(f"{spec.job_id}: {notice.cause}, for {seconds(notice.since_s)}")

    def workers_seen(self, stats: Sequence[WorkerStats]) -> None:
        """Take the newest figures of every engine worker."""
        self.workers = tuple(stats)


# ---------------------------------------------------------------------------------------------
# Words and bars


def seconds(value: float) -> str:
    """Return a duration in at most five characters: 42s, 3:07, 2h10, 3d."""
    if math.isnan(value):
        return "·"
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 86_400:
        return f"{whole // 3600}h{whole // 60 % 60:02}"
    return f"{whole // 86_400}d"


def count(value: float) -> str:
    """Return a number in at most four characters: 7, 950, 1.2k, 34k, 5.0M."""
    if math.isnan(value):
        return "·"
    if value < 1000:
        return f"{value:.0f}"
    for unit in "kMG":
        value /= 1000
        if value < 9.95:
            return f"{value:.1f}{unit}"
        if value < 999.5 or unit == "G":
            return f"{value:.0f}{unit}"
    raise AssertionError("unreachable")


def percent(value: float) -> str:
    """Return a share as a whole percentage."""
    return "·" if math.isnan(value) else f"{100 * value:.0f}%"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return shares in [0, 1] as at most `width` bars; where there are more, neighbours' means."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    num_bars = min(width, len(known))
    bars = []
    for idx in range(num_bars):
        part = known[idx * len(known) // num_bars : (idx + 1) * len(known) // num_bars]
        level = sum(part) / len(part)
        bars.append(_LEVELS[min(int(max(level, 0.0) * len(_LEVELS)), len(_LEVELS) - 1)])
    return "".join(bars)


def shortened(text: str, width: int) -> str:
    """Return the text, its middle left out when it is wider than `width`."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def shares_of_time(stats: WorkerStats) -> dict[str, float]:
    """Return the share of the worker's time that went into each kind of work, idleness included."""
    elapsed_s = max(stats.elapsed_s, 1e-9)
    shares = {kind: stats.busy_s.get(kind, 0.0) / elapsed_s for kind in _WORK_STYLES}
    for kind, busy_s in stats.busy_s.items():
        if kind not in _WORK_STYLES:
            shares["other"] += busy_s / elapsed_s
    shares["idle"] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def stacked_bar(shares: dict[str, float], width: int) -> Text:
    """Return one bar of exactly `width` cells, a colour for each kind."""
    bar = Text()
    total = max(sum(shares.values()), 1e-9)
    done = 0.0
    for kind, share in shares.items():
        # Ends are rounded, not lengths, so that the cells add up.
        start, done = round(done * width / total), done + share
        cells = round(done * width / total) - start
        bar.append(("░" if kind == "idle" else "█") * cells, style=_WORK_STYLES[kind])
    return bar


# ---------------------------------------------------------------------------------------------
# The board


class Board(Lines):
    """Renders the lines of all jobs and the bars of all workers for a given size of terminal."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self._started_s = runtime.now_s()
        self.said = ""
        """A sentence under the board, e.g. that the run is being stopped."""

    def render(self, width: int, height: int) -> RenderableType:
        """Return the board, never more than `height` lines of `width` cells."""
        now_s = runtime.now_s()
        parts: list[RenderableType] = [self._heading(now_s, width), Text("")]
        tail: list[RenderableType] = []
        if self.workers:
            tail += [Text(""), *worker_bars(self.workers, width, max(1, height // 3))]
        has_begun = any(line.state is not JobState.QUEUED for line in self.jobs.values())
        if notice := self.said or ("" if has_begun or self.workers else STARTING):
            tail.append(Text(notice, style="bold yellow"))
        room = max(1, height - len(parts) - len(tail) - 2)
        shown, hidden = self._visible(room)
        parts.append(self._table(shown, now_s, width))
        if hidden:
            parts.append(Text(f"  and {len(hidden)} more: {_states(hidden)}", style="dim"))
        return Stack(*parts, *tail)

    def _heading(self, now_s: float, width: int) -> Text:
        right = f"{_states(self.jobs.values())}   {seconds(now_s - self._started_s)}"
        left = shortened(self.title, max(8, width - len(right) - 2))
        gap = " " * max(2, width - len(left) - len(right))
        heading = Text(left, style="bold", no_wrap=True, overflow="ellipsis")
        return heading.append(gap + right, style="not bold")

    def _visible(self, room: int) -> tuple[list[JobLine], list[JobLine]]:
        """Choose the lines that fit: running ones first, each in the order of the job file."""
        lines = list(self.jobs.values())
        if len(lines) <= room:
            return lines, []
        order = sorted(lines, key=lambda line: line.state is not JobState.RUNNING)
        chosen = {id(line) for line in order[: room - 1]}
        shown = [line for line in lines if id(line) in chosen]
        return shown, [line for line in lines if id(line) not in chosen]

    def _table(self, lines: Sequence[JobLine], now_s: float, width: int) -> Table:
        is_wide = width >= WIDE_COLUMNS
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
        spark_width = 24 if is_wide else 8
        name_width = width - spark_width - (75 if is_wide else 50)
        table.add_column("job", width=max(name_width, 8), no_wrap=True)
        if is_wide:
            table.add_column("", width=14, no_wrap=True)
        table.add_column("step", justify="right", width=7, no_wrap=True)
        table.add_column("reward", justify="right", width=6, no_wrap=True)
        table.add_column("success", width=5 + spark_width, no_wrap=True)
        table.add_column("held-out", justify="right", width=9 if is_wide else 8, no_wrap=True)
        table.add_column("stale", justify="right", width=5, no_wrap=True)
        table.add_column("tok/s", justify="right", width=5, no_wrap=True)
        table.add_column("left", justify="right", width=9 if is_wide else 6, no_wrap=True)
        for line in lines:
            cells = self._cells(line, now_s, spark_width, is_wide)
            cells.insert(0, Text(shortened(str(line.spec.job_id), max(name_width, 8))))
            table.add_row(*cells, style=STATE_STYLES[line.state])
        return table

    def _cells(
        self, line: JobLine, now_s: float, spark_width: int, is_wide: bool
    ) -> list[RenderableType]:
        is_running = line.state is JobState.RUNNING
        spark = f"{percent(line.success):>4} {sparkline(line.successes, spark_width)}"
        cells: list[RenderableType] = [
            f"{line.step}/{line.spec.steps}",
            "·" if math.isnan(line.reward) else f"{line.reward:.2f}",
            Text(spark),
            _held_out(line),
            "·" if math.isnan(line.staleness) else f"{line.staleness:.1f}",
            count(line.tokens_per_s(now_s)) if is_running else "",
            seconds(line.left_s(now_s)) if is_running else _short_state(line.state, is_wide),
        ]
        if is_wide:
            done = round(14 * line.step / line.spec.steps)
            cells.insert(
                0, Text("━" * done, style="green").append("━" * (14 - done), "bright_black")
            )
        return cells


def worker_bars(workers: Sequence[WorkerStats], width: int, room: int) -> list[RenderableType]:
    """Return a bar for each worker, and what the bars mean."""
    names = max(len(stats.name) for stats in workers)
    bars: list[RenderableType] = []
    for stats in workers[:room]:
        shares = shares_of_time(stats)
        words = f" {100 * (1 - shares['idle']):>3.0f}% busy"
        if width >= WIDE_COLUMNS:
            words += (
                f"   {stats.num_decoding} decoding, {stats.num_waiting} waiting, "
                f"{stats.num_parked} parked   KV {count(stats.kv_tokens)} of "
                f"{count(stats.kv_capacity_tokens)}   {count(stats.rss_bytes)}B"
            )
        bar = stacked_bar(shares, max(8, width - names - 1 - max(len(words), 10)))
        bars.append(Text(f"{stats.name:<{names}} ").append_text(bar).append(words, "dim"))
    if len(workers) > room:
        bars.append(Text(f"and {len(workers) - room} more workers", style="dim"))
    legend = _legend(workers)
    is_room = names + 1 + legend.cell_len <= width
    bars.append(Text(" " * (names + 1) if is_room else "").append_text(legend))
    return bars


def _states(lines: Iterable[JobLine]) -> str:
    states = [line.state for line in lines]
    return ", ".join(f"{states.count(state)} {state}" for state in JobState if state in states)


def _short_state(state: JobState, is_wide: bool) -> str:
    return str(state) if is_wide else {JobState.CANCELLED: "cancel"}.get(state, str(state))


def _held_out(line: JobLine) -> str:
    if math.isnan(line.first_eval):
        return "·"
    return f"{100 * line.first_eval:.0f}→{100 * line.last_eval:.0f}%"


def _legend(workers: Sequence[WorkerStats]) -> Text:
    """Return each kind of work with its colour and its share of all workers' time."""
    legend = Text(no_wrap=True, overflow="ellipsis")
    shares = [shares_of_time(stats) for stats in workers]
    for kind, style in _WORK_STYLES.items():
        mean = sum(share[kind] for share in shares) / len(shares)
        legend.append("░" if kind == "idle" else "█", style=style)
        legend.append(f" {kind} {percent(mean)}" + ("" if kind == "idle" else "  "), style="dim")
    return legend


class LiveDisplay(Board):
    """The board on a terminal, redrawn a few times a second until the block ends."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(title)
        self._console = console

    def say(self, words: str) -> None:
        self.said = words

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[Self]:
        """Draw the board as long as the block runs, and leave its last state on the screen."""
        live = Live(console=self._console, auto_refresh=False, transient=False)
        with live:
            redrawing = asyncio.create_task(self._redraw(live))
            try:
                yield self
            finally:
                redrawing.cancel()
                await asyncio.gather(redrawing, return_exceptions=True)
                self._draw(live)

    async def _redraw(self, live: Live) -> None:
        while True:
            self._draw(live)
            await asyncio.sleep(REFRESH_S)

    def _draw(self, live: Live) -> None:
        size = self._console.size
        live.update(self.render(size.width, size.height - 1), refresh=True)


class PlainLog(Lines):
    """One line an event, for logs and pipes: no colours, no movement."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._started_s = runtime.now_s()

    def say(self, words: str) -> None:
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[Self]:
        self.say(STARTING)
        yield self

    def job_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        super().job_state(spec, state, reason)
        self._say(spec, f"{state}: {reason}" if reason else str(state))

    def step_done(self, spec: JobSpec, record: StepRecord) -> None:
        super().step_done(spec, record)
        line = self.line(spec)
        now_s = runtime.now_s()
        words = f"step {record.step}/{spec.steps}  reward {line.reward:.2f}"
        words += f"  success {percent(line.success)}  staleness {line.staleness:.1f}"
        words += f"  {count(line.tokens_per_s(now_s))} tok/s  left {seconds(line.left_s(now_s))}"
        if record.is_vetoed:
            words += "  (update vetoed: not finite)"
        elif record.is_empty:
            words += "  (no update: every group had equal rewards)"
        self._say(spec, words)

    def eval_done(self, spec: JobSpec, record: EvalRecord) -> None:
        super().eval_done(spec, record)
        self._say(
            spec,
            f"version {record.version}: held-out success {percent(record.success)} "
            f"on {record.num_prompts} prompts",
        )

    def _say(self, spec: JobSpec, words: str) -> None:
        elapsed = seconds(runtime.now_s() - self._started_s)
        self._console.print(
            f"{elapsed:>5}  {spec.job_id}  {words}", markup=False, highlight=False, soft_wrap=True
        )
