"""fairseq's encoder and decoder, and their layers, with our attention."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.tokens import Given
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.attention import build_attention, build_cross_attention, check_stack
from lrpe_fairseq.models.checks import is_stock_cross
from lrpe_fairseq.models.tree_embedding import TreeEmbedding


def on_rows(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an activation to every number of x (T, B, C); under torch.compile as (T * B, C).

    So the gradient of ReLU follows from the rows that the next product stores. From (T, B, C)
    inductor stores a mask as well, which takes a CPU longer than the activation.
    """
    if torch.compiler.is_compiling():
        return activation(x.flatten(0, -2)).view_as(x)
    return activation(x)


class EncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with our bidirectional self-attention."""

    def __init__(self, cfg: Any, options: Any, layer: int) -> None:
        # before the constructor of fairseq's layer, which builds the attention
        self._options = options
        self._layer = layer
        super().__init__(cfg)
        self.activation_fn = partial(on_rows, self.activation_fn)

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Called by fairseq's constructor."""
        heads = cfg.encoder.attention_heads
        return build_attention(
            self._options, cfg, embed_dim, heads, causal=False, layer=self._layer
        )

    def build_fc2(self, *sizes: Any) -> nn.Module:
        """Called by fairseq's constructor."""
        return carrying_states(self, super().build_fc2(*sizes))

    def forward(self, x: Tensor, *rest: Any, **keywords: Any) -> Tensor:
        """Compute the layer as fairseq does, on an x (T, B, C) that is :func:`contiguous`."""
        return super().forward(contiguous(x), *rest, **keywords)


class DecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with our causal self-attention.

    Cross-attention is ours if ``cfg.cross`` asks for it, and fairseq's by default.
    """

    def __init__(self, cfg: Any, options: Any, layer: int, no_encoder_attn: bool) -> None:
        self._options = options
        self._layer = layer
        super().__init__(cfg, no_encoder_attn=no_encoder_attn)
        self.activation_fn = partial(on_rows, self.activation_fn)
        self.register_forward_pre_hook(_with_query_padding, with_kwargs=True)

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        """Called by fairseq's constructor."""
        heads = cfg.decoder.attention_heads
        return build_attention(self._options, cfg, embed_dim, heads, causal=True, layer=self._layer)

    def build_fc2(self, *sizes: Any) -> nn.Module:
        """Called by fairseq's constructor."""
        return carrying_states(self, super().build_fc2(*sizes))

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Called by fairseq's constructor."""
        options = getattr(cfg, "cross", None)
        if is_stock_cross(options, self._layer):
            return super().build_encoder_attention(embed_dim, cfg)
        return build_cross_attention(options, cfg, self._layer)

    def forward(self, x: Tensor, *rest: Any, **keywords: Any) -> tuple:
        """Compute the layer as fairseq does, on an x (T, B, C) that is :func:`contiguous`."""
        return super().forward(contiguous(x), *rest, **keywords)


