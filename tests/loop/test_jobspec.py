"""A job document is read strictly, and all faults of all jobs are reported together."""

from dataclasses import replace

import pytest

from marlaas.errors import InvalidRequest
from marlaas.loop.jobspec import JobFile, describe_job, read_job, read_jobs
from marlaas.types import AdapterSpec, Fork, JobSpec, Latency, TenantId

SUMS = {"tenant": "acme", "name": "sums", "env": {"family": "math"}}


def problems_of(document: object, **options: object) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        read_jobs(document, **options)
    return list(caught.value.problems)


def problems_with(**knobs: object) -> list[str]:
    return problems_of({"jobs": [{**SUMS, **knobs}]})


def job_with(**knobs: object) -> JobSpec:
    return read_jobs({"jobs": [{**SUMS, **knobs}]}).jobs[0]


def test_a_job_of_three_words_takes_every_default():
    expected = JobSpec(tenant=TenantId("acme"), name="sums", env={"family": "math"})
    assert read_jobs({"jobs": [SUMS]}) == JobFile(
        run=read_jobs({"jobs": [SUMS]}).run, jobs=(expected,)
    )


def test_every_knob_reaches_the_job():
    spec = job_with(
        algorithm={"preset": "grpo"},
        rank=16,
        alpha=8,
        targets=["head", "attention"],
        steps=7,
        prompts_per_step=2,
        group_size=4,
        max_staleness=1,
        learning_rate=1e-4,
        max_tokens=32,
        temperature=0.7,
        eval_every=3,
        eval_prompts=16,
        stop_at_success=0.9,
        latency={"median_s": 0.5, "sigma": 1},
        rollout="in_flight",
        straggler_deadline_s=5,
        seed=11,
        keep_versions=2,
    )
    assert spec == JobSpec(
        tenant=TenantId("acme"),
        name="sums",
        env={"family": "math"},
        algorithm={"preset": "grpo"},
        adapter=AdapterSpec(rank=16, alpha=8.0, targets=("attention", "head"), seed=11),
        steps=7,
        prompts_per_step=2,
        group_size=4,
        max_staleness=1,
        learning_rate=1e-4,
        max_tokens=32,
        temperature=0.7,
        eval_every=3,
        eval_prompts=16,
        stop_at_success=0.9,
        latency=Latency(median_s=0.5, sigma=1.0),
        is_in_flight=True,
        straggler_deadline_s=5.0,
        seed=11,
        keep_versions=2,
    )


def test_a_described_job_reads_back_as_itself():
    for knobs in (
        {},
        {"algorithm": "rloo", "seed": 3, "rollout": "in_flight", "targets": "head"},
        {"seeded": True, "latency": {"median_s": 0.1}, "max_staleness": 0},
    ):
        spec = job_with(**knobs)
        assert read_jobs({"jobs": [describe_job(spec)]}).jobs == (spec,)


def test_a_jobs_own_knob_replaces_the_default_whole():
    document = {
        "defaults": {"steps": 5, "env": {"family": "math", "terms": 4}, "tenant": "acme"},
        "jobs": [{"name": "a"}, {"name": "b", "steps": 9, "env": {"family": "math"}}],
    }
    first, second = read_jobs(document).jobs
    assert (first.steps, first.env) == (5, {"family": "math", "terms": 4})
    assert (second.steps, second.env) == (9, {"family": "math"})


def test_replicas_get_numbered_names_and_seeds_of_their_own():
    specs = read_jobs({"jobs": [{**SUMS, "replicate": 3, "seed": 5}]}).jobs
    assert [spec.name for spec in specs] == ["sums-0", "sums-1", "sums-2"]
    assert [(spec.seed, spec.adapter.seed) for spec in specs] == [(5, 5), (6, 6), (7, 7)]


def test_replicas_collide_with_a_job_that_has_their_name():
    document = {"jobs": [{**SUMS, "replicate": 2}, {**SUMS, "name": "sums-1"}]}
    assert problems_of(document) == [
        "jobs[1].name: tenant 'acme' has a job 'sums-1' already at jobs[0]; "
        "expected a name of its own"
    ]


