"""Activation checkpointing: decoder layers that forget their activations and compute them again.

Gradients are those of the plain pass, bit for bit; memory per token falls to one hidden state per
layer, and the pass costs one more forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that can be checkpointed one by one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def checkpointed(layers: list[nn.Module]) -> Iterator[None]:
    """Checkpoint these layers in passes made inside; the backward pass belongs inside, too.

    The layers' `forward` is wrapped here rather than by the model's own switch, which works in
    training mode only: that would turn dropout on.
    """
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
