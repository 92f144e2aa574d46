"""Family `math`: chain sums and short word problems, judged exactly; one turn.

user       What is 7 + 12 - 5? End with "Answer: " and the number.
assistant  7 + 12 = 19, 19 - 5 = 14. Answer: 14
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marlaas.envs.base import EnvStep
from marlaas.envs.settings import in_range, one_of
from marlaas.envs.splits import draw_item
from marlaas.runtime import rng
from marlaas.types import Message, Prompt

PEOPLE = ("Mira", "Tom", "Ana", "Ben", "Lea", "Noah", "Ida", "Max")
THINGS = ("apples", "coins", "books", "shells", "cards", "stones")
GAINS = ("finds {n} more", "buys {n} more", "gets {n} more")
LOSSES = ("loses {n}", "gives away {n}", "sells {n}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MathSettings:
    """What problems a job of the family `math` gets."""

    kind: str = one_of("sums", "words", "mixed")
    """Bare sums, word problems, or half of each."""
    terms: int = in_range(3, 2, 6)
    """Numbers in one problem."""
    max_value: int = in_range(20, 9, 999)
    """Largest number in a problem; no intermediate result is below 0."""
    answer: str = one_of("marked", "last")
    """The answer stands after `Answer:` at the end, or is the last number of the reply, for models
    that were not taught the mark."""


Terms = tuple[int, ...]
"""Signed numbers to add up; the first is positive."""


class MathFamily:
    """Makes problems whose answer is one whole number."""

    name = "math"
    max_turns = 1

    def __init__(self, settings: MathSettings) -> None:
        self._settings = settings

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split."""
        settings = self._settings
        labels = ("math", settings.kind, settings.terms, settings.max_value, seed, index)
        terms = draw_item(lambda stream: draw_terms(settings, stream), *labels, split=split)
        stream = rng(*labels, split, "wording")
        is_sum = settings.kind == "sums" or (settings.kind == "mixed" and stream.random() < 0.5)
        question = sum_question(terms) if is_sum else word_question(terms, stream)
        return Prompt(
            index=index,
            messages=(Message("user", f"{question} {INSTRUCTIONS[settings.answer]}"),),
            reference={"answer": sum(terms)},
        )

    def make(self, prompt: Prompt, num_envs: int) -> "Sequence[MathEnv]":
        """Return fresh environments for one group."""
        return [MathEnv(prompt.reference, self._settings.answer) for _ in range(num_envs)]

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to end."""

    def cpu_s(self) -> float:
        """Return 0: the family has no processes of its own."""
        return 0.0


class MathEnv:
    """Judges one reply."""

    def __init__(self, reference: Mapping[str, object], form: str = "marked") -> None:
        self._answer = reference["answer"]
        self._parse = _PARSERS[form]

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Return reward 1 when the reply gives the right number in the job's form, else 0."""
        answer = self._parse(reply)
        is_right = answer is not None and answer == self._answer
        return EnvStep(
            reward=float(is_right),
            is_success=is_right,
            metrics={"format": float(answer is not None)},
        )

    async def close(self) -> None:
        """Nothing to free."""


_ANSWER = re.compile(r"Answer:\s*(-?[0-9]{1,12})\.?\s*\Z")


def parse_answer(reply: str) -> int | None:
    """Return the number that the reply ends with after `Answer:`, or None."""
    found = _ANSWER.search(reply)
    return int(found[1]) if found else None


def parse_last_number(reply: str) -> int | None:
    """Return the last whole number of the reply, or None."""
    numbers = _NUMBER.findall(reply)
    return int(numbers[-1]) if numbers else None


_NUMBER = re.compile(r"(?<![\w.])-?[0-9]{1,12}(?![\w]|\.[0-9])")

_PARSERS = {"marked": parse_answer, "last": parse_last_number}

INSTRUCTIONS = {
    "marked": 'End with "Answer: " and the number.',
    "last": "Reply with the number only.",
}


def draw_terms(settings: MathSettings, stream: np.random.Generator) -> Terms:
    """Return random terms of which no partial sum is negative."""
    terms = [int(stream.integers(1, settings.max_value + 1))]
    while len(terms) < settings.terms:
        size = int(stream.integers(1, settings.max_value + 1))
        can_subtract = size <= sum(terms)
        terms.append(-size if can_subtract and stream.random() < 0.5 else size)
    return tuple(terms)


def sum_question(terms: Terms) -> str:
    """Return the question as a bare sum."""
    rest = "".join(f" {'+' if term > 0 else '-'} {abs(term)}" for term in terms[1:])
    return f"What is {terms[0]}{rest}?"


def word_question(terms: Terms, stream: np.random.Generator) -> str:
    """Return the question as a short story, e.g. "Ana has 3 coins. Ana finds 4 more. How many?"."""
    person = PEOPLE[stream.integers(len(PEOPLE))]
    thing = THINGS[stream.integers(len(THINGS))]
    sentences = [f"{person} has {terms[0]} {thing}."]
    for term in terms[1:]:
        phrases = GAINS if term > 0 else LOSSES
        phrase = phrases[stream.integers(len(phrases))].format(n=abs(term))
        sentences.append(f"{person} {phrase}.")
    return " ".join([*sentences, f"How many {thing} now?"])
