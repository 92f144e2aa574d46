"""What holds for every built-in family: items by seed, splits that never meet, short prompts."""

from collections.abc import Callable

import pytest

from marlaas.envs.code_problems import CodeSettings, make_problem
from marlaas.envs.math import MathFamily, MathSettings
from marlaas.envs.search import SearchFamily, SearchSettings
from marlaas.text.bases import resolve_base
from marlaas.text.chat import ChatTokenizer
from marlaas.types import Prompt

MakePrompt = Callable[[int, int, str], Prompt]


def of_family(family: MathFamily | SearchFamily) -> MakePrompt:
    return lambda index, seed, split: family.prompt(index, seed=seed, split=split)


def of_code(settings: CodeSettings) -> MakePrompt:
    return lambda index, seed, split: make_problem(settings, index, seed=seed, split=split)


CASES: dict[str, MakePrompt] = {
    "math": of_family(MathFamily(MathSettings())),
    "math smallest": of_family(MathFamily(MathSettings(terms=2, max_value=9))),
    "math words": of_family(MathFamily(MathSettings(kind="words"))),
    "math mixed": of_family(MathFamily(MathSettings(kind="mixed", terms=6, max_value=999))),
    "search": of_family(SearchFamily(SearchSettings())),
    "search hops=2": of_family(SearchFamily(SearchSettings(hops=2))),
    "search smallest": of_family(SearchFamily(SearchSettings(num_documents=4))),
    "code": of_code(CodeSettings()),
    "code smallest": of_code(CodeSettings(steps=1, max_value=5, num_tests=2)),
    "code function": of_code(CodeSettings(kind="function")),
}


@pytest.fixture(params=list(CASES))
def make_prompt(request: pytest.FixtureRequest) -> MakePrompt:
    return CASES[request.param]


def questions(make_prompt: MakePrompt, split: str) -> set[str]:
    prompts = [make_prompt(i, seed, split) for seed in (0, 1) for i in range(150)]
    return {prompt.messages[-1].content for prompt in prompts}


def test_the_same_seed_split_and_index_give_the_same_prompt(make_prompt):
    for split in ("train", "eval"):
        assert make_prompt(3, 7, split) == make_prompt(3, 7, split)
        assert make_prompt(3, 7, split).index == 3


def test_another_seed_gives_other_prompts(make_prompt):
    first, second = ([make_prompt(i, seed, "train").messages for i in range(12)] for seed in (0, 1))
    assert first != second


def test_train_and_eval_share_no_question_under_any_seeds(make_prompt):
    assert not questions(make_prompt, "train") & questions(make_prompt, "eval")


def test_default_openings_are_short():
    tokenizer = ChatTokenizer.load(resolve_base("tiny"))
    for name in ("math", "math words", "search", "search hops=2", "code", "code function"):
        lengths = [
            len(tokenizer.render_opening(CASES[name](i, 0, "train").messages)) for i in range(40)
        ]
        assert max(lengths) <= 80, name
