"""The board fits the terminal and shows what the records say; the log has one line an event."""

import asyncio
import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from marlaas import runtime
from marlaas.cli import display
from marlaas.types import JobState
from tests.cli.records import make_eval, make_group, make_spec, make_stats, make_step


def board_of(num_jobs: int) -> display.Board:
    board = display.Board("runs/demo   tiny, replicated, async")
    for idx in range(num_jobs):
        spec = make_spec(f"job-with-a-rather-long-name-{idx}", steps=8)
        board.job_state(spec, JobState.RUNNING, "")
        board.eval_done(spec, make_eval(0, 0.31))
        for step in range(1, 5):
            board.group_done(spec, make_group(step))
            board.step_done(spec, make_step(step, success=0.1 * step))
    board.workers_seen(
        [make_stats("engine-0", decode=50, train=30), make_stats("engine-1", prefill=1, odd=2)]
    )
    return board


def lines_of(board: display.Board, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(board.render(width, height))
    return console.export_text().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("num_jobs", [0, 1, 8, 64])
def test_the_board_never_outgrows_the_terminal(width, num_jobs):
    board = board_of(num_jobs)
    board.say("Stopping cleanly")
    for height in (12, 24, 50):
        lines = lines_of(board, width, height)
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("width", [80, 140])
def test_each_job_has_one_line_with_its_figures(width):
    (line,) = [line for line in lines_of(board_of(1), width, 24) if "acme/" in line]
    for word in ("4/8", "0.40", "40%", "▁▂▃▄", "31→31%", "1.5"):
        assert word in line


def test_more_jobs_than_lines_are_counted_in_words():
    lines = lines_of(board_of(40), 80, 20)
    num_hidden = 40 - sum("acme/" in line for line in lines)
    assert f"  and {num_hidden} more: {num_hidden} running" in [line.rstrip() for line in lines]


def test_running_jobs_are_shown_before_finished_ones():
    board = board_of(40)
    for line in list(board.jobs.values())[:30]:
        board.job_state(line.spec, JobState.DONE, "")
    text = "\n".join(lines_of(board, 80, 20))
    assert all(f"name-{idx} " in text for idx in range(30, 40))
    assert "running" not in text.split("more: ")[1].split("\n")[0]


def test_a_resumed_job_begins_where_it_was():
    board = display.Board("title")
    spec = make_spec(steps=8)
    board.recall(spec, [make_step(1), make_step(2, success=0.7)], [make_eval(0, 0.2)])
    line = board.jobs[spec.job_id]
    assert (line.step, line.success, line.first_eval) == (2, 0.7, 0.2)
    assert math.isnan(line.left_s(runtime.now_s()))


def test_time_left_is_the_recent_pace_times_the_steps_left():
    line = display.JobLine(spec=make_spec(steps=10))
    for step in range(1, 5):
        line.note_step(make_step(step), now_s=3.0 * step)
    assert line.left_s(now_s=12.0) == 18.0
    assert line.left_s(now_s=13.0) == 17.0
    assert line.left_s(now_s=1000.0) == 0.0


def test_the_token_rate_forgets_what_is_long_past():
    line = display.JobLine(spec=make_spec())
    for second in range(100):
        line.note_group(make_group(second), now_s=float(second))
    assert line.num_tokens == 600
    assert line.tokens_per_s(now_s=100.0) == pytest.approx(6.0)


def test_shares_of_time_add_up_to_one():
    shares = display.shares_of_time(make_stats("engine-0", decode=50, train=30, novel=5))
    assert shares["decode"] == 0.5
    assert shares["other"] == 0.05
    assert shares["idle"] == pytest.approx(0.15)
    assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("width", [1, 7, 40, 133])
def test_a_stacked_bar_fills_its_width_exactly(width):
    shares = display.shares_of_time(make_stats("engine-0", decode=33, prefill=1, train=33, other=1))
    assert display.stacked_bar(shares, width).cell_len == width


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1:00"), (187, "3:07"), (7800, "2h10"), (3e5, "3d")],
)
def test_durations_are_short(value, text):
    assert display.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (999, "999"), (1234, "1.2k"), (9960, "10k"), (999_600, "1.0M"), (5e9, "5.0G")],
)
def test_counts_are_short(value, text):
    assert display.count(value) == text


def test_a_sparkline_averages_what_does_not_fit_and_skips_what_is_unknown():
    assert display.sparkline([0.0, math.nan, 1.0], 8) == "▁█"
    assert display.sparkline([0.0, 1.0] * 10, 2) == "▅▅"
    assert display.sparkline([-1.0, 2.0], 8) == "▁█"
    assert display.sparkline([], 8) == ""


def test_the_plain_log_says_every_event_in_one_line():
    out = io.StringIO()
    log = display.PlainLog(Console(file=out, width=40))
    spec = make_spec()
    log.job_state(spec, JobState.RUNNING, "")
    log.eval_done(spec, make_eval(0, 0.25))
    log.group_done(spec, make_group(0))
    log.step_done(spec, make_step(1))
    log.job_state(spec, JobState.HELD, "gap 0.2 is past its bound [0.1]")
    assert out.getvalue().split("\n") == [
        "   0s  acme/sums  running",
        "   0s  acme/sums  version 0: held-out success 25% on 64 prompts",
        "   0s  acme/sums  step 1/4  reward 0.50  success 50%  staleness 1.5  · tok/s  left ·",
        "   0s  acme/sums  held: gap 0.2 is past its bound [0.1]",
        "",
    ]


def test_the_live_board_leaves_its_last_state_on_the_screen():
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True)

    async def watch() -> None:
        board = display.LiveDisplay(console, "runs/demo")
        async with board.shown():
            spec = make_spec(steps=2)
            board.job_state(spec, JobState.RUNNING, "")
            await asyncio.sleep(0)
            board.step_done(spec, make_step(2))
            board.job_state(spec, JobState.DONE, "")

    asyncio.run(watch())
    last = out.getvalue().rsplit("runs/demo", 1)[1]
    assert "2/2" in last and "done" in last
    assert out.getvalue().rstrip().endswith("\x1b[?25h")
