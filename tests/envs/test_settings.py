"""Settings and catalog: every fault is named at once, with what would be right."""

import pytest

from marlaas.envs.catalog import FAMILIES, make_family
from marlaas.envs.math import MathSettings
from marlaas.envs.search import SearchSettings
from marlaas.envs.settings import parse_settings
from marlaas.errors import InvalidRequest


def problems_of(cls: type, mapping: dict[str, object]) -> tuple[str, ...]:
    with pytest.raises(InvalidRequest) as caught:
        parse_settings(cls, mapping)
    return caught.value.problems


def test_absent_settings_take_their_defaults():
    assert parse_settings(MathSettings, {}) == MathSettings()
    assert parse_settings(MathSettings, {"terms": 4}) == MathSettings(terms=4)


def test_every_fault_is_named_at_once():
    problems = problems_of(
        MathSettings, {"terns": 3, "terms": 9, "kind": "sumz", "max_value": "20"}
    )
    assert problems == (
        "unknown setting 'terns'; did you mean 'terms'?",
        "terms must be between 2 and 6, got 9",
        "kind must be one of sums, words, mixed, got 'sumz'",
        "max_value must be of type int, got '20'",
    )


def test_an_unknown_key_unlike_any_other_is_answered_with_all_of_them():
    (problem,) = problems_of(MathSettings, {"zzz": 1})
    assert problem.endswith("known are answer, kind, max_value, terms")


def test_true_is_no_number():
    assert problems_of(MathSettings, {"terms": True}) == ("terms must be of type int, got True",)


def test_rules_between_settings_are_held():
    (problem,) = problems_of(SearchSettings, {"hops": 2, "max_turns": 2})
    assert problem == "max_turns must be over hops (2), got 2"


def test_the_catalog_makes_families_with_their_settings():
    assert make_family({"family": "math"}).max_turns == 1
    assert make_family({"family": "search", "max_turns": 5}).max_turns == 5
    needed = {"custom": {"environment": "file", "prompts": "file"}}
    for name in FAMILIES:
        assert make_family({"family": name, **needed.get(name, {})}).name == name


def test_a_wrong_family_is_answered_with_the_right_name():
    with pytest.raises(InvalidRequest, match="did you mean 'math'"):
        make_family({"family": "maths"})
    with pytest.raises(InvalidRequest, match="math, search, code, custom"):
        make_family({"terms": 3})
