"""The progress line keeps up on a terminal and stays quiet in a log."""

import io

from marlaas.client.progress import ProgressLine
from marlaas.client.records import JobInfo
from marlaas.types import Event, EventKind, JobState, Usage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def info(state: JobState = JobState.RUNNING, *, step: int = 0, reason: str = "") -> JobInfo:
    return JobInfo(
        name="sums",
        state=state,
        reason=reason,
        step=step,
        steps=10,
        created_s=0.0,
        elapsed_s=0.0,
        device_s=0.0,
        usage=Usage(),
        promoted=None,
        waits_for="",
        place=None,
        starts_in_s=None,
        ends_in_s=125.0,
        spec={},
    )


def step(number: int, at_s: float) -> Event:
    metrics = {"reward_mean": 0.5, "success": None, "loss": 0.1}
    data = {"step": number, "metrics": metrics, "elapsed_s": at_s}
    return Event(seq=number, at_s=at_s, job="sums", kind=EventKind.STEP, data=data)


def test_on_a_terminal_the_line_is_written_over():
    stream = Terminal()
    line = ProgressLine(stream)
    line.show(info())
    line.take(step(1, 100.0))
    line.take(step(2, 103.0))
    line.close()
    first, second, third = stream.getvalue().removesuffix("\n").split("\r")[1:]
    assert first.split() == ["sums", "step", "0/10", "left", "2", "min", "running"]
    assert second.startswith("sums  step 1/10  reward 0.50")
    assert third.split() == ["sums", "step", "2/10", "reward", "0.50", "left", "24", "s", "running"]
    assert len(second) >= len(first)


def test_in_a_log_steps_come_now_and_then_and_states_always():
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.show(info())
    for number in range(1, 10):
        line.take(step(number, float(number)))
    line.show(info(JobState.FAILED, step=9, reason="no such tool"))
    line.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("failed: no such tool")


def test_what_happens_beside_steps_is_said():
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.show(info())
    for kind, data in (
        (EventKind.EVALUATION, {"version": 4, "success": 0.25}),
        (EventKind.NOTICE, {"stage": "environment", "cause": "the tool sleeps", "since_s": 9.0}),
        (EventKind.STATE, {"state": "paused", "reason": "by the tenant"}),
    ):
        line.take(Event(seq=1, at_s=0.0, job="sums", kind=kind, data=data))
    words = stream.getvalue()
    for part in ("held-out success 25%", "environment: the tool sleeps", "paused: by the tenant"):
        assert part in words


def test_without_a_stream_nothing_is_written():
    line = ProgressLine(None)
    line.show(info())
    line.take(step(1, 1.0))
    line.close()
