"""The benchmark of bad neighbours measures the victim that it names, beside real ones."""

import asyncio

import pytest

from marlaas.bench import noisy
from marlaas.config import RunSettings
from marlaas.launch import engine_settings, started
from marlaas.text.bases import ensure_base
from marlaas.text.chat import ChatTokenizer


@pytest.mark.slow
def test_a_victim_is_the_same_beside_a_neighbour_that_crashes(monkeypatch) -> None:
    monkeypatch.setattr(noisy, "LEAD_S", 0.5)
    crashes = next(one for one in noisy.NEIGHBOURS if one.name == "crashes")
    spec = noisy.victim(2, is_seeded=True)

    async def main() -> tuple[noisy.Trial, noisy.Trial]:
        settings = engine_settings(RunSettings(num_workers=1), "tiny", is_exact=True)
        tokenizer = ChatTokenizer.load(ensure_base("tiny"))
        async with started(settings) as workers:
            alone = await noisy.run_trial(spec, None, workers, tokenizer)
            return alone, await noisy.run_trial(spec, crashes, workers, tokenizer)

    alone, beside = asyncio.run(main())
    row = noisy._row([alone, alone], beside, is_seeded=True)
    assert row.is_identical
    assert len(alone.curve) == 2
    assert row.num_neighbour_jobs >= crashes.num_jobs
    assert row.ratio > 0


@pytest.mark.parametrize("neighbour", noisy.NEIGHBOURS, ids=lambda one: one.name)
def test_every_neighbour_has_an_environment_that_can_be_made(neighbour) -> None:
    family = neighbour.family(neighbour.job(3))
    assert family.name == "custom"
    assert neighbour.job(3).tenant == noisy.NEIGHBOUR
