"""A minimal encoding with options, a departure and a parameter to share; no one registers it."""

from dataclasses import dataclass

import torch
from torch import nn

from lrpe_fairseq.encodings.core.departures import Departure
from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.encodings.core.protocols import QueryKeyEncoding


class Toy(QueryKeyEncoding):
    """q~ = a q. Its own options, a departure, and a parameter that layers can share."""

    @dataclass(frozen=True)
    class Options:
        toy_kind: str = option("left", "Toy: the side", choices=("left", "right"))
        toy_shared: bool = option(False, "Toy: one scale in all layers")

    departures = {"toy-doubled": Departure("toy", "twice toy", "toy")}

    def __init__(self, spec):
        super().__init__(spec)
        self.shared = self.options.toy_shared
        self.scale = nn.Parameter(torch.ones(()))

    def share_with(self, owner):
        self.scale = owner.scale

    def forward(self, q, k, q_positions, k_positions):
        return q * self.scale, k
