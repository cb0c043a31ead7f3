"""Encoding parameters shared between layers."""

from torch import nn

from lrpe_fairseq.encodings.base import Encoding


def share_across_layers(model: nn.Module) -> None:
    """Share parameters between the encodings of ``model`` whose ``shared`` is true.

    Each of them uses the parameters of the first encoding of the same class and name
    (``Encoding.share_with``). Call this once for each stack of layers that run in order, before an
    optimizer is created: once for an encoder and once for a decoder.
    """
    owners: dict[tuple[type, str], Encoding] = {}
    for module in list(model.modules()):
        if not isinstance(module, Encoding) or not module.shared:
            continue
        owner = owners.setdefault((type(module), module.name), module)
        if owner is not module:
            module.share_with(owner)
