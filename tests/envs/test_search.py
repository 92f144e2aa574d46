"""Family `search`: the answer is only in the documents, and searching finds it."""

import asyncio

import pytest

from marlaas.envs.base import EnvStep
from marlaas.envs.search import (
    NO_RESULT,
    SearchEnv,
    SearchFamily,
    SearchSettings,
    best_document,
    draw_world,
)
from marlaas.runtime import rng
from marlaas.text.bases import resolve_base
from marlaas.text.chat import ChatTokenizer
from marlaas.types import Prompt

FAMILIES = {hops: SearchFamily(SearchSettings(hops=hops)) for hops in (1, 2)}


@pytest.fixture(params=[1, 2])
def family(request: pytest.FixtureRequest) -> SearchFamily:
    return FAMILIES[request.param]


def play(prompt: Prompt, *replies: str) -> list[EnvStep]:
    """Return the environment's answers; the last reply is the last turn."""
    env = SearchEnv(prompt.reference)

    async def episode() -> list[EnvStep]:
        last = len(replies) - 1
        return [await env.step(reply, is_last=i == last) for i, reply in enumerate(replies)]

    return asyncio.run(episode())


def test_the_opening_does_not_hold_the_answer(family):
    for index in range(200):
        prompt = family.prompt(index, seed=0, split="train")
        opening = " ".join(message.content for message in prompt.messages)
        assert str(prompt.reference["answer"]) not in opening


def test_looking_up_the_path_leads_to_the_answer():
    for hops in (1, 2):
        for index in range(100):
            world = draw_world(SearchSettings(hops=hops), rng("test", hops, index))
            assert len(world.path) == hops
            found = [best_document(name, world.documents) for name in world.path]
            assert world.answer in found[-1]
            assert all(world.path[i + 1] in found[i] for i in range(hops - 1))
            assert hops == 1 or world.answer not in found[0]


def test_a_search_is_answered_with_the_document_and_the_answer_with_the_verdict():
    prompt = FAMILIES[1].prompt(0, seed=0, split="train")
    name = prompt.messages[-1].content.split()[-2]
    found, verdict = play(
        prompt, f"<search> {name} </search>", f"Answer: {prompt.reference['answer']}."
    )
    (message,) = found.messages
    assert message.role == "tool"
    assert message.content.startswith(f"{name} ")
    assert (verdict.reward, verdict.is_success) == (1.0, True)
    assert verdict.metrics == {"format": 1.0, "searches": 1.0}


def test_a_wrong_unreadable_or_missing_answer_earns_nothing():
    prompt = FAMILIES[1].prompt(0, seed=0, split="train")
    answer = prompt.reference["answer"]
    for reply, format_ in (
        ("Answer: Nowhere", 1.0),
        (f"It is {answer}.", 0.0),
        (f"Answer: {answer} or so", 0.0),
        ("", 0.0),
        ("<search>again</search>", 0.0),
        (f"<search>x</search> Answer: {answer}", 0.0),
    ):
        (verdict,) = play(prompt, reply)
        assert (verdict.reward, verdict.is_success) == (0.0, False)
        assert verdict.metrics["format"] == format_


def test_a_query_with_no_known_word_finds_nothing():
    assert best_document("zzz !", ["Orlan lives here."]) == NO_RESULT
    assert best_document("", ["Orlan lives here."]) == NO_RESULT


def test_rare_words_decide_which_document_is_found():
    documents = ["Ana lives in Belmor.", "Ben lives in Dunlan."]
    assert best_document("who lives in the town of ben", documents) == documents[1]
    assert best_document("lives", documents) == documents[0]


def test_tool_results_are_short():
    tokenizer = ChatTokenizer.load(resolve_base("tiny"))
    for index in range(50):
        prompt = FAMILIES[2].prompt(index, seed=0, split="train")
        documents = prompt.reference["documents"]
        assert isinstance(documents, list)
        assert max(len(tokenizer.encode(document)) for document in documents) <= 20
