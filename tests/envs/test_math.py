"""Family `math`: exact verdicts on one reply."""

import asyncio

from marlaas.envs.base import EnvStep
from marlaas.envs.math import MathFamily, MathSettings, draw_terms, sum_question
from marlaas.runtime import rng
from marlaas.types import Prompt

FAMILY = MathFamily(MathSettings())


def judge(prompt: Prompt, reply: str) -> EnvStep:
    (env,) = FAMILY.make(prompt, 1)
    return asyncio.run(env.step(reply, is_last=True))


def test_a_right_answer_is_rewarded_with_or_without_steps():
    prompt = FAMILY.prompt(0, seed=0, split="train")
    answer = prompt.reference["answer"]
    for reply in (
        f"Answer: {answer}",
        f"1 + 1 = 2, 2 + 3 = 5. Answer: {answer}",
        f"Answer: 999. No: Answer:{answer}.\n",
    ):
        step = judge(prompt, reply)
        assert step.is_done
        assert (step.reward, step.is_success, step.metrics) == (1.0, True, {"format": 1.0})


def test_a_wrong_answer_in_the_right_format_is_told_from_no_format():
    prompt = FAMILY.prompt(0, seed=0, split="train")
    answer = prompt.reference["answer"]
    assert judge(prompt, "Answer: 999").metrics == {"format": 1.0}
    for reply in (
        f"It is {answer}.",
        f"Answer: {answer} apples",
        "Answer:",
        "",
        f"answer {answer}",
    ):
        step = judge(prompt, reply)
        assert (step.reward, step.is_success, step.metrics) == (0.0, False, {"format": 0.0})


def test_answers_equal_what_the_question_asks():
    for settings in (MathSettings(), MathSettings(terms=6, max_value=999)):
        for index in range(50):
            prompt = MathFamily(settings).prompt(index, seed=1, split="train")
            question = prompt.messages[0].content.partition("?")[0]
            expression = question.removeprefix("What is ")
            numbers = expression.replace("- ", "-").replace("+ ", "").split()
            assert sum(map(int, numbers)) == prompt.reference["answer"]


def test_no_partial_sum_is_negative():
    settings = MathSettings(terms=6, max_value=9)
    for index in range(200):
        terms = draw_terms(settings, rng("test", index))
        assert len(terms) == 6
        assert all(sum(terms[:n]) >= 0 for n in range(1, 7))


def test_a_sum_reads_as_people_write_it():
    assert sum_question((7, 12, -5)) == "What is 7 + 12 - 5?"


def test_the_form_last_takes_the_last_number_of_any_reply():
    family = MathFamily(MathSettings(answer="last"))
    prompt = family.prompt(0, seed=0, split="train")
    answer = prompt.reference["answer"]
    (env,) = family.make(prompt, 1)

    def verdict(reply: str) -> EnvStep:
        return asyncio.run(env.step(reply, is_last=True))

    for reply in (f"{answer}", f"It is 3 + 4, so {answer}.", f"The answer is **{answer}**"):
        assert verdict(reply).is_success, reply
    for reply in (f"{answer}, or 99999", f"{answer}.5", "no idea", f"x{answer}", ""):
        assert not verdict(reply).is_success, reply
    assert verdict("no idea").metrics == {"format": 0.0}


def test_the_same_item_has_the_same_terms_in_both_forms():
    marked, last = (MathFamily(MathSettings(answer=form)) for form in ("marked", "last"))
    for index in range(20):
        first, second = (f.prompt(index, seed=3, split="eval") for f in (marked, last))
        assert first.reference == second.reference
        assert first.messages != second.messages
