"""Pictures of learning: one curve a job, one summary a run. Only `cli.report` calls it.

Matplotlib's object interface is used throughout, without its global state, so that drawing works
in any thread and leaves nothing behind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

BEFORE, AFTER, TRAINING = "#9aa5b1", "#0b7a75", "#7fb7b2"
GRID = "#e3e7eb"
TEXT = "#1f2933"

MAX_PANELS = 36
"""Small multiples beyond this many are too small to read."""
SMOOTHING_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What is drawn of one job."""

    title: str
    subtitle: str
    steps: Sequence[int]
    rewards: Sequence[float]
    successes: Sequence[float]
    """Share of the step's training trajectories that succeeded."""
    eval_versions: Sequence[int]
    eval_successes: Sequence[float]
    eval_rewards: Sequence[float]


def draw_curve(curve: Curve, path: Path) -> None:
    """Write a PNG with success above and reward below, training as a line, evaluations as dots."""
    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    success_axes, reward_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(curve.title, fontsize=14, fontweight="bold", color=TEXT)
    success_axes.set_title(curve.subtitle, fontsize=10, color="#52606d")

    _line(success_axes, curve.steps, curve.successes)
    _dots(success_axes, curve.eval_versions, curve.eval_successes, are_labelled=True)
    success_axes.set_ylabel("success")
    _as_share(success_axes)
    success_axes.legend(loc="lower right", fontsize=9, frameon=False)

    _line(reward_axes, curve.steps, curve.rewards)
    _dots(reward_axes, curve.eval_versions, curve.eval_rewards, are_labelled=False)
    reward_axes.set_ylabel("reward")
    reward_axes.set_xlabel("optimizer step")
    reward_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (success_axes, reward_axes):
        _clean(axes)
    _save(figure, path)


def draw_summary(curves: Sequence[Curve], path: Path) -> None:
    """Write a PNG of all jobs: held-out success before and after, and each job's curve, small."""
    shown = curves[:MAX_PANELS]
    num_columns = 2 if len(shown) <= 8 else 3 if len(shown) <= 18 else 4
    num_rows = max(1, math.ceil(len(shown) / num_columns))
    height = max(3.4, 1.9 * num_rows + 0.6, 0.34 * len(curves) + 1.6)
    figure = Figure(figsize=(6.2 + 2.8 * num_columns, height), layout="constrained")
    halves = figure.subfigures(1, 2, width_ratios=(5.6, 2.8 * num_columns), squeeze=False)
    left, right = halves[0]
    _draw_gains(left.subplots(), curves)
    panels = right.subplots(num_rows, num_columns, sharex=False, sharey=True, squeeze=False)
    for axes, curve in zip(panels.flat, shown, strict=False):
        _draw_panel(axes, curve)
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    rest = len(curves) - len(shown)
    note = f" (first {len(shown)} of {len(curves)} jobs)" if rest else ""
    right.suptitle(f"Success by step{note}", fontsize=12, fontweight="bold", color=TEXT)
    _save(figure, path)


def _draw_gains(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw one line a job from its first to its last held-out success."""
    for row, curve in enumerate(curves):
        if not curve.eval_successes:
            continue
        before, after = curve.eval_successes[0], curve.eval_successes[-1]
        axes.plot([before, after], [row, row], color=TRAINING, linewidth=3, zorder=1)
        axes.scatter([before], [row], s=48, color=BEFORE, zorder=2)
        axes.scatter([after], [row], s=48, color=AFTER, zorder=3)
        gain = 100 * (after - before)
        is_right = after >= before
        axes.annotate(
            f"{gain:+.0f}",
            (after, row),
            xytext=(8 if is_right else -8, 0),
            textcoords="offset points",
            va="center",
            ha="left" if is_right else "right",
            fontsize=9,
            color=TEXT,
        )
    axes.scatter([], [], s=48, color=BEFORE, label="before")
    axes.scatter([], [], s=48, color=AFTER, label="after")
    axes.set_yticks(range(len(curves)), [curve.title for curve in curves], fontsize=9)
    axes.set_ylim(len(curves) - 0.4, -0.6)
    axes.set_xlim(0, 1.08)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("Held-out success, before and after", fontsize=12, fontweight="bold", color=TEXT)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2, fontsize=9, frameon=False)
    _clean(axes)
    axes.grid(axis="y", visible=False)


def _draw_panel(axes: Axes, curve: Curve) -> None:
    _line(axes, curve.steps, curve.successes)
    _dots(axes, curve.eval_versions, curve.eval_successes, are_labelled=False)
    axes.set_title(curve.title, fontsize=9, color=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _as_share(axes)
    axes.tick_params(labelsize=8)
    _clean(axes)


def _line(axes: Axes, steps: Sequence[int], values: Sequence[float]) -> None:
    """Draw training values faintly and their running mean on top."""
    axes.plot(steps, values, color=TRAINING, linewidth=1, alpha=0.7, label="training, each step")
    if len(steps) > SMOOTHING_STEPS:
        label = f"training, mean of {SMOOTHING_STEPS} steps"
        axes.plot(steps, _running_mean(values), color=TRAINING, linewidth=2.2, label=label)


def _dots(
    axes: Axes, versions: Sequence[int], values: Sequence[float], *, are_labelled: bool
) -> None:
    axes.plot(
        versions, values, color=AFTER, linewidth=1.2, marker="o", markersize=6, label="held-out"
    )
    if not are_labelled or not values:
        return
    for place in {0, len(values) - 1}:
        axes.annotate(
            f"{100 * values[place]:.0f}%",
            (versions[place], values[place]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            fontweight="bold",
            color=AFTER,
        )


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to four before it; NaNs are left out."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - SMOOTHING_STEPS) : end]
        known = [value for value in window if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def _as_share(axes: Axes) -> None:
    axes.set_ylim(-0.03, 1.1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _clean(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa5b1")
    axes.tick_params(colors="#52606d", labelcolor=TEXT)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    beside = path.with_name(path.name + ".tmp")
    figure.savefig(beside, format="png", dpi=120)
    beside.replace(path)
