"""The delta rule (DeltaNet; Yang et al., 2024): ``delta``, and Gated DeltaNet: ``gated:delta``."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lrpe_fairseq.encodings.core.forms import Transport
from lrpe_fairseq.encodings.core.options import EncodingSpec, option
from lrpe_fairseq.encodings.core.parameters import drawn
from lrpe_fairseq.encodings.core.protocols import Card, Properties
from lrpe_fairseq.encodings.none import Unchanged
from lrpe_fairseq.encodings.wrappers.path import betas
from lrpe_fairseq.kernels.conditions import without_autocast


class WritingStrength(nn.Module):
    """beta_u = largest sigmoid(b_h x_u + c_h), how much of a value each token writes, per head.

    b (H, C) starts from N(0, 0.02^2), drawn with the spec's generator, and c (H,) from 0, so that
    beta starts near largest / 2, as in the authors' code, which has no c.
    """

    def __init__(self, spec: EncodingSpec, largest: float) -> None:
        super().__init__()
        self.largest = largest
        self.weight = drawn(spec.generator("delta"), spec.num_heads, spec.input_width)
        self.bias = nn.Parameter(torch.zeros(spec.num_heads, device="cpu"))

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return beta (B, H, T), float32 or wider, of x (B, T, C); 0 at padding (B, T)."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        with without_autocast(x):
            return betas(x.to(wide), self.weight, self.bias, self.largest, padding)


class Delta(Unchanged):
    """S_s = (I - beta_s k_s k_s^T) S_(s-1) + beta_s k_s v_s^T, read by q_s: the delta rule.

    The score is q_s.H_s ... H_(t+1) beta_t k_t with H_u = I - beta_u k_u k_u^T and
    k = phi(k) / |phi(k)|: the transport of PaTH with the keys as w, and keys times beta. beta is
    computed from the layer's input. With gates the state is multiplied by each of them first, as in
    Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464). Linear attention only.
    Each layer has separate parameters.

    Queries are phi(q). The authors divide them by their norms too (fla-org/flash-linear-attention
    0315a70e, ``fla/layers/delta_net.py``: ``qk_norm``), but an output that is divided by a
    denominator or normalized per head does not depend on the norm of its query, and a denominator
    from content has it too.

    Trap: the sums solve a regression on all keys, so that sums of scores do not grow with the text.
    Normalizers "content" and "bounded" divide by sums that do; use "layernorm", or "none" with the
    part "output-norm", which the authors have.
    """

    @dataclass(frozen=True)
    class Options:
        """Options of the delta rule, in ``delta`` and in ``gated:delta``."""

        delta_negative_eigenvalues: bool = option(
            False,
            "DeltaNet: beta in (0, 2) and not in (0, 1), so that I - beta k k^T has eigenvalues "
            "from -1 to 1",
        )

    causal_only = True
    without_absolute = True
    keys_by_head = True
    no_softmax = "changes the state of linear attention, which softmax attention does not have"
    properties = Properties(keeps_norm=False, contextual=True)  # keys have norm beta
    card = Card(
        mechanism="transport",
        equation=r"q_s^\top H_s H_{s-1} \cdots H_{t+1}\, \beta_t k_t,\quad "
        r"H_u = I - \beta_u k_u k_u^\top,\quad k = \phi(k) / \lVert \phi(k) \rVert,\ "
        r"\beta_u = \sigma(b_h^\top x_u + c_h)",
        cost="H C + H parameters; about 3 times the products of linear attention; linear attention "
        "only",
        beyond="The state depends on content only: a token replaces what the state returns for its "
        "key, and what was written for other keys stays.",
        source="[Yang et al. (2024)](https://arxiv.org/abs/2406.06484); beta in (0, 2): "
        "[Grazzi et al. (2024)](https://arxiv.org/abs/2411.12537)",
    )

    def __init__(self, spec: EncodingSpec) -> None:
        super().__init__(spec)
        largest = 2.0 if self.options.delta_negative_eigenvalues else 1.0
        self.reflections = WritingStrength(spec, largest)

    def transport(
        self,
        x: Tensor,
        positions: Tensor,
        padding: Tensor | None,
        starts: Tensor | None,
        history: Mapping[str, Tensor],
    ) -> tuple[Transport, dict[str, Tensor]]:
        """Return beta, for vectors that are the keys; see :meth:`Encoding.transport`."""
        return Transport(None, self.reflections(x, padding)), {}
