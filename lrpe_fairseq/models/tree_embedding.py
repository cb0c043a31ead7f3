"""Tree-SQ: positional embeddings of tree nodes, added to token embeddings (Shiv and Quirk, 2019).

The baseline of "Algebraic Positional Encodings" for trees, in the place of absolute positions.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrpe_fairseq.attention.tokens import Given
from lrpe_fairseq.encodings.trees import nodes
from lrpe_fairseq.errors import ChoiceError

BRANCHES = 2
STEPS = 8


class TreeEmbedding(nn.Module):
    """x[i, b, j] = (1 if step i goes to branch b else 0) a_j^i sqrt(n (1 - a_j^2) / 2).

    Step 0 is the last one of the path from the root to the node, step 1 the one before, up to
    ``STEPS``. a = tanh(w) with a learned w (n,), uniform in [0.7, 0.999) at first, and n =
    ``width`` // (``STEPS`` ``BRANCHES``) decays. Start, scale and number of steps are those of the
    published code of APE; its powers belong to other steps than its branches. The root has the
    embedding 0, and features that are left over are 0.

    ``given.positions``: int64 codes of nodes (B, T) of the next call, set by the stack of layers.
    Trap: nodes with the same last ``STEPS`` steps have the same embedding.
    Raises: ChoiceError for a width below ``STEPS`` ``BRANCHES``.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < STEPS * BRANCHES:
            raise ChoiceError(f"--tree-embedding needs a width of at least {STEPS * BRANCHES}")
        self.width = width
        self.decays = width // (STEPS * BRANCHES)
        self.weight = nn.Parameter(torch.empty(self.decays).uniform_(0.7, 0.999))
        self.given = Given()
        self.max_positions = sys.maxsize  # read by fairseq: no limit

    def forward(self, tokens: Tensor, incremental_state: dict | None = None) -> Tensor:
        """Return the embeddings (B, T, width) of the nodes at ``given.positions``."""
        positions = self.given.positions
        if positions is None:
            raise ValueError("--tree-embedding needs the positions of the nodes")
        # powers of a decay lose digits in half precision
        a = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)).tanh()
        powers = torch.arange(STEPS, device=a.device).view(-1, 1, 1)
        scaled = a**powers * (self.decays * (1 - a.square()) / 2).sqrt()  # steps 1 n
        # B T steps branches n -> B T (steps branches n)
        embedded = (paths(positions).unsqueeze(-1) * scaled).flatten(2)
        return F.pad(embedded, (0, self.width - embedded.shape[2])).to(self.weight.dtype)


def paths(codes: Tensor) -> Tensor:
    """Return the last ``STEPS`` steps to int64 nodes (B, T), the last one first.

    (B, T, STEPS, BRANCHES): one-hot branches, and 0 beyond the root.
    """
    steps = []
    for _ in range(STEPS):
        branch = F.one_hot(nodes.branch(codes, BRANCHES), BRANCHES)
        # beyond the root the code is 0, and its branch means nothing
        steps.append(branch * (codes > 0).unsqueeze(-1))
        codes = nodes.parent(codes, BRANCHES)
    return torch.stack(steps, dim=-2)
