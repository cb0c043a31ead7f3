"""``lrpe_classifier``: a bidirectional encoder, pooled over the real tokens, and a classifier.

Tasks: ``lrpe_classification``, ``lrpe_images``.

Axes: B batch, T tokens, C width.
"""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel, register_model
from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP, Embedding, TransformerConfig
from fairseq.modules import LayerNorm
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lrpe_fairseq.compat.processes import refuse_unrelated_processes
from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.encodings.core.parameters import Float32Module
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.errors import ChoiceError, one_sentence_errors
from lrpe_fairseq.models.checks import check_probabilities, check_sizes
from lrpe_fairseq.models.flags import BooleanFlags
from lrpe_fairseq.models.layers import Encoder, EncoderLayer, contiguous
from lrpe_fairseq.models.norms import SharedBatchNorm
from lrpe_fairseq.models.options import AttentionOptions
from lrpe_fairseq.models.patches import (
    CONVOLUTION,
    LINEAR,
    OF_PIXELS,
    Patches,
    build_patches,
    check_patches,
    fit_grid,
    fit_positions,
    init_positions,
)
from lrpe_fairseq.models.presets import defaults


@dataclass
class LRPEClassifierConfig(AttentionOptions, FairseqDataclass):
    """4 x 128, 2 heads, FFN 256, GELU, dropout 0.1, pre-norm, sinusoidal absolute positions.

    Layers and width are those of ListOps in TMLR LRPE, Table 9. Heads, FFN and dropout are not
    printed there.
    """

    encoder_layers: int = option(4, "number of layers")
    encoder_embed_dim: int = option(128, "embedding dimension")
    encoder_ffn_embed_dim: int = option(256, "embedding dimension of the feed-forward network")
    encoder_attention_heads: int = option(2, "number of attention heads")
    encoder_learned_pos: bool = option(False, "learned absolute positions instead of sinusoids")
    no_token_positional_embeddings: bool = option(False, "no absolute positions")
    max_positions: Optional[int] = option(None, "longest input (default: the task's)")
    input: ChoiceEnum(["tokens", "pixels", "image"]) = option(  # type: ignore[valid-type]
        "tokens",
        "tokens: an embedding per symbol; pixels: symbols are numbers from 0 to 255; image: color "
        "images of the task lrpe_images",
    )
    pixel_mean: float = option(
        OF_PIXELS["pixel_mean"], "subtracted from pixels, which are from 0 to 1 here"
    )
    pixel_std: float = option(OF_PIXELS["pixel_std"], "pixels are divided by this number")
    patch_embedding: ChoiceEnum([LINEAR, CONVOLUTION]) = option(  # type: ignore[valid-type]
        LINEAR,
        "of --input image: a linear map, or a 3 x 3 convolution, ReLU and the maximum over p x p "
        "places",
    )
    patch: int = option(
        1, "p x p pixels are one token; an image then has p times --grid-width columns"
    )
    channels: int = option(
        1, "numbers per pixel, which follow each other: 3 for pixels in color (images always are)"
    )
    norm: ChoiceEnum(["layer", "batch"]) = option(  # type: ignore[valid-type]
        "layer", "norm before each block and at the end: LayerNorm, or BatchNorm over real tokens"
    )
    pooling: ChoiceEnum(["mean", "first", "gate"]) = option(  # type: ignore[valid-type]
        "mean",
        "of the last layer: the mean over real tokens, the first token, or a mean with the weights "
        "of a learned gate",
    )
    final_norm: ChoiceEnum(["before", "after"]) = option(  # type: ignore[valid-type]
        "before", "the last norm is applied to tokens before pooling, or to the pooled vector"
    )
    pair_head: bool = option(
        False, "classify [u, v, u - v, u v] of the pooled vectors u and v of a pair"
    )
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = option(
        "gelu", "activation of the feed-forward network"
    )
    dropout: float = option(0.1, "dropout")
    attention_dropout: float = option(0.0, "dropout on softmax attention weights")
    activation_dropout: float = option(0.0, "dropout after the activation")
    drop_path: float = option(0.0, "probability to drop a residual branch of an example")
    qkv_bias: bool = option(True, "biases of the projections to queries, keys and values")
    checkpoint_activations: bool = option(False, "recompute activations in the backward pass")
    offload_activations: bool = option(False, "checkpoint activations and store them on the CPU")
    min_params_to_wrap: int = option(DEFAULT_MIN_PARAMS_TO_WRAP, "smallest layer to shard")


@defaults(encoder_layers=2, encoder_embed_dim=64, encoder_ffn_embed_dim=128)
@dataclass
class LRPEClassifierTinyConfig(LRPEClassifierConfig):
    """2 x 64, 2 heads, FFN 128: ``lrpe_classifier`` at a size that trains in minutes on a CPU."""


