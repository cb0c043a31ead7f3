"""TAPE (Zhu et al., 2025): RoPE's phases as states, which every layer updates from the text.

Axes: B batch, H heads, T time, D head width, C width of the layer, N = 4 H.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.options import EncodingSpec
from lrpe_fairseq.encodings.core.parameters import Float32Module, drawn
from lrpe_fairseq.encodings.core.protocols import Card
from lrpe_fairseq.encodings.rotations.cores import rotate_pairs
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.kernels.conditions import is_transformed, without_autocast
from lrpe_fairseq.kernels.encode.encode import Turns

DIAGONAL = "tape-diagonal"


class StateUpdate(Float32Module):
    """e' = e + M m, then e'' = e' + N (g * U e') with gates g = SiLU(X y), for a layer.

    M (H, H), U (N, H) and N (H, N) mix heads but not features, so that a shift of all positions
    rotates all states alike. M and U start at 0, X (N, C) and N from N(0, 0.02^2).

    With the departure ``tape-diagonal`` M is the diagonal matrix of the sums of the rows of ``mix``
    (H, H), as in the authors' code. All H entries of a row have one gradient, so Adam moves their
    sum H times as far as it would a single number.
    """

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__()
        heads = spec.num_heads
        size = 4 * spec.num_heads
        generator = spec.generator("tape")
        self.diagonal = DIAGONAL in spec.options.fidelity
        self.mix = nn.Parameter(torch.zeros(heads, heads))
        self.up = nn.Parameter(torch.zeros(size, heads))
        self.gate = drawn(generator, size, spec.input_width)
        self.down = drawn(generator, heads, size)
        self.register_load_state_dict_pre_hook(_with_rows)

    def forward(self, e: Tensor, m: Tensor, y: Tensor) -> Tensor:
        """Return the states after a layer, (B, H, T, D), float32 or wider.

        e: the states before it. m (B, H, T, D): their means by its attention weights. y (B, T, C):
        the output of its feed-forward network, before the residual sum.
        """
        wide = torch.promote_types(e.dtype, self.up.dtype)
        with without_autocast(e):
            mix, up, gate, down = (p.to(wide) for p in (self.mix, self.up, self.gate, self.down))
            mix = torch.diag(mix.sum(1)) if self.diagonal else mix
            e = e.to(wide) + _over_heads(mix, m.to(wide))
            gates = F.silu(F.linear(y.to(wide), gate)).transpose(1, 2).unsqueeze(-1)
            return e + _over_heads(down, gates * _over_heads(up, e))


def _with_rows(module: nn.Module, state: dict, prefix: str, *rest: object) -> None:
    """Return the diagonal (H,) that an older checkpoint has under its departure to rows (H, H)."""
    name = f"{prefix}mix"
    if name in state and state[name].dim() == 1:
        state[name] = torch.diag(state[name])


def _over_heads(matrix: Tensor, x: Tensor) -> Tensor:
    """Apply a matrix (N, H) to the heads of x (B, H, T, D): (B, N, T, D)."""
    return torch.einsum("nh,bhtd->bntd", matrix, x)


class TAPE(LRPE):
    """Re[(e_s q_s)^H e_t k_t] with a phase e per token, head and pair, updated by every layer.

    Each layer updates e from its attention weights and the output of its feed-forward network
    (:class:`StateUpdate`). The states start as RoPE's phases, so the model starts as RoPE. The last
    layer of a stack has no update, because no later layer would read it.

    Trap: outside the layers of ``lrpe_fairseq.models`` nothing is updated: it is RoPE. Updated
    states do not keep the norm of queries and keys.
    """

    has_states = keys_by_head = True
    serves_linear = False
    card = Card(
        mechanism="rotation",
        equation=r"\mathrm{Re}\big[(e_s q_s)^{\mathsf H} e_t k_t\big],\ e^{(1)}_s = e^{i s \alpha},"
        r"\quad e' = e + M \textstyle\sum_t A_{st} e_t,\ e^{(l+1)} = e' + N (\mathrm{SiLU}(X y) "
        r"\odot U e')",
        cost="values twice as wide; H^2 + 4 H (C + 2 H) parameters of all layers but the last",
        beyond="As RoPE at the start; the updates depend on distances only.",
        source="[Zhu et al. (2025)](https://arxiv.org/abs/2501.00712)",
    )
    departures = {
        DIAGONAL: Departure(
            paper="the states of all heads are mixed by a matrix M (TAPE)",
            code="an einsum (bqnd,qe->bqnd) multiplies every head by the sum of its row of M: no "
            "heads are mixed, and Adam moves a sum of H numbers H times as far as one",
            ours="M (H, H) mixes the heads",
        ),
    }

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec, "identity", "rotation")
        self._parts = ()  # it has a summary of its own

    def start(self, positions: Tensor, like: Tensor) -> Tensor:
        """Return RoPE's phases (B or 1, H, T, D), as (re, im) pairs, for q or k (B, H, T, D)."""
        wide = torch.promote_types(like.dtype, torch.float32)
        one = like.new_zeros(1, 1, like.shape[2], like.shape[3], dtype=wide)
        one[..., ::2] = 1.0
        turn = self.core.powers(self.check(positions, like), wide)
        batch = turn.shape[0] if turn.dim() == 4 else 1
        return rotate_pairs(one.expand(batch, *like.shape[1:]), turn)

    def turned(self, x: Tensor, e: Tensor) -> Tensor:
        """Return e x for q or k (B, H, T, D) and states (B or 1, H, T, D), in the dtype of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        even = e.shape[-1] // 2 * 2
        parts = e[..., :even].to(wide).unflatten(-1, (-1, 2))
        if is_transformed():  # compilers generate no code for complex tensors
            phases = Turns(*parts.unbind(-1))
        else:
            phases = torch.view_as_complex(parts.contiguous())
        return rotate_pairs(x.to(wide), phases.expand(len(x), -1, -1, -1)).to(x.dtype)

    def update(self) -> StateUpdate:
        """Return the update of one layer."""
        return StateUpdate(self.spec)
