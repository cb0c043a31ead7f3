"""Checkpoints of decoders with an adaptive softmax."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models.transformer import TransformerDecoderBase

from lrpe_fairseq.compat.patching import replace_method


def load_adaptive_softmax() -> None:
    """Load checkpoints of decoders with an adaptive softmax and shared embeddings.

    Break: ``TransformerDecoderBase.upgrade_state_dict_named`` adds ``output_projection.weight``, a
    copy of the shared embeddings, to every checkpoint without one. A decoder with an adaptive
    softmax has no ``output_projection``, so resuming and evaluating fail with
    ``Unexpected key(s) in state_dict``.
    """
    decoder = SimpleNamespace(share_input_output_embed=True, num_layers=0, output_projection=None)
    state = {"embed_tokens.weight": torch.zeros(1), "version": torch.tensor([3.0])}
    named = {f"decoder.{name}": value for name, value in state.items()}
    TransformerDecoderBase.upgrade_state_dict_named(decoder, named, "decoder")
    # a decoder without an output projection got the weights of one
    if len(named) > len(state):
        replace_method(TransformerDecoderBase, "upgrade_state_dict_named", _upgrade_decoder)


def _upgrade_decoder(original: Callable, self: Any, state_dict: dict, name: str) -> dict:
    key = f"{name}.output_projection.weight"
    saved = key in state_dict
    upgraded = original(self, state_dict, name)
    if not saved and self.output_projection is None:
        upgraded.pop(key, None)
    return upgraded
