"""Encoding parameters shared between layers."""

from collections.abc import Callable

from torch import nn

from lrpe_fairseq.encodings.core.protocols import Encoding


def share_across_layers(model: nn.Module) -> None:
    """Share parameters between the encodings of ``model`` whose ``shared`` is true.

    Each of them uses the parameters of the first encoding of the same class, name and direction:
    causal self-attention of a decoder shares nothing with its cross-attention. Call this once for
    each stack of layers that run in order, before an optimizer is created.
    """
    _share(model, "shared", lambda encoding: encoding.spec.causal)


def share_across_stacks(model: nn.Module) -> None:
    """Share parameters between an encoder, a decoder and its cross-attention in ``model``.

    Each encoding whose ``shared_by_stacks`` is true uses the parameters of the first one of the
    same class, name, widths and options of its own. Call this once, after
    :func:`share_across_layers` for every stack.
    """
    _share(model, "shared_by_stacks", _settings)


def _share(model: nn.Module, field: str, key: Callable[[Encoding], object]) -> None:
    """Share between encodings whose ``field`` is true, of one class, name and ``key``."""
    owners: dict[tuple, Encoding] = {}  # the first encoding of each kind, in the order of layers
    for module in list(model.modules()):
        if not isinstance(module, Encoding) or not getattr(module, field):
            continue
        # gates and reflections are per layer, so that only the inner encoding must be the same
        owner = owners.setdefault((type(module), module.inner_name, key(module)), module)
        if owner is not module:
            module.share_with(owner)


def _settings(encoding: Encoding) -> tuple:
    spec = encoding.spec
    grid = spec.options.grid_width, spec.options.grid_height
    return spec.head_dim, spec.num_heads, encoding.options, spec.options.fidelity, grid
