"""The benchmark of the control plane runs the real one to its end and counts what it did."""

from dataclasses import replace

from marlaas.bench import control

PLAN = control.Plan(base="tiny", seconds=0.5, num_events=50, num_admissions=100)


def test_jobs_run_on_engines_that_compute_nothing():
    row = control.measure(3, PLAN)
    assert row.num_jobs == 3
    assert row.groups_per_s > row.steps_per_s > 0
    assert row.events_per_s > 0
    assert row.cpu_ms_per_group > 0
    assert row.lag_p50_s <= row.lag_p99_s <= row.lag_max_s


def test_memory_of_a_job_is_what_one_more_takes():
    few = control.measure(1, replace(PLAN, seconds=0.3))
    many = replace(few, num_jobs=11, memory_mb=few.memory_mb + 1)
    assert round(control._memory_kb_per_job([few, many])) == 100
    assert control._memory_kb_per_job([few]) is None
