"""Softmax attention with any encoding: what serves it, blocks of queries, and the state."""

from lrpe_fairseq.attention.softmax.blocks import decay_sums, query_blocks
from lrpe_fairseq.attention.softmax.dispatch import encoded_attention, encoded_weights
from lrpe_fairseq.attention.softmax.fused import (
    fused_attention,
    softmax_attention,
    softmax_attention_naive,
)
from lrpe_fairseq.attention.softmax.state import (
    SoftmaxState,
    carry,
    extend_state,
    last_tokens,
    reorder_state,
    state_of,
)

__all__ = [
    "SoftmaxState",
    "carry",
    "decay_sums",
    "encoded_attention",
    "encoded_weights",
    "extend_state",
    "fused_attention",
    "last_tokens",
    "query_blocks",
    "reorder_state",
    "softmax_attention",
    "softmax_attention_naive",
    "state_of",
]
