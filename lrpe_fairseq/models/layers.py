"""fairseq's encoder and decoder, and their layers, with our self-attention."""

from itertools import count
from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.models.inference import name_dropout
from lrpe_fairseq.models.options import build_attention
from lrpe_fairseq.models.tree_embedding import TreeEmbedding


class EncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with our bidirectional self-attention."""

    def __init__(self, cfg: Any, options: Any, layer: int) -> None:
        self._options, self._layer = options, layer
        super().__init__(cfg)
        name_dropout(self, "TransformerEncoderLayer")

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Called by fairseq's constructor."""
        heads = cfg.encoder.attention_heads
        return build_attention(
            self._options, cfg, embed_dim, heads, causal=False, layer=self._layer
        )


class DecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with our causal self-attention and fairseq's cross-attention."""

    def __init__(self, cfg: Any, options: Any, layer: int, no_encoder_attn: bool) -> None:
        self._options, self._layer = options, layer
        super().__init__(cfg, no_encoder_attn=no_encoder_attn)
        name_dropout(self, "TransformerDecoderLayer")

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        """Called by fairseq's constructor."""
        heads = cfg.decoder.attention_heads
        return build_attention(self._options, cfg, embed_dim, heads, causal=True, layer=self._layer)


class Encoder(TransformerEncoderBase):
    """fairseq's encoder with our layers. ``options``: an ``AttentionOptions``."""

    has_positions = False

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, options: Any) -> None:
        self._options, self._layer_count = options, count()
        super().__init__(cfg, dictionary, embed_tokens)
        if has_tree_embedding(cfg):
            self.embed_positions = TreeEmbedding(cfg.encoder.embed_dim)
        name_dropout(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Called by fairseq's constructor."""
        return wrapped(EncoderLayer(cfg, self._options, next(self._layer_count)), cfg)

    def forward(self, *rest: Any, positions: Tensor | None = None, **keywords: Any) -> dict:
        """Encode as fairseq does.

        positions: int64 (B, T) of self-attention, such as codes of tree nodes. None counts tokens.
        """
        set_positions(self, positions)
        return super().forward(*rest, **keywords)


class Decoder(TransformerDecoderBase):
    """fairseq's decoder with our layers and without a T x T mask.

    ``options``: an ``AttentionOptions``.
    """

    has_positions = False

    def __init__(
        self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, options: Any, **keywords: Any
    ) -> None:
        self._options, self._layer_count = options, count()
        super().__init__(cfg, dictionary, embed_tokens, **keywords)
        if has_tree_embedding(cfg):
            self.embed_positions = TreeEmbedding(cfg.decoder.embed_dim)
        name_dropout(self, "TransformerDecoder")

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        """Called by fairseq's constructor."""
        layer = DecoderLayer(cfg, self._options, next(self._layer_count), no_encoder_attn)
        return wrapped(layer, cfg)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict | None = None,
        incremental_state: dict | None = None,
        *rest: Any,
        positions: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, dict]:
        """Decode as fairseq does.

        positions: int64 (B, T) of self-attention, such as codes of tree nodes. None counts tokens.
        Raises: ValueError for positions with an incremental state.
        """
        if positions is not None and incremental_state is not None:
            raise ValueError("explicit positions are not supported in incremental decoding")
        set_positions(self, positions)
        return super().forward(
            prev_output_tokens, encoder_out, incremental_state, *rest, **keywords
        )

    def extract_features(
        self, *rest: Any, full_context_alignment: bool = False, **keywords: Any
    ) -> tuple[Tensor, dict]:
        """Compute features as fairseq does; see TransformerDecoderBase.

        Raises: ValueError for ``full_context_alignment``, which needs attention to later tokens.
        """
        if full_context_alignment:
            raise ValueError(
                "full_context_alignment is not supported: LRPE decoders are always causal"
            )
        return super().extract_features(*rest, **keywords)

    def buffered_future_mask(self, tensor: Tensor) -> None:
        """Return no mask: our attention is causal without one, in O(T) memory."""
        return None


def has_tree_embedding(cfg: Any) -> bool:
    """True for ``--tree-embedding``; older checkpoints and other models do not have it."""
    return getattr(cfg, "tree_embedding", False)


def set_positions(stack: nn.Module, positions: Tensor | None) -> None:
    """Set the positions of a stack until the next forward pass: of self-attention and Tree-SQ.

    They are kept after it, because activation checkpointing runs the layers again.
    """
    if positions is None and not stack.has_positions:
        return
    stack.has_positions = positions is not None
    for module in stack.modules():
        if isinstance(module, MultiheadAttention | TreeEmbedding):
            module.positions = positions


def wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """Wrap ``layer`` as fairseq wraps its own, for activation checkpointing and for FSDP."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    smallest = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=smallest)
