"""How much memory a pass takes at its peak, beyond what is resident: predicted from its size.

Whoever cuts data into passes asks before it does, whether a pass fits, and so does the choice of
activation checkpointing. Counted in bytes of live tensors; `engine/allocator.py` sees to it that
the process takes hardly more than that.

    peak = kept by autograd + cos and sin + the larger of two moments
    kept      no layer checkpointed   L (token N + query Q + key K + rank R)
              every layer             L D N
    moments   logits are made         2 D (N + M) + 2 chunks of logits (3 if the head is adapted)
              a layer goes back       2 D N + 2 F N  (checkpointed: + the layer's own, - D N)

    one layer keeps   token  input, norm, input of o, middle, norm, and gate, silu, up, product
                      query  q and output,   key  k and v,   rank  the inner values of each linear

L layers, D width, F of the MLP, N tokens, Q queries and K keys of the attention batches, M rows of
logits, R the sum of the tokens' ranks. All of it is linear in N, as attention keeps no scores.
Source: read off the allocations of a pass; `tests/engine/test_pass_memory.py` measures it, on
Llama's form. Norms on queries and keys, more norms, and experts are added as their modules show.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

from torch import nn

from marlaas.engine.logprobs import MAX_CHUNK_LOGITS, MIN_CHUNK_ROWS
from marlaas.model.base import BaseModel
from marlaas.model.prepack import padded_rows
from marlaas.types import RANK_BUCKETS

BOOKS_BYTES = 256
"""What lists and arrays say of one token while its pass runs: places, targets, weights, losses."""

MAX_TOKENS = 1 << 32
"""Beyond any length that is asked about."""


@dataclass(frozen=True, slots=True)
class PassSize:
    """What a pass is made of, as far as memory goes; sizes of parts add up."""

    num_tokens: int
    """Computed, padding included."""
    num_queries: int
    """Of the attention batches, as often as they occur."""
    num_keys: int
    num_rows: int = 0
    """Rows of logits."""
    num_ranks: int = 0
    """The ranks of all tokens' adapters, summed."""
    num_masked: int = 0
    """Elements of attention masks."""
    has_head_adapter: bool = False

    @classmethod
    def of_sequence(
        cls, num_tokens: int, *, rank: int = RANK_BUCKETS[-1], has_head_adapter: bool = True
    ) -> "PassSize":
        """Return the size of one sequence, all of it scored, under the largest adapter."""
        return cls(
            *(num_tokens,) * 4,
            num_ranks=num_tokens * rank,
            has_head_adapter=has_head_adapter,
        )

    def __add__(self, other: "PassSize") -> "PassSize":
        return PassSize(
            self.num_tokens + other.num_tokens,
            self.num_queries + other.num_queries,
            self.num_keys + other.num_keys,
            self.num_rows + other.num_rows,
            self.num_ranks + other.num_ranks,
            self.num_masked + other.num_masked,
            self.has_head_adapter or other.has_head_adapter,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Predicts the peak of passes on one base; all fields but counts are bytes."""

    num_layers: int
    width: int
    """The residual stream of a token."""
    per_token: int
    """What one layer keeps of a token outside attention, its input included."""
    per_query: int
    """q and the output, one layer."""
    per_key: int
    """k and v, one layer."""
    per_rank: int
    """One inner value of each linear of a layer."""
    mlp: int
    """One value per neuron of an MLP, or of the experts that a token visits."""
    rotary: int
    """cos and sin of a position."""
    logits: int
    """One row of them."""
    max_rows: int
    """Rows of one chunk of logits."""
    mask: int
    """One element of an attention mask."""

    @classmethod
    def of(cls, base: BaseModel) -> "PassMemory":
        num_layers, size = base.num_layers, base.head.weight.element_size()
        wide, of_mlp = max(4, size), _mlp_width(base)
        width_in, width_out = Counter[str](), Counter[str]()
        for shape in base.bank.modules:
            width_in[shape.kind] += shape.in_features
            width_out[shape.kind] += shape.out_features
        width = width_in["q_proj"] // num_layers
        queries, keys = (width_out[kind] // num_layers for kind in ("q_proj", "k_proj"))
        num_norms, has_head_norms = _norms(base.model, width)
        # Norms keep their input in fp32 or wider, linears theirs as it is.
        per_token = round(num_norms / num_layers) * width * wide + 2 * width * size
        per_token += (queries + 4 * of_mlp) * size
        if has_head_norms:
            per_token += (queries + keys) * wide
        max_rows = max(MIN_CHUNK_ROWS, MAX_CHUNK_LOGITS // base.vocab_size)
        num_linears = sum(shape.kind != "lm_head" for shape in base.bank.modules)
        return cls(
            num_layers=num_layers,
            width=width * size,
            per_token=per_token,
            per_query=2 * queries * size,
            per_key=2 * keys * size,
            per_rank=num_linears * size // num_layers,
            mlp=of_mlp * size,
            rotary=2 * base.head_dim * wide,
            logits=base.vocab_size * wide,
            max_rows=padded_rows(max_rows) if base.is_prepacked else max_rows,
            mask=size,
        )

    def training(self, size: PassSize, *, is_checkpointed: bool) -> int:
        """Return the peak of a forward and backward pass."""
        num_tokens = size.num_tokens
        layer = self._layer(size)
        kept = self.num_layers * (self.width * num_tokens if is_checkpointed else layer)
        # Of what its MLP keeps the product has gone, and three gradients as wide have come; or all
        # of it has gone, and the gradients of queries, keys and values have come.
        attention = size.num_queries * 2 * self.per_query + size.num_keys * 2 * self.per_key
        backward = max(2 * self.mlp * num_tokens, attention - 4 * self.mlp * num_tokens)
        backward += 2 * self.width * num_tokens
        if is_checkpointed:
            backward += layer - self.width * num_tokens
        head = 2 * self.width * (num_tokens + size.num_rows) + self._head(size)
        return kept + self._constants(size) + max(head, backward)

    def scoring(self, size: PassSize) -> int:
        """Return the peak of a forward pass alone, a prefill pass among them."""
        num_tokens = size.num_tokens
        # The residual, a norm, and gate, silu and product of an MLP; or q, k and v, as the linears
        # gave them and as attention takes them, and its output twice.
        mlp = num_tokens * 3 * (self.width + self.mlp)
        attention = num_tokens * (2 * self.width + self.per_query // 2 + self.per_key)
        attention += size.num_queries * self.per_query * 3 // 2 + size.num_keys * self.per_key
        head = self.width * (num_tokens + size.num_rows) + self._head(size)
        return self._constants(size) + max(mlp, attention, head)

    def prefill(self, num_tokens: int, num_context: int) -> int:
        """Return the peak of a prefill pass over the last of so many tokens of one context."""
        mask = num_tokens * num_context if num_context > num_tokens else 0
        return self.scoring(PassSize(num_tokens, num_tokens, num_tokens, num_masked=mask))

    def longest(self, budget_bytes: int, *, is_checkpointed: bool = True) -> int:
        """Return the length of the longest sequence that may be trained on within the budget, under
        the largest adapter; 0 if none may."""

        def peak_bytes(num_tokens: int) -> int:
            size = PassSize.of_sequence(num_tokens)
            return self.training(size, is_checkpointed=is_checkpointed)

        return bisect_right(range(MAX_TOKENS), budget_bytes, key=peak_bytes) - 1

    def _layer(self, size: PassSize) -> int:
        """Return what autograd keeps of one layer."""
        return (
            size.num_tokens * self.per_token
            + size.num_queries * self.per_query
            + size.num_keys * self.per_key
            + size.num_ranks * self.per_rank
        )

    def _head(self, size: PassSize) -> int:
        """Return what a chunk of logits takes: itself, and one more for what is made of it."""
        num_chunks = 3 if size.has_head_adapter else 2
        return num_chunks * min(size.num_rows, self.max_rows) * self.logits

    def _constants(self, size: PassSize) -> int:
        return size.num_tokens * (self.rotary + BOOKS_BYTES) + size.num_masked * self.mask


def _mlp_width(base: BaseModel) -> int:
    """Return how many neurons of one layer's MLP a token goes through."""
    config = base.model.config
    width = getattr(config, "intermediate_size", None) or 0
    if experts := getattr(config, "num_experts_per_tok", None):
        width = max(width, experts * (getattr(config, "moe_intermediate_size", None) or width))
    return width


def _norms(model: nn.Module, width: int) -> tuple[int, bool]:
    """Return how many norms of the residual's width the layers have, and if heads have some."""
    norms: list[tuple[str, int]] = []
    for path, module in model.named_modules():
        name, weight = path.rpartition(".")[2], getattr(module, "weight", None)
        if "norm" in name and weight is not None:
            norms.append((name, weight.numel()))
    has_head_norms = any(name in ("q_norm", "k_norm") for name, _ in norms)
    # The last one is the model's own, after all layers.
    num_wide = sum(size == width and name not in ("q_norm", "k_norm") for name, size in norms)
    return num_wide - 1, has_head_norms
