"""``lrpe_transformer``: fairseq's encoder-decoder Transformer with LRPE attention.

Attention type and encoding are chosen separately for the encoder's and the decoder's self-attention
and for cross-attention (``--encoder-...``, ``--decoder-...``, ``--cross-...``). Everything else is
fairseq's own, by default cross-attention too.
"""

from argparse import Namespace
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig
from torch import Tensor, nn

from lrpe_fairseq.compat.processes import refuse_unrelated_processes
from lrpe_fairseq.encodings.core.options import flag_of, option
from lrpe_fairseq.encodings.core.sharing import share_across_layers, share_across_stacks
from lrpe_fairseq.encodings.fidelity import UNIT_EMBEDDINGS, parse_departures
from lrpe_fairseq.errors import ChoiceError, one_sentence_errors, refuse
from lrpe_fairseq.models.checks import (
    STOCK,
    check_node_positions,
    check_translation,
    has_stock_cross,
)
from lrpe_fairseq.models.flags import BooleanFlags
from lrpe_fairseq.models.layers import Decoder, Encoder
from lrpe_fairseq.models.options import AttentionOptions
from lrpe_fairseq.models.presets import defaults
from lrpe_fairseq.models.pruning import Prunable, prune_stack
from lrpe_fairseq.models.tree_embedding import TreeEmbedding
from lrpe_fairseq.patterns import over_layers

TINY = {"embed_dim": 128, "ffn_embed_dim": 512, "layers": 3, "attention_heads": 4}


@dataclass
class EncoderOptions(EncDecBaseConfig, AttentionOptions):
    """Options of the encoder. The default is LRPE, as in the paper."""


@defaults(attention_type="softmax", position_encoding="none")
@dataclass
class DecoderOptions(DecoderConfig, AttentionOptions):
    """Options of the decoder. The default is softmax attention with sinusoids, as in the paper."""


@defaults(attention_type="softmax", position_encoding="none")
@dataclass
class CrossOptions(AttentionOptions):
    """Options of cross-attention. The defaults are fairseq's own cross-attention."""


@dataclass
class LRPETransformerConfig(TransformerConfig):
    """LRPE, Table 7, column MT: 6+6 x 512, 8 heads, FFN 2048, ReLU, post-norm, dropout 0.1,
    sinusoidal positions on."""

    # fairseq needs the classes of nested defaults, not instances
    encoder: EncoderOptions = field(default=EncoderOptions)
    decoder: DecoderOptions = field(default=DecoderOptions)
    cross: CrossOptions = field(default=CrossOptions)
    tree_embedding: bool = option(
        False,
        "Tree-SQ (Shiv and Quirk): embeddings of the nodes of binary trees, added to those of "
        "tokens; needs --task lrpe_transduction --node-positions",
    )

    @classmethod
    def from_namespace(cls, args: Any) -> Any:
        """Return the configuration for flat options (``args.encoder_embed_dim``).

        fairseq's method reads only the stock fields and ignores the defaults of a preset.
        """
        if not isinstance(args, Namespace):
            return args
        values = {}
        for declared in fields(cls):
            if is_dataclass(declared.type):
                values[declared.name] = _built(declared.type, vars(args), f"{declared.name}_")
            elif hasattr(args, declared.name):
                values[declared.name] = getattr(args, declared.name)
        return cls(**values)


def _built(config: type, options: dict[str, Any], prefix: str) -> Any:
    """Return an instance of ``config`` from the ``options`` that it has and that are resolved."""
    names = [option.name for option in fields(config) if prefix + option.name in options]
    values = {name: options[prefix + name] for name in names}
    # a default such as ${task.max_source_positions} is resolved later, by omegaconf
    return config(**{name: v for name, v in values.items() if not str(v).startswith("${")})


@defaults(**TINY)
@dataclass
class TinyEncoderOptions(EncoderOptions):
    """3 x 128, 4 heads, FFN 512."""


@defaults(**TINY)
@dataclass
class TinyDecoderOptions(DecoderOptions):
    """3 x 128, 4 heads, FFN 512."""


@dataclass
class LRPETransformerTinyConfig(LRPETransformerConfig):
    """3+3 x 128: ``lrpe_transformer`` at a size that trains in minutes on a CPU."""

    encoder: TinyEncoderOptions = field(default=TinyEncoderOptions)
    decoder: TinyDecoderOptions = field(default=TinyDecoderOptions)


