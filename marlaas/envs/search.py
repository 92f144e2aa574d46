"""Family `search`: questions that only a document can answer; several turns.

    system     You can look things up with <search>words</search>. ...
    user       Where does Orlan live?
    assistant  <search>Orlan</search>
    tool       Orlan lives in Veskar and works as a baker.
    assistant  Answer: Veskar

Every prompt has its own little world of people and towns, so nothing can be learnt by heart:
the policy must search. With two hops the first document only names the one to look up next.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np

from marlaas.envs.base import EnvStep
from marlaas.envs.settings import in_range
from marlaas.envs.splits import draw_item
from marlaas.types import Message, Prompt

HEADS = (
    *("Or", "Ves", "Dun", "Mar", "Tel", "Kas", "Bel", "Ron", "Sil", "Had", "Fen", "Gor"),
    *("Lin", "Pav", "Tor", "Um", "Wes", "Yar", "Zan", "Nev", "Cal", "Dor", "El", "Jor"),
)
TAILS = (
    *("lan", "kar", "mor", "la", "wen", "bis", "rik", "sel", "na", "bor", "vin", "mas"),
    *("lo", "ren", "vis", "bar", "gan", "mi", "nos", "ley", "fa", "rus", "ven", "ko"),
)
JOBS = (
    *("baker", "smith", "teacher", "farmer", "painter", "sailor", "miller", "doctor"),
    *("singer", "hunter", "tailor", "pilot", "writer", "gardener", "cook", "guard"),
)
SIGHTS = (
    *("bridge", "tower", "castle", "market", "harbor", "garden", "temple", "lake"),
    *("library", "forest", "mill", "well", "gate", "palace", "cave", "theater"),
)

SYSTEM = (
    "You can look things up with <search>words</search>. "
    'When you know it, end with "Answer: " and one word.'
)
NO_RESULT = "Nothing found."


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """What questions a job of the family `search` gets."""

    hops: int = in_range(1, 1, 2)
    """Documents that must be read one after another."""
    num_documents: int = in_range(8, 4, 64)
    """Documents of one question's world: people and towns, half of each."""
    max_turns: int = in_range(3, 2, 8)
    """Most assistant turns, the answer included."""

    def faults(self) -> list[str]:
        if self.max_turns > self.hops:
            return []
        return [f"max_turns must be over hops ({self.hops}), got {self.max_turns}"]


@dataclass(frozen=True, slots=True)
class World:
    """A question, its answer and the documents; `path` are the names to look up, in order."""

    question: str
    answer: str
    path: tuple[str, ...]
    documents: tuple[str, ...]


class SearchFamily:
    """Makes questions about small invented worlds."""

    name = "search"

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self.max_turns = settings.max_turns

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split."""
        world = make_world(self._settings, index, seed=seed, split=split)
        return Prompt(
            index=index,
            messages=(Message("system", SYSTEM), Message("user", world.question)),
            reference={"answer": world.answer, "documents": list(world.documents)},
        )

    def make(self, prompt: Prompt, num_envs: int) -> "Sequence[SearchEnv]":
        """Return fresh environments for one group."""
        return [SearchEnv(prompt.reference) for _ in range(num_envs)]

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Nothing to end."""

    def cpu_s(self) -> float:
        """Return 0: the family has no processes of its own."""
        return 0.0


