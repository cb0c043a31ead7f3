"""Encoding parameters shared between layers."""

from torch import nn

from lrpe_fairseq.encodings.base import Encoding


def share_across_layers(model: nn.Module) -> None:
    """Share parameters between the encodings of ``model`` whose ``shared`` is true.

    Each of them uses the parameters of the first encoding of the same class, name and direction
    (``Encoding.share_with``): causal self-attention of a decoder shares nothing with its
    cross-attention. Call this once for each stack of layers that run in order, before an optimizer
    is created: once for an encoder and once for a decoder.
    """
    owners: dict[tuple[type, str, bool], Encoding] = {}
    for module in list(model.modules()):
        if not isinstance(module, Encoding) or not module.shared:
            continue
        owner = owners.setdefault((type(module), _name(module), module.spec.causal), module)
        if owner is not module:
            module.share_with(owner)


def share_across_stacks(model: nn.Module) -> None:
    """Share parameters between an encoder, a decoder and its cross-attention in ``model``.

    Each encoding whose ``shared_by_stacks`` is true uses the parameters of the first one of the
    same class, name, widths and options of its own. Call this once, after
    :func:`share_across_layers` for every stack.
    """
    owners: list[Encoding] = []
    for module in list(model.modules()):
        if not isinstance(module, Encoding) or not module.shared_by_stacks:
            continue
        owner = next((o for o in owners if _alike(o, module)), None)
        if owner is None:
            owners.append(module)
        else:
            module.share_with(owner)


def _alike(one: Encoding, other: Encoding) -> bool:
    """True if two encodings differ at most in their seeds and masks."""
    own, others = (type(one), _name(one)), (type(other), _name(other))
    return (*own, *_settings(one)) == (*others, *_settings(other))


def _name(encoding: Encoding) -> str:
    """Return the name without gates, which every layer has for itself."""
    return encoding.name.removeprefix("gated:")


def _settings(encoding: Encoding) -> tuple:
    spec = encoding.spec
    common = spec.options.fidelity, spec.options.grid_width, spec.options.grid_height
    return spec.head_dim, spec.num_heads, encoding.options, *common
