"""Adapters of decode steps, served from tables, against the products of every other pass."""

import numpy as np
import pytest
import torch

from marlaas.model.attention import PackedSequences
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.model.lora import LoraBatch, Segment
from marlaas.model.lora_decode import DecodePart
from tests.models import ALL_KINDS, random_adapter, random_adapters, random_llama

torch.set_num_threads(1)


def logits(base: BaseModel, slots: list[Slot | None], **options: bool) -> torch.Tensor:
    """Return the logits of one token per slot, each a sequence of its own."""
    num_tokens = len(slots)
    batch = LoraBatch.build(base.bank, [Segment(slot, 1) for slot in slots], **options)
    ids = torch.arange(num_tokens) % base.vocab_size
    with torch.inference_mode(), base.bank.active(batch):
        context = PackedSequences([1] * num_tokens)
        return base.head(base.hidden(ids, torch.zeros_like(ids), context, batch))


def test_tables_give_what_batched_products_give_for_any_mix():
    base = random_llama()
    slots = [None, *random_adapters(base, [3, 8, 8, 16, 40, 64], kinds=ALL_KINDS)]
    slots.append(random_adapter(base, 8, kinds=frozenset({"q_proj", "down_proj"}), seed=9))
    rng = np.random.default_rng(0)
    for num_tokens in (1, 2, 7, 30, 64):
        mix = [slots[idx] for idx in rng.integers(0, len(slots), num_tokens)]
        if all(slot is None for slot in mix):
            mix[0] = slots[1]
        decode, other = logits(base, mix, is_decode=True), logits(base, mix)
        torch.testing.assert_close(decode, other, atol=2e-5, rtol=1e-4)


def test_a_token_has_the_same_bits_in_any_company_and_place():
    base = random_llama()
    slots = random_adapters(base, [8, 8, 16], kinds=ALL_KINDS)
    linear = base.model.get_submodule("model.layers.0.mlp.down_proj")
    x_ND = torch.randn(9, linear.in_features)

    def deltas(rows: list[int]) -> torch.Tensor:
        batch = LoraBatch.build(
            base.bank, [Segment(slots[row % 3], 1) for row in rows], is_exact=True, is_decode=True
        )
        y_NO = torch.zeros(len(rows), linear.out_features)
        for part in batch.parts:
            assert isinstance(part, DecodePart)
            part.forward_(y_NO, x_ND[rows], linear.shape)
        return y_NO

    everything = deltas(list(range(9)))
    for rows in ([4], [8, 4, 0], [1, 2, 3, 4, 5, 6, 7, 0], [4, 4, 4, 4]):
        assert torch.equal(deltas(rows), everything[rows])


def test_nan_of_one_adapter_stays_in_its_own_tokens():
    base = random_llama()
    slots = random_adapters(base, [8, 8, 16], kinds=ALL_KINDS)
    mix = [slots[0], None, slots[1], slots[2], slots[0]]
    clean = logits(base, mix, is_decode=True)
    base.bank.write(slots[1], torch.full_like(base.bank.read(slots[1]), torch.nan))
    dirty = logits(base, mix, is_decode=True)
    assert dirty[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(dirty[others], clean[others])


def test_a_written_or_freed_adapter_is_never_served_from_an_old_copy():
    base = random_llama()
    slots = random_adapters(base, [8, 8])
    before = logits(base, slots, is_decode=True)
    base.bank.write(slots[0], torch.zeros_like(base.bank.read(slots[0])))
    written = logits(base, slots, is_decode=True)
    assert not torch.equal(written[0], before[0]) and torch.equal(written[1], before[1])
    torch.testing.assert_close(written[:1], logits(base, [None, slots[1]])[:1])
    base.bank.free(slots[0])
    again = random_adapter(base, 8, seed=5)
    assert again == slots[0]
    torch.testing.assert_close(
        logits(base, slots, is_decode=True), logits(base, slots), atol=2e-5, rtol=1e-4
    )


def test_tables_keep_the_adapters_in_use_and_no_more_than_were_used_at_once():
    base = random_llama()
    slots = random_adapters(base, [8] * 12)
    for first in (0, 3, 6, 9, 4, 0):
        mix = slots[first : first + 3] * 2
        torch.testing.assert_close(
            logits(base, mix, is_decode=True), logits(base, mix), atol=2e-5, rtol=1e-4
        )
    assert base.bank.tables is not None
    assert base.bank.tables.num_places == 3
    logits(base, slots, is_decode=True)
    assert base.bank.tables.num_places == 12
    wide = random_adapter(base, 64)
    torch.testing.assert_close(
        logits(base, [wide, *slots], is_decode=True),
        logits(base, [wide, *slots]),
        atol=2e-5,
        rtol=1e-4,
    )
    assert base.bank.tables.num_places == 24


def test_a_decode_step_has_no_gradient():
    base = random_llama()
    slots = random_adapters(base, [8, 8])
    (part,) = LoraBatch.build(base.bank, [Segment(s, 1) for s in slots], is_decode=True).parts
    with pytest.raises(AssertionError, match="no gradient"):
        part.backward_()


def test_other_types_are_served_by_batched_products():
    base = random_llama(dtype=torch.bfloat16)
    slots = random_adapters(base, [8, 8])
    (part,) = LoraBatch.build(base.bank, [Segment(s, 1) for s in slots], is_decode=True).parts
    assert not isinstance(part, DecodePart)


def test_a_linear_that_few_adapters_target_costs_the_others_nothing():
    base = random_llama()
    slots = random_adapters(base, [8, 8, 16])
    assert base.bank.tables is not None
    logits(base, slots, is_decode=True)
    assert "lm_head" not in base.bank.tables.weights
    with_head = random_adapter(base, 8, kinds=ALL_KINDS, seed=9)
    mix = [slots[0], with_head, None, slots[2], with_head]
    torch.testing.assert_close(
        logits(base, mix, is_decode=True), logits(base, mix), atol=2e-5, rtol=1e-4
    )
    # A place that had a head serves one without: what was there is not read.
    for slot in (with_head, slots[0], slots[1], slots[2]):
        base.bank.free(slot)
    others = random_adapters(base, [8, 8, 16, 8], seed=20)
    again = [*others, random_adapter(base, 8, kinds=frozenset({"lm_head"}), seed=30)]
    torch.testing.assert_close(
        logits(base, again, is_decode=True), logits(base, again), atol=2e-5, rtol=1e-4
    )
