"""Which process is killed when: the plan of `bench crash`, drawn from a seed."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from marlaas import runtime
from marlaas.bench.crash_server import Boundary, Moment

OPERATIONS = (
    "set_job_state",
    "open_group",
    "finish_group",
    "commit_step",
    "keep_adapter",
    "prune_adapters",
    "add_usage",
    "add_evaluation",
)
"""Operations of the store at which a running job becomes durable."""

FIRST_OPERATIONS = ("accept", "add_first_version")
"""Those at which it begins to be: they come while jobs are handed over."""

MAX_NUMBER = {"open_group": 12, "finish_group": 12, "commit_step": 4, "keep_adapter": 4}
"""Which call of an operation is struck, at most; of the others the first or second."""


class Target(StrEnum):
    """What is killed."""

    BOUNDARY = "server at a boundary"
    SERVER = "server"
    WORKER = "engine worker"
    SANDBOX = "sandbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One kill."""

    target: Target
    boundary: Boundary | None = None
    is_early: bool = False
    """The server is armed before it starts: it may be struck while it recovers."""
    wait_s: float = 0.0
    """After the first step of the server's life; for the others than boundaries."""

    def __str__(self) -> str:
        if self.boundary is None:
            return self.target.value
        early = ", from the start" if self.is_early else ""
        boundary = self.boundary
        return f"{boundary.moment} {boundary.operation} number {boundary.number}{early}"


def draw_strikes(num_kills: int, seed: int) -> list[Strike]:
    """Return kills in order: six in ten at boundaries, each boundary once before any comes again;
    one in eight of a worker, one in twelve of a sandbox, the others of the server at a moment."""
    rng = runtime.rng("strikes", seed)
    num_sandboxes, num_workers = num_kills // 12, num_kills // 8
    num_boundaries = round(0.6 * num_kills)
    num_servers = num_kills - num_boundaries - num_workers - num_sandboxes
    points, first_points = _points(OPERATIONS, rng), _points(FIRST_OPERATIONS, rng)
    num_first = min(len(first_points), num_boundaries // 4)
    first = [
        _at(operation, moment, rng, is_early=True) for operation, moment in first_points[:num_first]
    ]
    rest = [
        _at(*points[number % len(points)], rng, is_early=rng.random() < 0.25)
        for number in range(num_boundaries - num_first)
    ]
    for target, count in (
        (Target.SERVER, num_servers),
        (Target.WORKER, num_workers),
        (Target.SANDBOX, num_sandboxes),
    ):
        rest += [Strike(target=target, wait_s=rng.uniform(0.0, 2.0)) for _ in range(count)]
    return [*first, *(rest[index] for index in rng.permutation(len(rest)))]


def _points(operations: Sequence[str], rng: np.random.Generator) -> list[tuple[str, Moment]]:
    """Return each operation with each moment, in an order that is drawn."""
    points = list(itertools.product(operations, Moment))
    return [points[index] for index in rng.permutation(len(points))]


def _at(operation: str, moment: Moment, rng: np.random.Generator, *, is_early: bool) -> Strike:
    number = 1 + int(rng.integers(MAX_NUMBER.get(operation, 2)))
    boundary = Boundary(operation=operation, moment=moment, number=number)
    return Strike(target=Target.BOUNDARY, boundary=boundary, is_early=is_early)
