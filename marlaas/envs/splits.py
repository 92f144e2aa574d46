"""Train and eval items that never meet: the hash of an item decides which split it belongs to.

Because the seed takes no part in that decision, items held out under one seed are held out under
every other one, too.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from marlaas.errors import InvalidRequest
from marlaas.runtime import derive_seed, rng

ItemT = TypeVar("ItemT")

EVAL_SHARE = 5
"""One item in so many is held out for evaluation."""

MAX_DRAWS = 5000
"""Draws until a split is taken to be empty; by chance that happens to no split that is not."""


def split_of(key: object) -> str:
    """Return the split that a key belongs to, judged by its `repr`."""
    return "eval" if derive_seed("split", repr(key)) % EVAL_SHARE == 0 else "train"


def draw_item(
    draw: Callable[[np.random.Generator], ItemT],
    *labels: int | str,
    split: str,
    key: Callable[[ItemT], object] = lambda item: item,
) -> ItemT:
    """Return the first item that `draw` makes in a split from the stream seeded by the labels.

    Items with equal `key` are in the same split.

    Raises:
        InvalidRequest: the item space is so small that the split seems empty.
    """
    assert split in ("train", "eval"), split
    stream = rng(*labels, split)
    for _ in range(MAX_DRAWS):
        item = draw(stream)
        if split_of(key(item)) == split:
            return item
    raise InvalidRequest(f"these settings leave no item for the split {split!r}; widen them")
