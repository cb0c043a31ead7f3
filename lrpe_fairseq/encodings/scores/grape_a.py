"""GRAPE-A (Zhang et al., 2026): linear biases whose slopes depend on the query and the key."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.encodings.core.forms import LOWEST
from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import undecayed
from lrpe_fairseq.encodings.core.positions import check_positions, constant
from lrpe_fairseq.encodings.core.protocols import Card, ScoreEncoding
from lrpe_fairseq.encodings.scores.slopes import alibi_slopes

GATES = ("key", "query", "query-key")
EPS = 1e-6
"""Smallest norm of a direction, as in the authors' code."""


class GrapeA(ScoreEncoding):
    """score_st - n a_h omega_h (lambda_q + lambda_k), n = s - t, causal only.

    a_h are ALiBi's slopes, omega_h = softplus(w_h) starts at 1, and the gates are

        lambda_k = softplus(u_h . k_t / sqrt D),  lambda_q = softplus(v_h . q_s / sqrt D)

    with directions u_h, v_h of norm 1, and q and k as attention has them: after normalization of
    heads, before any scale. ``grape_gates`` says which of the two are added (Zhang et al., 2026,
    4.5 and 4.6; model-architectures/GRAPE f5b539f3, ``model/llama-mha-grape-a-querykeygated.py``,
    lines 113-133). The directions are drawn from N(0, I), which has the law of the authors'
    N(0, 0.25 / C), because they are normalized in use.

    With keys of 0 it is ALiBi with slopes a_h ln 2.

    Trap: the rate of a key differs from that of the next one, so linear attention has no finite
    state for it.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of GRAPE-A."""

        grape_gates: str = option(
            "key", "grape-a: slopes that depend on the key, the query or both", choices=GATES
        )

    causal_only = True
    without_absolute = True
    card = Card(
        mechanism="bias",
        equation=r"b_{st} = -n\, a_h\, \omega_h\, (\lambda^q_s + \lambda^k_t), \quad "
        r"\lambda^k_t = \mathrm{softplus}(u_h^\top k_t / \sqrt D)",
        cost="H + H D parameters per gate; one bias (B, H, T, S)",
        beyond="As ALiBi: every key loses weight with its distance; its own content says how fast.",
        source="[Zhang et al. (2026)](https://arxiv.org/abs/2512.07805), Sections 4.5 and 4.6",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        heads, gates = spec.num_heads, self.options.grape_gates
        start = math.log(math.expm1(1.0))  # softplus is 1
        self.omega = undecayed(torch.full((heads,), start, device="cpu"))
        for name, chosen in (("query", gates != "key"), ("key", gates != "query")):
            draw = torch.randn(
                heads, spec.head_dim, generator=spec.generator(f"grape-{name}"), device="cpu"
            )
            self.register_parameter(f"of_{name}", nn.Parameter(draw) if chosen else None)

    def rates(self, x: Tensor, direction: Tensor | None) -> Tensor | None:
        """Return a_h omega_h softplus(direction_h . x / sqrt D), (B, H, T), of x (B, H, T, D).

        float32 or wider. None without a direction.
        """
        if direction is None:
            return None
        wide = torch.promote_types(x.dtype, direction.dtype)
        unit = F.normalize(direction.to(wide), dim=-1, eps=EPS)
        gate = F.softplus((x.to(wide) @ unit.unsqueeze(-1)).squeeze(-1) / x.shape[-1] ** 0.5)
        slopes = constant(tuple(alibi_slopes(self.spec.num_heads)), wide, x.device)
        return (slopes * F.softplus(self.omega.to(wide))).unsqueeze(-1) * gate

    def bias(self, q: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return (B, H, T, S) in the dtype of q; q is scaled. See :meth:`ScoreEncoding.bias`."""
        check_positions(q_positions, q)
        check_positions(k_positions, k)
        of_query = self.rates(q / self.softmax_scale, self.of_query)
        of_key = self.rates(k, self.of_key)
        lag = (q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).clamp_min(0)
        rate = 0.0
        if of_query is not None:
            rate = rate + of_query.unsqueeze(-1)
        if of_key is not None:
            rate = rate + of_key.unsqueeze(-2)
        lag = lag.to(rate.dtype)
        lag = lag if lag.dim() == 2 else lag.unsqueeze(1)
        return (-lag * rate).clamp_min(LOWEST).to(q.dtype)