def test_two_tenants_may_use_one_name():
    document = {"jobs": [SUMS, {**SUMS, "tenant": "birch"}]}
    assert len(read_jobs(document).jobs) == 2


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("steps", 0),
        ("steps", 2.0),
        ("steps", True),
        ("steps", "20"),
        ("steps", None),
        ("prompts_per_step", 0),
        ("prompts_per_step", 4096),
        ("group_size", -8),
        ("max_staleness", -1),
        ("max_staleness", 65),
        ("learning_rate", 0),
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", True),
        ("learning_rate", "1e-3"),
        ("rank", 0),
        ("rank", 65),
        ("alpha", 0),
        ("targets", []),
        ("targets", ["attention", "attention"]),
        ("targets", ["q_proj"]),
        ("targets", {"attention": True}),
        ("targets", [["attention"]]),
        ("max_tokens", 0),
        ("temperature", 0),
        ("temperature", float("inf")),
        ("eval_every", -1),
        ("eval_prompts", -1),
        ("stop_at_success", 1.5),
        ("latency", 0.5),
        ("latency", {"median_s": -1}),
        ("latency", {"median_s": True}),
        ("latency", {"sigma": 1.0}),
        ("latency", {"median": 1.0}),
        ("rollout", "inflight"),
        ("rollout", True),
        ("seeded", 1),
        ("seeded", "yes"),
        ("straggler_deadline_s", 0),
        ("seed", -1),
        ("seed", 1.5),
        ("keep_versions", -1),
        ("replicate", 0),
        ("tenant", "a/b"),
        ("tenant", ".."),
        ("tenant", ".hidden"),
        ("tenant", ""),
        ("tenant", 7),
        ("tenant", None),
        ("tenant", "x" * 65),
        ("name", "with space"),
        ("name", "-flag"),
        ("name", "new\nline"),
        ("name", "sums\n"),
        ("name", "naïve"),
        ("env", "math"),
        ("env", {}),
        ("env", {"family": "maths"}),
        ("env", {"family": "math", "terms": 99}),
        ("env", {"family": "math", "term": 3}),
        ("algorithm", 3),
        ("algorithm", "ppo2"),
        ("algorithm", {"clip_high": 0.2}),
        ("algorithm", {"preset": "grpo", "clip_hihg": 0.2}),
    ],
)
def test_an_impossible_value_is_refused_at_its_place_with_what_would_be_right(knob, value):
    problems = problems_with(**{knob: value})
    assert len(problems) == 1
    assert problems[0].startswith(f"jobs[0].{knob}")


