"""A frozen base model, ready for many adapters: `transformers` model, our attention and linears.

The engine calls two things: `hidden` (a packed pass through the blocks) and the head, which it
applies itself to the few positions whose logits it needs, chunk by chunk.

On a CPU the weights are the file's own pages, mapped and never written: worker processes that load
the same folder share one copy of them in memory.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from marlaas.errors import InvalidRequest, UnsupportedBase, UnsupportedFeature
from marlaas.model import architecture, attention, lora
from marlaas.model.attention import AttentionContext
from marlaas.model.bank import AdapterBank
from marlaas.model.convert import folder_in_dtype, without_progress_bars
from marlaas.model.lora import LoraBatch, MultiLoraLinear
from marlaas.types import TARGET_GROUPS


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
    """Positions that may be used: those the model was made for, or fewer by choice."""
    unsupported_targets: Mapping[str, str]
    """Keys of `TARGET_GROUPS` that adapters cannot have on this base, and why."""
    stock_config: PreTrainedConfig
    """The config as it was before the model became ours; the self-check compares with it."""

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

    @property
    def is_prepacked(self) -> bool:
        """Passes do best with `prepack.padded_rows` rows."""
        return self.head.packed is not None

    @property
    def supported_targets(self) -> tuple[str, ...]:
        """Keys of `TARGET_GROUPS` that adapters may have on this base."""
        return tuple(group for group in TARGET_GROUPS if group not in self.unsupported_targets)

    def target_problems(self, targets: Iterable[str]) -> list[str]:
        """Return why an adapter on this base cannot have these targets; nothing if it can."""
        expected = ", ".join(self.supported_targets)
        return [
            f"target {group}: base {self.name}: {self.unsupported_targets[group]}; "
            f"expected targets among {expected}"
            for group in targets
            if group in self.unsupported_targets
        ]

    def prepack(self) -> bool:
        """Keep packed copies of the weights for fast products, where those pay; say if they do."""
        return lora.prepack(self.model)

    def check_exact(self) -> None:
        """Raise `UnsupportedFeature` if company can change bits of a result on this base.

        A mixture of experts multiplies the tokens of all sequences that chose an expert at once,
        and products with fewer than `EXACT_MIN_ROWS` rows have bits of their own.
        """
        assert not self.is_prepacked, "exact mode needs plain products"
        if any(name.endswith(".experts") for name, _ in self.model.named_modules()):
            raise UnsupportedFeature(
                f"base {self.name} has experts, whose results depend on who else computes, in the "
                "last bits; expected a base without experts, or jobs that are not seeded"
            )

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


def adopt(
    model: PreTrainedModel, name: str, *, max_context: int | None = None, max_slots: int = 16384
) -> BaseModel:
    """Make a loaded causal LM ours: freeze it, put in our attention and multi-LoRA linears.

    Raises:
        UnsupportedBase: our passes would not compute what the model computes.
    """
    stock_config = copy.deepcopy(model.config)
    used_context = architecture.check_config(model.config, max_context)
    unsupported = architecture.check_modules(model)
    architecture.ignore_window(model)
    attention.register()
    head = model.lm_head
    kinds = {
        kind for group in TARGET_GROUPS if group not in unsupported for kind in TARGET_GROUPS[group]
    }
    bank = AdapterBank(
        [shape for shape in lora.target_shapes(model) if shape.kind in kinds],
        dtype=head.weight.dtype,
        device=head.weight.device,
        max_slots=max_slots,
    )
    lora.install(model, bank)
    model.set_attn_implementation(attention.ATTENTION_NAME)
    model.eval()
    num_kv_heads, head_dim = architecture.kv_shape(model.config)
    return BaseModel(
        name=name,
        model=model,
        bank=bank,
        num_layers=model.config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=head.weight.shape[0],
        max_context=used_context,
        unsupported_targets=unsupported,
        stock_config=stock_config,
    )


def load_base(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_context: int | None = None,
) -> BaseModel:
    """Load a Hugging Face folder of a causal LM as a frozen base.

    A base that we cannot serve is refused before its weights are read. Names and GGUF files become
    folders by `text.bases.resolve_base` and `model.convert`.

    Raises:
        UnsupportedBase: our passes would not compute what the model computes.
        InvalidRequest: the folder holds no complete model.
    """
    folder = Path(folder)
    architecture.check_architecture(read_config(folder), max_context)
    is_mapped = torch.device(device).type == "cpu"
    model = read_weights(folder_in_dtype(folder, dtype) if is_mapped else folder, dtype)
    model.to(torch.device(device))  # type: ignore[arg-type]
    return adopt(model, folder.name, max_context=max_context)


def read_config(folder: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UnsupportedBase(
            f"{folder}: transformers cannot read it as a model of its own ({_first_line(error)}); "
            "expected a folder whose config.json names an architecture of transformers"
        ) from error


def read_weights(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with without_progress_bars():
            model, loading = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, RuntimeError) as error:
        raise InvalidRequest(f"{folder}: cannot load the weights: {_first_line(error)}") from error
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:5])
        raise InvalidRequest(f"{folder} lacks weights of the model: {missing}; expected all")
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
