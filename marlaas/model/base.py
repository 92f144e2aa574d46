"""A frozen base model, ready for many adapters: `transformers` model, our attention and linears.

The engine calls two things: `hidden` (a packed pass through the blocks) and the head, which it
applies itself to the few positions whose logits it needs, chunk by chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from marlaas.model import attention, lora
from marlaas.model.attention import AttentionContext
from marlaas.model.lora import AdapterBank, LoraBatch, MultiLoraLinear


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base model on one device with its adapter bank."""

    name: str
    model: PreTrainedModel
    bank: AdapterBank
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    """Positions that the model was made for."""

    @property
    def head(self) -> MultiLoraLinear:
        head = self.model.get_output_embeddings()
        assert isinstance(head, MultiLoraLinear)
        return head

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        context: AttentionContext,
        batch: LoraBatch | None,
    ) -> Tensor:
        """Return the last hidden states [N, D] of one packed pass.

        For training, call it and the backward pass inside `bank.active(batch)`; this method
        activates the batch itself only when nothing is active yet.
        """
        if self.bank.batch is None and batch is not None:
            with self.bank.active(batch):
                return self.hidden(tokens_N, positions_N, context, batch)
        output = self.model.base_model(
            input_ids=tokens_N[None],
            position_ids=positions_N[None],
            use_cache=False,
            context=context,
        )
        return output[0][0]


def adopt(model: PreTrainedModel, name: str, *, max_slots: int = 16384) -> BaseModel:
    """Make a loaded causal LM ours: freeze it, put in our attention and multi-LoRA linears."""
    attention.register()
    config = model.config
    head = model.get_output_embeddings()
    bank = AdapterBank(
        lora.target_shapes(model),
        dtype=head.weight.dtype,
        device=head.weight.device,
        max_slots=max_slots,
    )
    lora.install(model, bank)
    model.set_attn_implementation(attention.ATTENTION_NAME)
    model.eval()
    num_heads = config.num_attention_heads
    return BaseModel(
        name=name,
        model=model,
        bank=bank,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=head.weight.shape[0],
        max_context=config.max_position_embeddings,
    )


def load_base(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> BaseModel:
    """Load a Hugging Face folder of a causal LM as a frozen base."""
    overrides: Mapping[str, object] = {"dtype": dtype, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **overrides)
    return adopt(model.to(device), folder.name)
