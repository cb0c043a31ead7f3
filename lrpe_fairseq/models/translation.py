"""``lrpe_transformer``: fairseq's encoder-decoder Transformer with LRPE self-attention.

Attention type and encoding are chosen apart for the encoder's and the decoder's self-attention
(``--encoder-position-encoding``, ``--decoder-position-encoding``, ...; ``model.encoder.*`` and
``model.decoder.*`` in a YAML). Cross-attention and everything else are fairseq's own.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig
from torch import nn

from lrpe_fairseq.encodings.sharing import share_across_layers
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.layers import Decoder, Encoder
from lrpe_fairseq.models.options import (
    AttentionOptions,
    FlagsThatMeanWhatTheySay,
    defaults,
    one_sentence_errors,
    refuse_unrelated_processes,
)

TINY = {"embed_dim": 128, "ffn_embed_dim": 512, "layers": 3, "attention_heads": 4}


@dataclass
class EncoderOptions(EncDecBaseConfig, AttentionOptions):
    """The encoder: LRPE, as in the paper."""


@defaults(attention_type="softmax", position_encoding="none")
@dataclass
class DecoderOptions(DecoderConfig, AttentionOptions):
    """The decoder: stock softmax attention with sinusoids, as in the paper."""


@dataclass
class LRPETransformerConfig(TransformerConfig):
    """LRPE, Table 7, column MT: 6+6 x 512, 8 heads, FFN 2048, ReLU, post-norm, dropout 0.1,
    sinusoidal positions on."""

    # fairseq reads the classes of nested defaults, not instances
    encoder: EncoderOptions = field(default=EncoderOptions)
    decoder: DecoderOptions = field(default=DecoderOptions)


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
    """3+3 x 128: the shape of ``lrpe_transformer`` in minutes on a CPU."""

    encoder: TinyEncoderOptions = field(default=TinyEncoderOptions)
    decoder: TinyDecoderOptions = field(default=TinyDecoderOptions)


@register_model("lrpe_transformer", dataclass=LRPETransformerConfig)
class LRPETransformer(FlagsThatMeanWhatTheySay, TransformerModelBase):
    """Encoder-decoder model; ``--arch lrpe_transformer``."""

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "LRPETransformer":
        """Build from a configuration; see fairseq's TransformerModelBase for its options."""
        refuse_unrelated_processes()
        with one_sentence_errors():
            check_shared_embeddings(cfg, task)
            model = super().build_model(cfg, task)
            share_across_layers(model.encoder)
            share_across_layers(model.decoder)
        return model

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: nn.Module) -> Encoder:
        """Called by fairseq's ``build_model``."""
        return Encoder(cfg, src_dict, embed_tokens, cfg.encoder)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: nn.Module) -> Decoder:
        """Called by fairseq's ``build_model``."""
        alone = {"no_encoder_attn": cfg.no_cross_attention}
        return Decoder(cfg, tgt_dict, embed_tokens, cfg.decoder, **alone)


@register_model("lrpe_transformer_tiny", dataclass=LRPETransformerTinyConfig)
class LRPETransformerTiny(LRPETransformer):
    """The tiny preset; ``--arch lrpe_transformer_tiny``, or ``_name: lrpe_transformer_tiny``."""


def check_shared_embeddings(cfg: Any, task: Any) -> None:
    """Raise ChoiceError if --share-all-embeddings does not fit the model or its dictionaries."""
    if not cfg.share_all_embeddings:
        return
    if task.source_dictionary != task.target_dictionary:
        raise ChoiceError("--share-all-embeddings requires a joined dictionary")
    if cfg.encoder.embed_dim != cfg.decoder.embed_dim:
        raise ChoiceError(
            "--share-all-embeddings requires --encoder-embed-dim to match --decoder-embed-dim"
        )
    if cfg.decoder.embed_path not in (None, "", cfg.encoder.embed_path):
        raise ChoiceError("--share-all-embeddings is not compatible with --decoder-embed-path")
