"""The states of attention in a ``Cache`` of transformers.

``generate`` makes a ``DynamicCache``. Its empty layers are replaced at their first use, so that
beam search, batches and models in which only some layers are ours need no cache of their own.

Axes: B batch.
"""

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from lrpe_fairseq.attention.multihead import AttentionState, reorder_attention_state

REPLACEABLE = (DynamicLayer, DynamicSlidingWindowLayer)
"""Layers of transformers that hold keys and values of any length, and are replaced while empty."""
_FIELDS = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
CACHE_NAME = "cache" if "cache" in _FIELDS else "past_key_values"
"""The name of the cache in outputs, which is ``cache`` since transformers 5.24."""


class StateLayer(CacheLayerMixin):
    """The ``AttentionState`` of one layer: linear states, or keys and values, and histories.

    state: None before the first token. length: tokens so far, with padding.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: AttentionState | None = None
        self.length = 0

    def keep(self, state: AttentionState, length: int) -> None:
        """Replace the state by the one after a block of ``length`` tokens."""
        self.state = state
        self.length += length
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, with padding."""
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return the number of keys of a mask for the next block, and their offset, 0.

        query_length: of the block; before transformers 5.24 its cache positions.
        """
        own = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self.length + own, 0

    def get_max_length(self) -> int:
        """Return -1: no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.length, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows ``beam_idx`` (B',), int64 indices into the batch."""
        if self.state is not None:
            order = beam_idx.to(self.state.next_position.device)
            self.state = reorder_attention_state(self.state, order)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        if self.state is not None:
            rows = torch.arange(len(self.state.next_position))
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, *given: Any) -> NoReturn:
        """Refuse to forget the last tokens. Raises: NotImplementedError."""
        raise NotImplementedError(
            "states of lrpe_fairseq's attention sum over the text and cannot forget its last "
            "tokens: generate without an assistant and without prompt lookup"
        )

    def lazy_initialization(self, *given: Any) -> None:
        """Do nothing: there are no buffers."""

    def update(self, *given: Any, **keywords: Any) -> NoReturn:
        """Refuse keys and values of other attention. Raises: NotImplementedError."""
        raise NotImplementedError("this layer of the cache belongs to lrpe_fairseq's attention")

    def offload(self) -> None:
        """Do nothing: :func:`state_layer` refuses a cache that is offloaded."""

    prefetch = offload


def new_cache() -> Cache:
    """Return an empty cache for any model."""
    return DynamicCache()


def state_layer(cache: Cache, index: int) -> StateLayer:
    """Return the state of layer ``index`` in a cache; an empty layer is replaced by one of ours.

    Raises: ValueError, one sentence, for a cache that cannot hold states: static, quantized,
        offloaded, or filled by another attention.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        refuse_cache(cache)
    while len(layers) <= index:
        layers.append(StateLayer())
    if not isinstance(layers[index], StateLayer):
        if type(layers[index]) not in REPLACEABLE or layers[index].get_seq_length():
            refuse_cache(cache)
        layers[index] = StateLayer()
    return layers[index]


def refuse_cache(cache: Any) -> NoReturn:
    """Raise ValueError for a cache that cannot hold states."""
    raise ValueError(
        f"{type(cache).__name__} cannot hold the states of lrpe_fairseq's attention: pass the "
        "cache that the model returned, a new DynamicCache, or none"
    )


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache that was passed by either of its names. Raises: ValueError for both."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass one")
    return past_key_values if cache is None else cache
