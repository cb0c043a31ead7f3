"""Parameters that several layers share."""

from torch import nn

from lrpe_fairseq.encodings.base import Encoding


def share_across_layers(model: nn.Module) -> None:
    """Share the parameters of those encodings of ``model`` whose options ask for it.

    An encoding with ``shared`` true uses the parameters of the first one of its class and name
    (``Encoding.share_with``). Call it once on a stack of layers that run in order, before an
    optimizer is made: an encoder and a decoder each need a call of their own.
    """
    owners: dict[tuple[type, str], Encoding] = {}
    for module in list(model.modules()):
        if not isinstance(module, Encoding) or not module.shared:
            continue
        owner = owners.setdefault((type(module), module.name), module)
        if owner is not module:
            module.share_with(owner)
