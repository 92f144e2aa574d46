"""The state of one policy in training: one tensor of four rows, and its clocks.

    create, or read from a snapshot -> (accumulate -> step)* -> removed, zeroed

Shape suffix: P length of a bank row of the policy's rank bucket.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from marlaas.engine.durable import beside, put_file
from marlaas.errors import InvalidRequest, NotFound
from marlaas.model.bank import RowLayout
from marlaas.types import AdapterSpec

SNAPSHOT_FORMAT = "marlaas-policy-1"


@dataclass(slots=True, kw_only=True, eq=False)
class PolicyState:
    """Weights, moments, gradient and clocks of one policy."""

    spec: AdapterSpec
    layout: RowLayout
    rows_4P: Tensor
    """Master weights, first moment, second moment, gradient; fp32 or wider."""
    version: int = 0
    """The step clock: +1 per optimizer step, one without gradient included."""
    num_updates: int = 0
    """Updates that AdamW has made; its bias correction counts them."""
    has_gradient: bool = False
    """A trained token has been added to the gradient since the last step."""
    is_poisoned: bool = False
    """A loss since the last step was not finite: the next step is vetoed."""

    @property
    def weights_P(self) -> Tensor:
        return self.rows_4P[0]

    @property
    def exp_avg_P(self) -> Tensor:
        return self.rows_4P[1]

    @property
    def exp_avg_sq_P(self) -> Tensor:
        return self.rows_4P[2]

    @property
    def grad_P(self) -> Tensor:
        return self.rows_4P[3]

    def clear_gradient(self) -> None:
        self.grad_P.zero_()
        self.has_gradient = self.is_poisoned = False


def save_snapshot(path: Path | str, state: PolicyState, *, is_synced: bool = False) -> None:
    """Write weights, moments and clocks to one file, which appears complete or not at all; with
    `is_synced` it survives a loss of power from the return of this call on.

    An accumulated gradient is not part of a snapshot: a snapshot is what a step left behind.
    """
    path = Path(path)
    fields = {
        "format": SNAPSHOT_FORMAT,
        "spec": asdict(state.spec),
        "version": state.version,
        "num_updates": state.num_updates,
        "layout": _fingerprint(state.layout),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = beside(path, "new")
    rows = state.rows_4P[:3].detach().cpu().contiguous()
    save_file({"rows": rows}, unfinished, metadata={"marlaas": json.dumps(fields)})
    put_file(unfinished, path, is_synced=is_synced)


def load_snapshot(
    path: Path | str, layouts: dict[int, RowLayout], *, device: torch.device, dtype: torch.dtype
) -> PolicyState:
    """Read a snapshot; `layouts` are those of the base model, by bucket rank.

    Raises:
        NotFound: no such file.
        InvalidRequest: it is no snapshot, or one of a policy on another base model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            fields = json.loads((file.metadata() or {}).get("marlaas", "{}"))
            if fields.get("format") != SNAPSHOT_FORMAT:
                raise InvalidRequest(f"{path} is no policy snapshot of format {SNAPSHOT_FORMAT}")
            rows_3P = file.get_tensor("rows")
    except FileNotFoundError:
        raise NotFound(f"no snapshot at {path}") from None
    except SafetensorError as error:
        raise InvalidRequest(f"snapshot {path} cannot be read: {error}") from None
    by_fingerprint = {_fingerprint(layout): layout for layout in layouts.values()}
    if fields["layout"] not in by_fingerprint:
        raise InvalidRequest(f"snapshot {path} belongs to a policy on another base model")
    layout = by_fingerprint[fields["layout"]]
    rows_4P = torch.zeros(4, layout.length, dtype=dtype, device=device)
    rows_4P[:3] = rows_3P
    spec = AdapterSpec(**{**fields["spec"], "targets": tuple(fields["spec"]["targets"])})
    return PolicyState(
        spec=spec,
        layout=layout,
        rows_4P=rows_4P,
        version=fields["version"],
        num_updates=fields["num_updates"],
    )


def _fingerprint(layout: RowLayout) -> str:
    """Return what tells whether two rows mean the same: bucket rank, names and widths."""
    shapes = [(shape.name, shape.in_features, shape.out_features) for shape in layout.modules]
    return blake2b(repr((layout.rank, shapes)).encode(), digest_size=16).hexdigest()