@pytest.mark.parametrize(
    ("knobs", "place", "words"),
    [
        ({"group_size": 1}, "group_size", "at least 2"),
        ({"prompts_per_step": 1024, "group_size": 1024}, "prompts_per_step", "at most 16384"),
        ({"stop_at_success": 0.5}, "stop_at_success", "eval_every"),
        ({"rollout": "in_flight", "seeded": True}, "rollout", "expected pinned"),
        ({"rollout": "in_flight", "max_staleness": 0}, "rollout", "expected pinned"),
        ({"top_p": 0.9}, "top_p", "temperature alone"),
        ({"name": "n" * 63, "replicate": 11}, "name", "too long"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused(knobs, place, words):
    (problem,) = problems_with(**knobs)
    assert problem.startswith(f"jobs[0].{place}: ")
    assert words in problem


def test_max_tokens_must_leave_room_in_the_context():
    document = {"jobs": [{**SUMS, "max_tokens": 512}]}
    assert read_jobs(document, context_of=lambda base: 513)
    (problem,) = problems_of(document, context_of=lambda base: 512)
    assert problem.startswith("jobs[0].max_tokens: got 512; expected less than")


def test_an_unknown_base_is_reported_with_the_other_faults():
    def context_of(base: str) -> int:
        raise InvalidRequest(f"unknown base {base!r}")

    document = {"run": {"base": "huge"}, "jobs": [{**SUMS, "steps": 0}]}
    problems = problems_of(document, context_of=context_of)
    assert [problem.split(";")[0] for problem in problems] == [
        "run.base: unknown base 'huge'",
        "jobs[0].steps: got 0",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [("learning_rat", "learning_rate"), ("lr", "learning_rate"), ("task", "env")],
)
def test_an_unknown_key_gets_the_one_that_was_meant(key, meant):
    assert problems_with(**{key: 1}) == [f"jobs[0].{key}: unknown key; did you mean `{meant}`?"]


def test_an_unknown_key_at_the_top_or_in_run_is_refused():
    document = {"job": [], "run": {"worker": 2}, "jobs": [SUMS]}
    assert problems_of(document) == [
        "job: unknown key; did you mean `jobs`?",
        "run.worker: unknown key; did you mean `workers`?",
    ]


def test_missing_knobs_are_named():
    problems = problems_of({"jobs": [{}]})
    assert [problem.split(";")[0] for problem in problems] == [
        "jobs[0]: has no `tenant`",
        "jobs[0]: has no `name`",
        "jobs[0]: has no `env`",
    ]


def test_a_fault_in_the_defaults_is_reported_once_and_hides_none_in_the_jobs():
    document = {
        "defaults": {"steps": 0, "name": "x"},
        "jobs": [{**SUMS, "rank": 0}, {**SUMS, "seed": -1}],
    }
    places = [problem.split(":")[0] for problem in problems_of(document)]
    assert places == [
        "defaults.name",
        "defaults.steps",
        "jobs[0].rank",
        "jobs[1].seed",
        "jobs[1].name",
    ]


def test_stopping_at_a_success_needs_prompts_to_measure_it_on():
    (problem,) = problems_with(stop_at_success=0.5, eval_every=2, eval_prompts=0)
    assert problem.startswith("jobs[0].stop_at_success: can only act at an evaluation")


def test_a_group_of_one_is_refused_beside_an_algorithm_that_there_is_not():
    both = problems_of({"jobs": [{**SUMS, "group_size": 1, "algorithm": "nope"}]})
    assert [problem.partition(":")[0] for problem in both] == [
        "jobs[0].algorithm",
        "jobs[0].group_size",
    ]


def test_a_rule_that_a_default_breaks_says_so():
    (problem,) = problems_of({"defaults": {"group_size": 1}, "jobs": [SUMS]})
    assert problem.startswith("jobs[0].group_size: got 1; expected at least 2")
    assert problem.endswith("from `defaults`")


def test_a_number_written_as_text_gets_a_hint():
    assert problems_with(learning_rate="2e-3", steps="20") == [
        "jobs[0].steps: got '20'; expected a whole number from 1 to 100000, without quotes",
        "jobs[0].learning_rate: got '2e-3'; expected a number above 0, at most 1, without quotes",
    ]


def test_a_rule_between_knobs_keeps_quiet_when_one_of_them_was_refused():
    problems = problems_with(stop_at_success=0.5, eval_every="often")
    assert [problem.split(":")[0] for problem in problems] == ["jobs[0].eval_every"]


def test_every_fault_of_every_job_is_reported_in_one_go():
    bad = dict.fromkeys(describe_job(job_with()), None)
    problems = problems_of({"jobs": [bad, bad]})
    assert len(problems) == 2 * len(bad)


@pytest.mark.parametrize("jobs", [None, [], {}, "sums", 3])
def test_a_document_without_a_list_of_jobs_is_refused(jobs):
    assert problems_of({"jobs": jobs})[0].startswith("jobs: got ")


@pytest.mark.parametrize("document", [None, [], "jobs", 3])
def test_a_document_that_is_no_mapping_is_refused(document):
    assert problems_of(document)[0].startswith("job file: got ")


def test_a_thing_that_is_no_job_is_refused_beside_one_that_is():
    assert problems_of({"jobs": [7, {**SUMS, "steps": 0}]})[0] == (
        "jobs[0]: got 7; expected a mapping"
    )


def test_run_settings_are_read():
    run = read_jobs(
        {
            "run": {"base": "tiny", "workers": 2, "placement": "split", "mode": "lockstep"},
            "jobs": [SUMS],
        }
    ).run
    assert (run.base, run.workers, run.placement, run.mode) == ("tiny", 2, "split", "lockstep")


@pytest.mark.parametrize(
    "run", [{"base": ""}, {"workers": 0}, {"placement": "both"}, {"mode": True}, []]
)
def test_impossible_run_settings_are_refused(run):
    assert problems_of({"run": run, "jobs": [SUMS]})[0].startswith("run")


def test_a_seed_shift_changes_nothing_else():
    first, second = read_jobs({"jobs": [{**SUMS, "replicate": 2}]}).jobs
    adapter = replace(first.adapter, seed=1)
    assert replace(first, name="sums-1", seed=1, adapter=adapter) == second


def test_one_job_of_a_known_tenant_is_read_as_the_service_gets_it() -> None:
    body = {
        "name": "sums", "env": {"family": "math"}, "max_job_tokens": 10_000, "max_device_s": 60,
        "fork": {"job": "older", "version": 3, "with_optimizer": True},
    }  # fmt: skip
    spec = read_job(body, tenant=TenantId("acme"))
    assert (spec.tenant, spec.max_job_tokens, spec.max_device_s) == ("acme", 10_000, 60.0)
    assert spec.fork == Fork(job="older", version=3, with_optimizer=True)
    described = describe_job(spec)
    assert described.pop("tenant") == "acme"
    assert read_job(described, tenant=TenantId("acme")) == spec


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tenant": "birch"}, "tenant: unknown key"),
        ({"replicate": 3}, "replicate: unknown key"),
        ({"fork": {"job": "older"}}, "fork: names no job or no version"),
        ({"fork": {"job": "older", "version": -1}}, "fork.version: got -1"),
        ({"env": None}, "env: got nothing"),
    ],
)
def test_one_job_with_a_fault_is_refused_with_its_place(change, problem) -> None:
    body = {"name": "sums", "env": {"family": "math"}} | change
    with pytest.raises(InvalidRequest, match=problem):
        read_job(body, tenant=TenantId("acme"))