class Encoder(TransformerEncoderBase):
    """fairseq's encoder with our layers. ``options``: an ``AttentionOptions``."""

    layer_class = EncoderLayer

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, options: Any) -> None:
        self._options = options
        self._layer_count = count()
        check_stack(options, cfg.encoder.layers, "encoder" if options is cfg.encoder else "")
        super().__init__(cfg, dictionary, embed_tokens)
        begin_stack(self, cfg, cfg.encoder.embed_dim)

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Called by fairseq's constructor."""
        return wrapped(self.layer_class(cfg, self._options, next(self._layer_count)), cfg)

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict:
        """Encode as fairseq does; while a compiler traces, without reading if there is padding."""
        if not torch.compiler.is_compiling():
            return super().forward_scriptable(
                src_tokens, src_lengths, return_all_hiddens, token_embeddings
            )
        padding = src_tokens.eq(self.padding_idx)
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0).transpose(0, 1)
        states, results = [x], []
        for layer in self.layers:
            output = layer(x, encoder_padding_mask=padding)
            x, result = output if isinstance(output, tuple) else (output, None)
            states.append(x)
            results.append(result)
        return {
            "encoder_out": [x if self.layer_norm is None else self.layer_norm(x)],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states if return_all_hiddens else [],
            "fc_results": results if return_all_hiddens else [],
            "src_tokens": [],
            "src_lengths": [(~padding).sum(1, dtype=torch.int32).unsqueeze(1)],
        }

    def forward(self, *rest: Any, positions: Tensor | None = None, **keywords: Any) -> dict:
        """Encode as fairseq does; the result has one more entry, ``positions``.

        positions: int64 (B, T), such as codes of tree nodes. None counts tokens.
        """
        begin_pass(self, positions)
        encoded = super().forward(*rest, **keywords)
        return {**encoded, "positions": [] if positions is None else [positions]}

    def forward_torchscript(self, net_input: dict) -> dict:
        """Called by fairseq in generation: encode a batch, at its positions if it has them."""
        source = {k: v for k, v in net_input.items() if k in ("src_tokens", "src_lengths")}
        return self.forward(**source, positions=net_input.get("src_positions"))

    def reorder_encoder_out(self, encoder_out: dict, new_order: Tensor) -> dict:
        """Called by fairseq in beam search: select the rows ``new_order`` (B',)."""
        reordered = super().reorder_encoder_out(encoder_out, new_order)
        positions = [p.index_select(0, new_order) for p in encoder_out.get("positions", [])]
        return {**reordered, "positions": positions}


class Decoder(TransformerDecoderBase):
    """fairseq's decoder with our layers and without a T x T mask; see :class:`Encoder`."""

    layer_class = DecoderLayer

    def __init__(
        self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, options: Any, **keywords: Any
    ) -> None:
        self._options = options
        self._layer_count = count()
        # a language model has flat options, whose names have no section
        check_stack(options, cfg.decoder.layers, "decoder" if options is cfg.decoder else "")
        if getattr(cfg, "cross", None) is not None:
            check_stack(cfg.cross, cfg.decoder.layers, "cross")
        super().__init__(cfg, dictionary, embed_tokens, **keywords)
        begin_stack(self, cfg, cfg.decoder.embed_dim)

    @property
    def cross_self_attention(self) -> bool:
        """True if fairseq makes a mask of padding without reading if there is padding.

        A compiler cannot trace what depends on a value.
        """
        return self._makes_mask or torch.compiler.is_compiling()

    @cross_self_attention.setter
    def cross_self_attention(self, value: bool) -> None:
        self._makes_mask = value

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        """Called by fairseq's constructor."""
        layer = self.layer_class(cfg, self._options, next(self._layer_count), no_encoder_attn)
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

        positions: as in :class:`Encoder`; those of the source are in ``encoder_out``.
        Raises: ValueError for positions with an incremental state.
        """
        if positions is not None and incremental_state is not None:
            raise ValueError("explicit positions are not supported in incremental decoding")
        # a language model passes its memories as encoder_out, which has no positions
        of_source = (encoder_out or {}).get("positions", [])
        begin_pass(self, positions, of_source[0] if of_source else None)
        return super().forward(
            prev_output_tokens, encoder_out, incremental_state, *rest, **keywords
        )

    def extract_features(
        self, *rest: Any, full_context_alignment: bool = False, **keywords: Any
    ) -> tuple[Tensor, dict]:
        """Compute features as fairseq does, without attention to later tokens.

        Raises: ValueError for ``full_context_alignment``, which asks for later tokens.
        """
        if full_context_alignment:
            raise ValueError(
                "full_context_alignment is not supported: LRPE decoders are always causal"
            )
        return super().extract_features(*rest, **keywords)

    def buffered_future_mask(self, tensor: Tensor) -> None:
        """Return no mask: our attention is causal without one, in O(T) memory."""
        return None


def contiguous(x: Tensor) -> Tensor:
    """Return x (T, B, C) contiguous; only the first layer copies, as embeddings are (B, T, C).

    Otherwise every norm and every linear map of the stack would copy its input.
    """
    return x.contiguous()


def carrying_states(layer: nn.Module, fc2: nn.Module) -> nn.Module:
    """Let the layer's attention update the states of its encoding after ``fc2``, if it has some."""
    attention = layer.self_attn
    if attention.encoding.has_states:
        attention.update = attention.encoding.update()  # every layer has weights of its own
        fc2.register_forward_hook(attention.advance)
    return fc2