class SearchEnv:
    """Answers searches until a reply holds none; that reply is judged."""

    def __init__(self, reference: Mapping[str, object]) -> None:
        self._answer = cast(str, reference["answer"])
        self._documents = cast(Sequence[str], reference["documents"])
        self._num_searches = 0

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Return the best document for a search; otherwise judge the answer."""
        query = parse_query(reply)
        if query is not None:
            self._num_searches += 1
            if not is_last:
                return EnvStep(messages=(Message("tool", best_document(query, self._documents)),))
        answer = parse_answer(reply) if query is None else None
        is_right = answer is not None and answer.casefold() == self._answer.casefold()
        return EnvStep(
            reward=float(is_right),
            is_success=is_right,
            metrics={
                "format": float(answer is not None),
                "searches": float(self._num_searches),
            },
        )

    async def close(self) -> None:
        """Nothing to free."""


_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_ANSWER = re.compile(r"Answer:\s*(\w+)\.?\s*\Z")
_WORD = re.compile(r"\w+")


def parse_query(reply: str) -> str | None:
    """Return the words of the first search in a reply, or None."""
    found = _QUERY.search(reply)
    return found[1].strip() if found else None


def parse_answer(reply: str) -> str | None:
    """Return the single word that the reply ends with after `Answer:`, or None."""
    found = _ANSWER.search(reply)
    return found[1] if found else None


def best_document(query: str, documents: Sequence[str]) -> str:
    """Return the document that shares the rarest words with the query; the first one of equals.

    A shared word counts 1 / (number of documents that hold it), a document's first word, which
    is its title, twice that.
    """
    terms, frequency = _index(tuple(documents))
    wanted = _distinct_terms(query)
    scores = [
        sum(1 / frequency[word] for word in words if word in wanted)
        + (1 / frequency[words[0]] if words[0] in wanted else 0)
        for words in terms
    ]
    best = max(range(len(documents)), key=lambda i: scores[i])
    return documents[best] if scores[best] > 0 else NO_RESULT


@lru_cache(maxsize=256)
def _index(documents: tuple[str, ...]) -> tuple[list[list[str]], Counter[str]]:
    """Return the words of each document, and in how many a word stands: once for all searches."""
    terms = [_distinct_terms(document) for document in documents]
    return terms, Counter(word for words in terms for word in words)


def make_world(settings: SearchSettings, index: int, *, seed: int, split: str) -> World:
    """Return item `index` of a split; no question is in both splits."""
    labels = ("search", settings.hops, settings.num_documents, seed, index)
    return draw_item(
        lambda stream: draw_world(settings, stream),
        *labels,
        split=split,
        key=lambda world: world.question,
    )


def draw_world(settings: SearchSettings, stream: np.random.Generator) -> World:
    """Return a random world and a question about one of its people."""
    num_people = (settings.num_documents + 1) // 2
    num_towns = settings.num_documents - num_people
    num_lands = 3
    names = _draw_names(num_people + num_towns + num_lands, stream)
    people, towns = names[:num_people], names[num_people : num_people + num_towns]
    lands = names[num_people + num_towns :]
    homes = [towns[i % num_towns] for i in stream.permutation(num_people)]
    jobs = [JOBS[i] for i in stream.integers(len(JOBS), size=num_people)]
    land_of = {town: lands[stream.integers(num_lands)] for town in towns}
    sight_of = {town: SIGHTS[stream.integers(len(SIGHTS))] for town in towns}
    documents = [
        *(
            f"{person} lives in {home} and works as a {job}."
            for person, home, job in zip(people, homes, jobs, strict=True)
        ),
        *(f"{town} lies in {land_of[town]} and has a {sight_of[town]}." for town in towns),
    ]
    shuffled = tuple(documents[i] for i in stream.permutation(len(documents)))
    person, home, job = people[0], homes[0], jobs[0]
    is_place = bool(stream.random() < 0.5)
    if settings.hops == 1:
        question = f"Where does {person} live?" if is_place else f"What work does {person} do?"
        return World(question, home if is_place else job, (person,), shuffled)
    if is_place:
        question, answer = f"In which land does {person} live?", land_of[home]
    else:
        question, answer = f"What sight has the town where {person} lives?", sight_of[home]
    return World(question, answer, (person, home), shuffled)


def _draw_names(count: int, stream: np.random.Generator) -> list[str]:
    """Return distinct invented names."""
    chosen = stream.choice(len(HEADS) * len(TAILS), size=count, replace=False)
    return [HEADS[i // len(TAILS)] + TAILS[i % len(TAILS)] for i in map(int, chosen)]


def _distinct_terms(text: str) -> list[str]:
    return list(dict.fromkeys(word.casefold() for word in _WORD.findall(text)))
