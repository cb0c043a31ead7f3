"""Parameters that several layers hold in common."""

from torch import nn

from lrpe_fairseq.encodings.spe import SPE
from lrpe_fairseq.encodings.t5 import T5Bias


def share_across_layers(model: nn.Module) -> None:
    """Let the encodings of ``model`` share what their options ask to share.

    SPE with ``spe_shared``: the code and its noise, while each layer keeps its gate. T5 with
    ``t5_shared``: the table. The first encoding of a kind owns what the others use. Call it
    once, on a stack of layers run in order, before an optimizer is made: an encoder and a
    decoder each need a call of their own.
    """
    owners: dict[type, SPE | T5Bias] = {}
    for module in list(model.modules()):
        if not isinstance(module, (SPE, T5Bias)) or not module.shared:
            continue
        owner = owners.setdefault(type(module), module)
        if owner is not module:
            module.share_with(owner)