# --- layers ------------------------------------------------------------------------------------


class TokenBatchNorm(Float32Module):
    """BatchNorm over the real tokens of a batch, of all processes in training; 0 at padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = SharedBatchNorm(width)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Normalize x (..., C). real: bool (...), true at real tokens; None if all are."""
        rows = x.reshape(-1, x.shape[-1]) if real is None else x[real]
        # statistics stay float32 under --fp16; see Float32Module
        normed = self.norm(rows.to(self.norm.weight.dtype)).to(x.dtype)
        if real is None:
            return normed.view(x.shape)
        out = x.new_zeros(x.shape)
        out[real] = normed
        return out


def build_norm(kind: str, width: int) -> nn.Module:
    """Return a norm of ``width`` features: "layer" or "batch"."""
    return TokenBatchNorm(width) if kind == "batch" else LayerNorm(width)


def normalized(norm: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """Apply a norm of :func:`build_norm` to x (..., C); real: bool (...), or None."""
    return norm(x, real) if isinstance(norm, TokenBatchNorm) else norm(x)


class ClassifierLayer(EncoderLayer):
    """A pre-norm encoder layer whose norms leave out padding, with drop-path."""

    def __init__(self, cfg: Any, options: Any, layer: int) -> None:
        super().__init__(cfg, options, layer)
        self.drop_path = options.drop_path
        self.self_attn_layer_norm = build_norm(str(options.norm), self.embed_dim)
        self.final_layer_norm = build_norm(str(options.norm), self.embed_dim)

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: None = None
    ) -> Tensor:
        """Called by fairseq: x (T, B, C), mask (B, T), true at padding -> (T, B, C)."""
        x = contiguous(x)
        real = None if encoder_padding_mask is None else ~encoder_padding_mask.T
        # padding is left out of BatchNorm only; a LayerNorm does not mix tokens
        y = normalized(self.self_attn_layer_norm, x, real)
        x = x + self._branch(self.self_attn(y, y, y, key_padding_mask=encoder_padding_mask)[0])
        y = self.activation_fn(self.fc1(normalized(self.final_layer_norm, x, real)))
        return x + self._branch(self.fc2(self.activation_dropout_module(y)))

    def _branch(self, y: Tensor) -> Tensor:
        """Apply dropout, and in training drop the branch (T, B, C) of some examples."""
        y = self.dropout_module(y)
        if not self.training or not self.drop_path:
            return y
        kept = 1 - self.drop_path
        # one draw for an example, over all its tokens; the rest is scaled to keep the mean
        return y * y.new_empty(1, y.shape[1], 1).bernoulli_(kept).div_(kept)


class ClassifierEncoder(Encoder):
    """The encoder of the other models with the layers of classifiers."""

    layer_class = ClassifierLayer


# --- model -------------------------------------------------------------------------------------


