"""Groups, steps and evaluations: what is committed is whole, and counted once."""

import math
from dataclasses import replace

import pytest

from marlaas.errors import NotFound
from marlaas.store.db import GroupState, Store
from marlaas.store.groups import sampling_usage
from marlaas.types import EventKind, TrajectoryEnd, Usage
from tests.store.records import (
    ACME,
    eval_of,
    group_of,
    record_of,
    spec_of,
    trajectory_of,
    with_finished,
)


def test_a_step_moves_record_groups_version_and_cursor_together(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with_finished(store, ACME, 0, 1, 2)
    store.add_first_version(ACME, "sums", "hash0")
    store.commit_step(ACME, "sums", record_of(1, 0, 1), dropped={1: "zero_variance"})
    assert store.job(ACME, "sums").step == 1
    assert [(row.state, row.reason, row.step) for row in store.groups(ACME, "sums")] == [
        (GroupState.TRAINED, "", 1),
        (GroupState.DROPPED, "zero_variance", 1),
        (GroupState.FINISHED, "", None),
    ]
    assert store.consumed_groups(ACME, "sums") == [0, 1]
    assert store.steps(ACME, "sums") == [record_of(1, 0, 1)]
    assert store.steps(ACME, "sums", after=1) == []
    assert [(row.version, row.has_state) for row in store.versions(ACME, "sums")] == [
        (0, False),
        (1, True),
    ]
    line = store.events(ACME)[-1]
    assert (line.kind, line.data["step"], line.data["metrics"]) == (
        EventKind.STEP,
        1,
        {"reward_mean": 0.5},
    )


def test_a_step_that_takes_a_group_twice_leaves_no_trace(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with_finished(store, ACME, 0, 1, 2)
    store.commit_step(ACME, "sums", record_of(1, 0, 2), dropped={2: "zero_variance"})
    used, last = store.usage(ACME), store.last_event(ACME)
    for dropped in ({}, {1: "stale"}, {0: "stale"}):
        with pytest.raises(AssertionError, match="took a group twice"):
            store.commit_step(ACME, "sums", record_of(2, 0, 1), dropped=dropped)
    assert store.job(ACME, "sums").step == 1
    assert [row.index for row in store.groups(ACME, "sums", GroupState.FINISHED)] == [1]
    assert (store.usage(ACME), store.last_event(ACME)) == (used, last)


def test_steps_cannot_be_skipped_or_repeated(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with pytest.raises(AssertionError, match="not the next one"):
        store.commit_step(ACME, "sums", record_of(2), dropped={})
    store.commit_step(ACME, "sums", record_of(1), dropped={})
    with pytest.raises(AssertionError, match="not the next one"):
        store.commit_step(ACME, "sums", replace(record_of(1), elapsed_s=9.0), dropped={})


def test_a_finished_group_cannot_be_finished_or_reopened(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with_finished(store, ACME, 0)
    with pytest.raises(AssertionError, match="not open"):
        store.finish_group(ACME, "sums", group_of(0))
    store.open_group(ACME, "sums", 0, version=9)
    assert store.groups(ACME, "sums")[0].version == 0


def test_a_group_that_was_lost_is_opened_again_under_a_newer_version(store: Store) -> None:
    store.add_job(ACME, spec_of())
    store.open_group(ACME, "sums", 0, version=0)
    store.open_group(ACME, "sums", 0, version=3)
    assert [(row.version, row.group) for row in store.groups(ACME, "sums")] == [(3, None)]


def test_sampling_counts_a_shared_opening_once(store: Store) -> None:
    long = trajectory_of(0, turns=((4, 6), (9, 12)), length=14)
    assert sampling_usage(group_of(0, trajectory_of(1), long)) == Usage(
        sampled_tokens=5 + 5, prefill_tokens=4 + 3
    )
    nothing = trajectory_of(0, turns=(), end=TrajectoryEnd.ENVIRONMENT_ERROR)
    assert sampling_usage(group_of(0, nothing)) == Usage()


def test_usage_equals_what_the_stored_trajectories_hold(store: Store) -> None:
    store.add_job(ACME, spec_of())
    for index in range(4):
        store.open_group(ACME, "sums", index, version=0)
        group = group_of(index, trajectory_of(0), trajectory_of(1, length=20))
        store.finish_group(ACME, "sums", group)
    store.commit_step(ACME, "sums", record_of(1, 0, 1, 2), dropped={1: "zero_variance"})
    store.add_evaluation(ACME, "sums", eval_of(1), usage=Usage(evaluated_tokens=11))
    groups = [row.group for row in store.groups(ACME, "sums") if row.group is not None]
    sampled = sum(int(one.loss_mask.sum()) for group in groups for one in group.trajectories)
    used = store.job(ACME, "sums").usage
    assert used == store.usage(ACME) == store.usage_by_job(ACME)["sums"]
    assert used == Usage(
        sampled_tokens=sampled, prefill_tokens=16, trained_tokens=2 * 30, evaluated_tokens=11
    )


def test_a_group_is_summed_up_over_trajectories_with_a_verdict(store: Store) -> None:
    store.add_job(ACME, spec_of())
    groups = [
        group_of(0, trajectory_of(0, reward=1.0), trajectory_of(1),
                 trajectory_of(2, reward=9.0, end=TrajectoryEnd.TOOL_TIMEOUT)),
        group_of(1, trajectory_of(0, end=TrajectoryEnd.SANDBOX_LOST)),
        group_of(2, trajectory_of(0, reward=0.75)),
    ]  # fmt: skip
    for group in groups:
        store.open_group(ACME, "sums", group.index, version=0)
        store.finish_group(ACME, "sums", group)
    store.open_group(ACME, "sums", 3, version=0)
    store.commit_step(ACME, "sums", record_of(1, 0, 1), dropped={1: "no verdict"})
    page = store.group_page(ACME, "sums")
    assert [(row.num_trajectories, row.num_tokens) for row in page] == [
        (3, 30), (1, 10), (1, 10), (0, 0),
    ]  # fmt: skip
    assert [(row.reward_mean, row.success_mean) for row in page] == [
        (0.5, 0.5), (None, None), (0.75, 1.0), (None, None),
    ]  # fmt: skip

    def indices(**conditions) -> list[int]:
        return [row.index for row in store.group_page(ACME, "sums", **conditions)]

    assert indices(after=0, limit=2) == [1, 2]
    assert indices(step=1) == [0, 1]
    assert indices(state=GroupState.OPEN) == [3]
    assert indices(state="dropped") == [1]
    assert indices(min_reward=0.5) == [0, 2]
    assert indices(min_reward=0.6, max_reward=0.8) == [2]
    assert indices(max_reward=0.5) == [0]


def test_one_group_is_read_with_its_trajectories(store: Store) -> None:
    store.add_job(ACME, spec_of())
    with_finished(store, ACME, 0)
    stored = store.group(ACME, "sums", 0)
    assert stored.group is not None and len(stored.group.trajectories) == 1
    with pytest.raises(NotFound, match="no group 1 of job 'sums'"):
        store.group(ACME, "sums", 1)


def test_a_version_judged_again_has_the_later_verdict(store: Store) -> None:
    store.add_job(ACME, spec_of())
    store.add_first_version(ACME, "sums", "hash0")
    store.add_evaluation(ACME, "sums", eval_of(0, 0.25))
    store.add_evaluation(ACME, "sums", eval_of(0, 0.75))
    assert store.evaluations(ACME, "sums") == [eval_of(0, 0.75)]
    assert [row.success for row in store.versions(ACME, "sums")] == [0.75]
    lines = [line for line in store.events(ACME) if line.kind is EventKind.EVALUATION]
    assert [line.data["success"] for line in lines] == [0.25, 0.75]


def test_figures_that_are_no_numbers_are_kept_and_shown_as_null(store: Store) -> None:
    store.add_job(ACME, spec_of())
    record = replace(record_of(1), metrics={"grad_norm": float("nan"), "gap": float("inf")})
    store.commit_step(ACME, "sums", record, dropped={})
    store.add_evaluation(ACME, "sums", eval_of(1, float("nan")))
    assert math.isnan(store.steps(ACME, "sums")[0].metrics["grad_norm"])
    assert math.isnan(store.evaluations(ACME, "sums")[0].success)
    assert store.events(ACME)[1].data["metrics"] == {"grad_norm": None, "gap": None}
    assert store.versions(ACME, "sums")[0].success is None


def test_what_was_stored_may_be_stored_again_and_nothing_else_in_its_place(store: Store) -> None:
    store.add_job(ACME, spec_of())
    group, record, verdict = group_of(0, trajectory_of()), record_of(1, 0), eval_of(1)
    store.open_group(ACME, "sums", 0, version=0)
    for _ in range(2):
        store.finish_group(ACME, "sums", group)
        store.commit_step(ACME, "sums", record, dropped={})
        store.add_evaluation(ACME, "sums", verdict, usage=Usage(evaluated_tokens=3))
        store.add_usage(ACME, "sums", Usage(device_s=1.5), entry="1.5")
    store.finish_group(ACME, "sums", group)
    store.add_usage(ACME, "sums", Usage(device_s=0.5), entry="2.0")
    usage = store.job(ACME, "sums").usage
    assert (usage.sampled_tokens, usage.trained_tokens, usage.evaluated_tokens) == (5, 10, 3)
    assert usage.device_s == 2.0
    assert len(store.events(ACME)) == 3
    with pytest.raises(AssertionError, match="was not open"):
        store.finish_group(ACME, "sums", group_of(0, trajectory_of(reward=1.0)))
    with pytest.raises(AssertionError, match="not the next one"):
        store.commit_step(ACME, "sums", replace(record, elapsed_s=9.0), dropped={})