@register_model("lrpe_transformer", dataclass=LRPETransformerConfig)
class LRPETransformer(BooleanFlags, Prunable, TransformerModelBase):
    """Encoder-decoder model: ``--arch lrpe_transformer``."""

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "LRPETransformer":
        """Build from a configuration or a flat Namespace."""
        refuse_unrelated_processes()
        cfg = getattr(cls, "__dataclass").from_namespace(cfg)  # set by register_model
        with one_sentence_errors():
            keep_layers(cfg)
            check_cross_options(cfg)
            check_translation(cfg, task)
            model = super().build_model(cfg, task)
            check_node_positions(model, task)
            widen_embeddings(cfg, model)
            # after all layers are built: one layer owns what the others share
            share_across_layers(model.encoder)
            share_across_layers(model.decoder)
            share_across_stacks(model)
            share_tree_embedding(model)
        return model

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: nn.Module) -> Encoder:
        """Called by fairseq's ``build_model``."""
        return Encoder(cfg, src_dict, embed_tokens, cfg.encoder)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: nn.Module) -> Decoder:
        """Called by fairseq's ``build_model``."""
        alone = cfg.no_cross_attention
        return Decoder(cfg, tgt_dict, embed_tokens, cfg.decoder, no_encoder_attn=alone)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor,
        prev_output_tokens: Tensor,
        return_all_hiddens: bool = True,
        *,
        src_positions: Tensor | None = None,
        prev_output_positions: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, dict]:
        """Compute the output as fairseq does.

        src_positions, prev_output_positions: int64 (B, T) of self- and cross-attention, such as
            codes of tree nodes. None counts tokens.
        """
        hiddens = {"src_lengths": src_lengths, "return_all_hiddens": return_all_hiddens}
        encoded = self.encoder(src_tokens, positions=src_positions, **hiddens)
        return self.decoder(
            prev_output_tokens,
            encoder_out=encoded,
            positions=prev_output_positions,
            **hiddens,
            **keywords,
        )

    def prepare_for_inference_(self, cfg: Any) -> None:
        """Called by fairseq before inference.

        Raises: Refusal if weights of linear cross-attention are asked for.
        """
        options = cfg.generation
        aligns = options.print_alignment or options.replace_unk is not None
        types = over_layers(self.cfg.cross.attention_type, len(self.decoder.layers))
        if aligns and types[-1] == "linear":
            refuse(
                "--print-alignment and --replace-unk need the weights of cross-attention, which "
                "--cross-attention-type linear does not have"
            )
        super().prepare_for_inference_(cfg)


@register_model("lrpe_transformer_tiny", dataclass=LRPETransformerTinyConfig)
class LRPETransformerTiny(LRPETransformer):
    """The tiny preset: ``--arch lrpe_transformer_tiny`` or ``_name: lrpe_transformer_tiny``."""


def check_cross_options(cfg: Any) -> None:
    """Refuse options of cross-attention if it is fairseq's own, which reads none of them.

    Raises: ChoiceError for the first option that would be ignored.
    """
    options = getattr(cfg, "cross", None)
    if options is None or not has_stock_cross(cfg):
        return
    for declared in fields(CrossOptions):
        value = getattr(options, declared.name, declared.default)
        if declared.name not in STOCK and str(value) != str(declared.default):
            raise ChoiceError(
                f"{flag_of('cross_' + declared.name)} {value} would be ignored by fairseq's own "
                "cross-attention: leave it out, or choose --cross-position-encoding or "
                "--cross-attention-type"
            )


def share_tree_embedding(model: TransformerModelBase) -> None:
    """Let encoder and decoder have the same Tree-SQ weights, if both have as many."""
    source = model.encoder.embed_positions
    target = model.decoder.embed_positions
    # both sides have one if the source has: they share the option
    if isinstance(source, TreeEmbedding) and source.width == target.width:
        target.weight = source.weight


def keep_layers(cfg: Any) -> None:
    """Apply ``layers_to_keep``, which is a list here; fairseq expects text with commas."""
    cross = getattr(cfg, "cross", None)
    for side, stacks in ((cfg.encoder, [cfg.encoder]), (cfg.decoder, [cfg.decoder, cross])):
        if side.layers_to_keep:
            prune_stack(side, "", stacks)


def widen_embeddings(cfg: Any, model: nn.Module) -> None:
    """Give drawn embeddings variance 1, for the departure ``ape-unit-embeddings`` of either side.

    They are multiplied, so that all other weights are those of the same seed without it.
    """
    weights = {}  # by id, because both sides may have the same
    for stack, options in ((model.encoder, cfg.encoder), (model.decoder, cfg.decoder)):
        drawn = isinstance(stack.embed_tokens, nn.Embedding) and not options.embed_path
        if drawn and UNIT_EMBEDDINGS in parse_departures(options.fidelity):
            weights[id(stack.embed_tokens.weight)] = stack.embed_tokens.weight
    for weight in weights.values():
        weight.data.mul_(weight.shape[1] ** 0.5)