def begin_stack(stack: nn.Module, cfg: Any, width: int) -> None:
    """Build a ``--tree-embedding``; let it and all attention of a stack read one :class:`Given`.

    Raises: ChoiceError for activation checkpointing of layers that pass states on.
    """
    if getattr(cfg, "tree_embedding", False):  # older checkpoints and other models lack it
        stack.embed_positions = TreeEmbedding(width)
    ours = [part for part in stack.modules() if isinstance(part, MultiheadAttention)]
    updating = [attention for attention in ours if attention.update is not None]
    if updating:
        if cfg.checkpoint_activations:
            raise ChoiceError(
                f"--checkpoint-activations recomputes single layers, but the layers of "
                f"{updating[0].encoding.name!r} pass states on: leave it out"
            )
        updating[-1].update = None  # no layer would read its states
    stack.given = Given(one_sided=True)
    stack.noises = _noises(stack)
    # self-attention, cross-attention and a tree embedding
    for module in stack.modules():
        if hasattr(module, "given"):
            module.given = stack.given


def begin_pass(
    stack: nn.Module, positions: Tensor | None, memory_positions: Tensor | None = None
) -> None:
    """Set the positions of the next forward pass of a stack; let it draw new noise in training.

    Noise that layers share is drawn by the first layer that runs, whichever LayerDrop leaves.
    """
    stack.given.positions = positions
    stack.given.memory_positions = memory_positions
    stack.given.states = None
    if stack.training:
        for noise in stack.noises:
            noise.drawn = None


def _noises(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that keep the noise of a pass, in the attribute ``drawn``."""
    return [part for part in module.modules() if hasattr(part, "drawn")]


OF_PASS = ("positions", "memory_positions", "query_padding", "starts", "drawn", "sequence")
"""Attributes of :class:`Given` and of shared noise that belong to one forward pass."""


def wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """Wrap ``layer`` as fairseq wraps its own, for activation checkpointing and for FSDP."""
    if cfg.checkpoint_activations:
        # the backward pass runs the layer again, when the attributes are those of a later pass
        plain = layer.forward
        layer.forward = partial(_forward_of_pass, plain)
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        layer.forward = partial(_checkpointed, plain, layer.forward)
        layer.register_forward_pre_hook(_with_pass, with_kwargs=True)
    # as in fairseq: every checkpointed layer is sharded, however small
    smallest = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=smallest)


def _checkpointed(plain: Callable, in_eager: Callable, *inputs: Any, **keywords: Any) -> Any:
    """Compute a layer whose activations are not stored; compilers trace torch's function for it.

    plain: the layer. in_eager: the same, checkpointed by fairseq.
    """
    if not torch.compiler.is_compiling():
        return in_eager(*inputs, **keywords)
    del keywords["of_pass"]  # a graph stores the values of its own pass
    return checkpoint(plain, *inputs, use_reentrant=False, **keywords)


def _with_query_padding(layer: DecoderLayer, inputs: tuple, keywords: dict[str, Any]) -> None:
    """Tell cross-attention the padding of its queries; fairseq tells self-attention only.

    Before activation checkpointing, whose recomputation must change no attribute in a graph.
    """
    layer.self_attn.given.query_padding = keywords.get("self_attn_padding_mask")


def _with_pass(layer: nn.Module, inputs: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict]:
    """Add the attributes OF_PASS to the arguments, which activation checkpointing stores."""
    attributes = [
        (holder, name, vars(holder)[name])
        for holder in (layer.self_attn.given, *_noises(layer))
        for name in OF_PASS
        if name in vars(holder)
    ]
    return inputs, {**keywords, "of_pass": attributes}


def _forward_of_pass(forward: Callable, *inputs: Any, of_pass: list, **keywords: Any) -> Any:
    """Compute a layer. A recomputation uses the attributes of its own pass, not of a later one."""
    for holder, name, value in of_pass:
        setattr(holder, name, value)
    return forward(*inputs, **keywords)
