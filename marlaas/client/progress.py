"""One line that keeps up with a job: step, reward, success, time left."""

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from marlaas import runtime
from marlaas.client.records import JobInfo
from marlaas.types import Event, EventKind

QUIET_S = 10.0
"""Where a line cannot be written over (a log, a pipe), news of steps come this often at most."""


class ProgressLine:
    """Shows how one job gets on: (show | take)* -> close. Without a stream it shows nothing.

    On a terminal and in a notebook the line is written over, elsewhere a new one follows.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._is_live = stream is not None and (stream.isatty() or "ipykernel" in sys.modules)
        self._line = ""
        self._written_s: float | None = None
        self._name, self._state, self._figures = "", "", ""
        self._step, self._steps = 0, 0
        self._left_s: float | None = None
        self._first: tuple[float, int] | None = None
        """When the first step that was seen happened, and which one it was: the pace."""

    def show(self, info: JobInfo) -> None:
        """Take how the job stands."""
        self._name, self._step, self._steps = info.name, info.step, info.steps
        self._state = _state(info.state, info.reason or info.waits_for)
        self._left_s = info.ends_in_s if info.state.is_active else None
        self._write(is_news=True)

    def take(self, event: Event) -> None:
        """Take what happened to it."""
        data: Mapping[str, Any] = event.data
        if event.kind is EventKind.STATE:
            self._state = _state(data["state"], data["reason"])
        elif event.kind is EventKind.STEP:
            self._step = data["step"]
            self._figures = _figures(data["metrics"])
            self._first = self._first or (event.at_s, self._step)
            first_s, first_step = self._first
            if self._step > first_step:
                pace_s = (event.at_s - first_s) / (self._step - first_step)
                self._left_s = pace_s * (self._steps - self._step)
        elif event.kind is EventKind.EVALUATION and data["success"] is not None:
            self._state = f"version {data['version']}: held-out success {data['success']:.0%}"
        elif event.kind is EventKind.NOTICE:
            self._state = f"{data['stage']}: {data['cause']}"
        self._write(is_news=event.kind is not EventKind.STEP)

    def close(self) -> None:
        """Leave what was written last where it is."""
        if self._stream is not None and self._is_live and self._line:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, *, is_news: bool) -> None:
        if self._stream is None:
            return
        now_s = runtime.now_s()
        is_quiet = self._written_s is not None and now_s - self._written_s < QUIET_S
        if not self._is_live and is_quiet and not is_news:
            return
        left = "" if self._left_s is None else f"left {_duration(self._left_s)}"
        parts = (f"{self._name}  step {self._step}/{self._steps}", self._figures, left, self._state)
        line = "  ".join(part for part in parts if part)
        if line == self._line:
            return
        over = f"\r{line:<{len(self._line)}}"
        self._stream.write(over if self._is_live else f"{line}\n")
        self._stream.flush()
        self._line, self._written_s = line, now_s


def _figures(metrics: Mapping[str, float | None]) -> str:
    reward, success = metrics.get("reward_mean"), metrics.get("success")
    words = [] if reward is None else [f"reward {reward:.2f}"]
    return "  ".join(words if success is None else [*words, f"success {success:.0%}"])


def _state(state: str, reason: str) -> str:
    return f"{state}: {reason}" if reason else str(state)


def _duration(value_s: float) -> str:
    whole = round(value_s)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole / 3600:.1f} h"