@register_model("lrpe_classifier", dataclass=LRPEClassifierConfig)
class LRPEClassifier(BooleanFlags, BaseFairseqModel):
    """Classifier of sequences, pairs of sequences or images: ``--arch lrpe_classifier``."""

    def __init__(self, options: Any, encoder: ClassifierEncoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.options = options
        width = options.encoder_embed_dim
        self.norm = build_norm(str(options.norm), width)
        self.gate = nn.Linear(width, 1) if str(options.pooling) == "gate" else None
        self.head = nn.Linear(width, classes)
        if options.pair_head:
            self.head = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), self.head)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "LRPEClassifier":
        """Build from a configuration. ``max_positions`` defaults to that of the task."""
        refuse_unrelated_processes()
        if args.max_positions is None:
            args.max_positions = task.max_positions()
        # a copy without the structure of the class, because fitted options are added to it
        options = OmegaConf.create(dict(args)) if OmegaConf.is_config(args) else args
        with one_sentence_errors():
            check_classifier(options, task)
            fit_grid(options, task)
            model = cls(options, build_encoder(options, task.source_dictionary), task.num_classes)
        return model

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        src_tokens2: Tensor | None = None,
        src_lengths2: Tensor | None = None,
    ) -> Tensor:
        """Return the logits (B, classes) of token ids (B, T), padded on the right, or of images.

        src_tokens2: the second inputs of pairs, (B, T2). Both inputs are encoded as one batch, so
        that they share the statistics of BatchNorm. The lengths are not used.
        """
        if src_tokens2 is None:
            return self.head(self.encode(src_tokens))
        both = pad_sequence(
            [*src_tokens, *src_tokens2],
            batch_first=True,
            padding_value=self.encoder.padding_idx,
        )
        u, v = self.encode(both).chunk(2)
        return self.head(torch.cat([u, v, u - v, u * v], -1))

    def encode(self, tokens: Tensor) -> Tensor:
        """Return the pooled vectors (B, C) of token ids (B, T) or of images."""
        embedder = self.encoder.embed_tokens
        if isinstance(embedder, Patches):
            cells = embedder.cells(tokens)
            out = self.encoder(embedder.shape(cells), token_embeddings=embedder(cells))
        else:
            out = self.encoder(tokens)
        return self._pooled(out["encoder_out"][0], ~out["encoder_padding_mask"][0].T)

    def _pooled(self, x: Tensor, real: Tensor) -> Tensor:
        """Pool x (T, B, C) over ``real`` (T, B): (B, C)."""
        first = str(self.options.final_norm) == "before"
        if first:
            x = normalized(self.norm, x, real)
        if self.gate is not None:
            x = gated_mean(x, real, self.gate(x).squeeze(-1))
        else:
            x = x[0] if str(self.options.pooling) == "first" else mean_of_tokens(x, real)
        return x if first else normalized(self.norm, x, None)

    def max_positions(self) -> int:
        """Return the length of the longest input."""
        return self.options.max_positions

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Called by fairseq before a checkpoint is loaded: fit the learned positions."""
        super().upgrade_state_dict_named(state_dict, name)
        fit_positions(self.encoder, state_dict, f"{name}.encoder.".removeprefix("."))


@register_model("lrpe_classifier_tiny", dataclass=LRPEClassifierTinyConfig)
class LRPEClassifierTiny(LRPEClassifier):
    """The tiny preset: ``--arch lrpe_classifier_tiny`` or ``_name: lrpe_classifier_tiny``."""


def build_encoder(options: Any, dictionary: Any) -> ClassifierEncoder:
    """Build the encoder with the embedding of the input; absolute positions count its tokens."""
    cfg = TransformerConfig.from_namespace(options)
    cfg.encoder.normalize_before = False  # the norm after the last layer is the model's
    kind = str(options.input)
    width = options.encoder_embed_dim
    pad = dictionary.pad()
    # max_positions counts the numbers of an image, of which several are one token
    per_token = options.patch**2 * (options.channels if kind == "pixels" else 1)
    cfg.max_source_positions = options.max_positions // per_token
    if kind == "tokens":
        embedder = Embedding(len(dictionary), width, pad)
    else:
        cfg.no_scale_embedding = True  # the linear map of patches has a scale of its own
        embedder = build_patches(options, width, pad)
    encoder = ClassifierEncoder(cfg, dictionary, embedder, options)
    if kind == "image":
        init_positions(encoder.embed_positions)
    share_across_layers(encoder)
    return encoder


def check_classifier(options: Any, task: Any) -> None:
    """Raise ChoiceError for options that contradict each other or the data of the task."""
    if not hasattr(task, "num_classes"):
        raise ChoiceError("lrpe_classifier needs the task lrpe_classification or lrpe_images")
    check_sizes(
        options,
        "encoder_layers",
        "encoder_embed_dim",
        "encoder_ffn_embed_dim",
        "encoder_attention_heads",
        "patch",
        "channels",
    )
    check_probabilities(options)
    if options.norm == "batch" and options.checkpoint_activations:
        raise ChoiceError(
            "--norm batch would count every batch twice with --checkpoint-activations: omit one"
        )
    if options.pair_head != task.pairs:
        if task.pairs:
            raise ChoiceError("the data have second inputs (input1): set --pair-head")
        raise ChoiceError("the data have no second inputs (input1): omit --pair-head")
    # the task cuts or refuses longer inputs by its own number
    if options.max_positions != task.max_positions():
        raise ChoiceError(
            f"task.max_positions is {task.max_positions()} and model.max_positions "
            f"{options.max_positions}: set one of them only"
        )
    check_patches(options, task)


def mean_of_tokens(x: Tensor, real: Tensor) -> Tensor:
    """Return the mean of x (T, B, C) over the tokens where ``real`` (T, B) is true, (B, C)."""
    # a sum over thousands of tokens loses digits in half precision
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = real.unsqueeze(-1).to(wide.dtype)
    return ((wide * weight).sum(0) / weight.sum(0)).to(x.dtype)


def gated_mean(x: Tensor, real: Tensor, gate: Tensor) -> Tensor:
    """Return the mean of x (T, B, C) with weights softmax(gate) over real tokens, (B, C).

    gate, real: (T, B). It is the sequence pooling of compact transformers (Hassani et al., 2021).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = gate.to(wide).masked_fill(~real, -torch.inf).softmax(0)
    return (x.to(wide) * weight.unsqueeze(-1)).sum(0).to(x.dtype)
