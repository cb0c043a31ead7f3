"""``lrpe_roberta``: fairseq's RoBERTa with bidirectional LRPE self-attention.

Everything but self-attention is fairseq's own RobertaModel, with its heads and hub interface.
"""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import register_model
from fairseq.models.roberta.model import RobertaEncoder, RobertaModel
from fairseq.models.transformer import DEFAULT_MIN_PARAMS_TO_WRAP, TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from omegaconf import OmegaConf
from torch import Tensor, nn

from lrpe_fairseq.compat.processes import refuse_unrelated_processes
from lrpe_fairseq.encodings.core.options import option
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.encodings.layers import tokens_per_sample
from lrpe_fairseq.errors import one_sentence_errors
from lrpe_fairseq.models.checks import (
    check_probabilities,
    check_pruning_of_heads,
    check_quantization_blocks,
    check_sizes,
)
from lrpe_fairseq.models.flags import BooleanFlags
from lrpe_fairseq.models.layers import Encoder
from lrpe_fairseq.models.options import AttentionOptions
from lrpe_fairseq.models.patches import fit_positions
from lrpe_fairseq.models.presets import defaults
from lrpe_fairseq.models.pruning import Prunable, keep_patterns

ACTIVATIONS = ChoiceEnum(utils.get_available_activation_fns())


@dataclass
class LRPERobertaConfig(AttentionOptions, FairseqDataclass):
    """LRPE, Table 7, column BLM: 12 x 768, 12 heads, FFN 3072, GELU, dropout and attention dropout
    0.1, post-norm, learned absolute positions on."""

    encoder_layers: int = option(12, "number of layers")
    encoder_embed_dim: int = option(768, "embedding dimension")
    encoder_ffn_embed_dim: int = option(3072, "embedding dimension of the feed-forward network")
    encoder_attention_heads: int = option(12, "number of attention heads")
    encoder_normalize_before: bool = option(False, "LayerNorm before each block instead of after")
    encoder_learned_pos: bool = option(True, "learned absolute positions instead of sinusoids")
    no_token_positional_embeddings: bool = option(False, "no absolute positions")
    layernorm_embedding: bool = option(True, "LayerNorm after the embeddings")
    max_positions: Optional[int] = option(None, "longest input (default: the task's)")
    activation_fn: ACTIVATIONS = option("gelu", "activation of the feed-forward network")
    dropout: float = option(0.1, "dropout")
    attention_dropout: float = option(0.1, "dropout on softmax attention weights")
    activation_dropout: float = option(0.0, "dropout after the activation")
    untie_weights_roberta: bool = option(False, "do not share output weights with the embeddings")
    pooler_activation_fn: ACTIVATIONS = option("tanh", "activation of classification heads")
    pooler_dropout: float = option(0.0, "dropout in classification heads")
    spectral_norm_classification_head: bool = option(False, "spectral norm in the heads")
    load_checkpoint_heads: bool = option(False, "load the classification heads of a checkpoint")
    encoder_layerdrop: float = option(0.0, "probability to drop a layer")
    encoder_layers_to_keep: Optional[str] = option(None, "layers to keep, comma-separated")
    quant_noise_pq: float = option(0.0, "quantization noise on weights")
    quant_noise_pq_block_size: int = option(8, "block size of quantization noise")
    quant_noise_scalar: float = option(0.0, "scalar quantization noise")
    mha_reg_scale_factor: float = option(0.0, "scale of the penalty on heads (AdaPrune)")
    ffn_reg_scale_factor: float = option(0.0, "scale of the penalty on neurons (AdaPrune)")
    checkpoint_activations: bool = option(False, "recompute activations in the backward pass")
    offload_activations: bool = option(False, "checkpoint activations and store them on the CPU")
    min_params_to_wrap: int = option(DEFAULT_MIN_PARAMS_TO_WRAP, "smallest layer to shard")


@defaults(
    encoder_layers=3,
    encoder_embed_dim=128,
    encoder_ffn_embed_dim=512,
    encoder_attention_heads=4,
)
@dataclass
class LRPERobertaTinyConfig(LRPERobertaConfig):
    """3 x 128, 4 heads, FFN 512: ``lrpe_roberta`` at a size that trains in minutes on a CPU."""


class MaskedLMEncoder(RobertaEncoder):
    """fairseq's RobertaEncoder with our layers."""

    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: nn.Module) -> Encoder:
        """Called by fairseq's constructor."""
        encoder = Encoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens, args)
        encoder.apply(init_bert_params)  # before weights are shared, which it would draw twice
        share_across_layers(encoder)
        return encoder


@register_model("lrpe_roberta", dataclass=LRPERobertaConfig)
class LRPERobertaModel(BooleanFlags, Prunable, RobertaModel):
    """Encoder-only masked language model: ``--arch lrpe_roberta``."""

    @classmethod
    def hub_models(cls) -> dict[str, str]:
        """Return no models: there are no published checkpoints."""
        return {}

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "LRPERobertaModel":
        """Build from a configuration.

        ``max_positions`` defaults to that of the task, or 512, and a floor of angles reads the
        ``tokens_per_sample`` of the task.
        """
        refuse_unrelated_processes()
        if args.max_positions is None:
            args.max_positions = task.max_positions() or 512  # kept in the checkpoint
        # a copy without the structure of the class, which lacks the next option
        options = OmegaConf.create(dict(args)) if OmegaConf.is_config(args) else args
        options.tokens_per_sample = tokens_per_sample(getattr(task, "cfg", None))
        with one_sentence_errors():
            check_sizes(
                options,
                "encoder_layers",
                "encoder_embed_dim",
                "encoder_ffn_embed_dim",
                "encoder_attention_heads",
                "max_positions",
            )
            keep_patterns(options, options.encoder_layers, options.encoder_layers_to_keep)
            check_probabilities(options)
            check_pruning_of_heads(options)
            check_quantization_blocks(
                options.quant_noise_pq,
                options.quant_noise_pq_block_size,
                options.encoder_embed_dim,
                options.encoder_ffn_embed_dim,
            )
            return cls(options, MaskedLMEncoder(options, task.source_dictionary))

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Called by fairseq before a checkpoint is loaded: fit the learned positions."""
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}.encoder.sentence_encoder.".removeprefix(".")
        fit_positions(self.encoder.sentence_encoder, state_dict, prefix)


@register_model("lrpe_roberta_tiny", dataclass=LRPERobertaTinyConfig)
class LRPERobertaTiny(LRPERobertaModel):
    """The tiny preset: ``--arch lrpe_roberta_tiny`` or ``_name: lrpe_roberta_tiny``."""
