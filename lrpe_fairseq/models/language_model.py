"""``lrpe_lm``: fairseq's decoder-only language model with LRPE self-attention.

Everything but self-attention is fairseq's own TransformerLanguageModel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
)
from torch import Tensor, nn

from lrpe_fairseq.attention.multihead import Memory
from lrpe_fairseq.attention.tokens import restarted
from lrpe_fairseq.compat.processes import refuse_unrelated_processes
from lrpe_fairseq.encodings.core.options import LONGEST, check_number, option
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.errors import ChoiceError, one_sentence_errors, refuse
from lrpe_fairseq.models import normformer
from lrpe_fairseq.models.checks import check_language_model
from lrpe_fairseq.models.flags import BooleanFlags
from lrpe_fairseq.models.layers import Decoder, DecoderLayer
from lrpe_fairseq.models.options import AttentionOptions
from lrpe_fairseq.models.presets import defaults
from lrpe_fairseq.models.pruning import Prunable, keep_patterns
from lrpe_fairseq.models.segment_memory import Segment, SegmentMemory, memories, with_documents
from lrpe_fairseq.models.split_text import (
    check_split,
    split_modules,
    split_steps,
    whole_text,
)
from lrpe_fairseq.patterns import over_layers


class SegmentLayer(DecoderLayer):
    """A decoder layer that can attend to earlier segments."""

    def forward(
        self,
        x: Tensor,
        encoder_out: Sequence[Memory] | None = None,
        encoder_padding_mask: None = None,
        incremental_state: dict | None = None,
        **keywords: Any,
    ) -> tuple:
        """Compute the layer as fairseq does; ``encoder_out`` contains the memories of all layers.

        They are earlier inputs of the layers, so a pre-norm layer normalizes them as well.
        """
        if encoder_out is not None:
            memory = encoder_out[self._layer]
            if self.normalize_before:
                memory = memory._replace(inputs=self.self_attn_layer_norm(memory.inputs))
            incremental_state = self.self_attn.remembering(memory)
        return super().forward(x, incremental_state=incremental_state, **keywords)


class SegmentDecoder(Decoder):
    """A decoder that can continue from earlier segments."""

    layer_class = SegmentLayer

    def __init__(self, args: Any, dictionary: Any, embed_tokens: nn.Module) -> None:
        """Build from ``args``, a LRPELanguageModelConfig."""
        cfg = TransformerConfig.from_namespace(args)  # has none of these options
        normformer.add_options(cfg, args)
        super().__init__(cfg, dictionary, embed_tokens, args, no_encoder_attn=True)
        self.args = args
        self.memory = SegmentMemory(args.memory_length, len(self.layers))
        self.boundary = boundary_of(args.document_boundary, dictionary)
        if self.boundary is not None and self.embed_positions is not None:
            # positions start anew in every document, also those of absolute embeddings
            embed = self.embed_positions
            embed.forward = partial(_embed_restarted, embed.forward, dictionary, self.boundary)
        self.whole: Tensor | None = None  # the tokens of a text that processes share
        if check_split(args) > 1:
            split_modules(self)

    def forward(
        self,
        prev_output_tokens: Tensor,
        *rest: Any,
        segment: Segment | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, dict]:
        """Compute the decoder as fairseq does; with a ``segment`` the tokens attend to its memory.

        Without a segment, as in generation, there is no memory.
        Raises: Refusal if a model with a memory is trained without segments.
        """
        if segment is None and self.training and self.memory.length:
            refuse(
                f"a memory of {self.memory.length} tokens needs batches of "
                "consecutive segments: train with --task lrpe_truncated_bptt_lm"
            )
        if segment is None or not (self.memory.length or "documents" in segment):
            return super().forward(prev_output_tokens, *rest, **keywords)
        like = self.layers[0].fc1.weight  # F C, with the dtype and device of the layers' inputs
        past = self.memory.recall(segment, self.training, like)
        if self.boundary is not None:
            segment = with_documents(segment, past, prev_output_tokens.eq(self.boundary))
        # fairseq passes encoder_out to every layer
        encoder_out = {"encoder_out": [memories(segment, past)], "encoder_padding_mask": []}
        keywords["encoder_out"] = encoder_out
        x, extra = super().forward(prev_output_tokens, *rest, **keywords)
        # the last inner state is no layer's input
        self.memory.keep(segment, self.training, past, extra["inner_states"][:-1])
        return x, extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict | None = None,
        incremental_state: dict | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, dict]:
        """Compute features; documents begin at the symbol of ``--document-boundary``.

        Of a text that processes share, they are those of this rank's part.
        """
        with whole_text(self, prev_output_tokens) as tokens:
            if self.boundary is not None:
                starts = tokens.eq(self.boundary)
                # a decoding step computes the last token only
                self.given.starts = starts if incremental_state is None else starts[:, -1:]
            return super().extract_features(tokens, encoder_out, incremental_state, **keywords)


@defaults(decoder_normalize_before=True, share_decoder_input_output_embed=True)
@dataclass
class LRPELanguageModelConfig(TransformerLanguageModelConfig, AttentionOptions):
    """LRPE, Table 7, column AML: 6 x 512, 8 heads, FFN 2048, ReLU, dropout 0.1, pre-norm with a
    final norm, tied embeddings, sinusoidal positions on."""

    memory_length: int = option(
        0,
        "number of tokens of earlier segments to attend to (Transformer-XL); requires "
        "--task lrpe_truncated_bptt_lm and --no-token-positional-embeddings",
    )
    document_boundary: Optional[str] = option(
        None,
        "symbol of the dictionary, such as </s>, that is the first input of a document: a token "
        "attends to its own document only, in which positions, gates and states start anew",
    )
    sequence_parallel: int = option(
        1,
        "number of processes that share the tokens of every text in training: a model with long "
        "texts fits where one device has too little memory; the processes are N or a multiple",
    )


@defaults(
    decoder_layers=3,
    decoder_embed_dim=128,
    decoder_input_dim=128,
    decoder_output_dim=128,
    decoder_ffn_embed_dim=512,
    decoder_attention_heads=4,
)
@dataclass
class LRPELanguageModelTinyConfig(LRPELanguageModelConfig):
    """3 x 128, 4 heads, FFN 512: ``lrpe_lm`` at a size that trains in minutes on a CPU."""


@register_model("lrpe_lm", dataclass=LRPELanguageModelConfig)
class LRPELanguageModel(BooleanFlags, Prunable, TransformerLanguageModel):
    """Decoder-only language model: ``--arch lrpe_lm``."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "LRPELanguageModel":
        """Build from a configuration.

        fairseq's ``build_model`` always builds its own decoder class. It is called for a model
        without layers, to check the options and to build the embeddings for our decoder.
        """
        refuse_unrelated_processes()
        if args.adaptive_input or args.character_embeddings:
            args.share_decoder_input_output_embed = False  # their shapes differ
        with one_sentence_errors():
            check_memory(args)
            ranks = check_split(args)
            check_language_model(args)
            keep_patterns(args, args.decoder_layers, args.decoder_layers_to_keep)
        layers = args.decoder_layers
        args.decoder_layers = 0  # for fairseq's decoder, which is thrown away
        with one_sentence_errors():
            shell = super().build_model(args, task).decoder
            # fairseq has set the number of the layers to keep, if it was given any
            args.decoder_layers = args.decoder_layers or layers
            decoder = SegmentDecoder(args, shell.dictionary, shell.embed_tokens)
            share_across_layers(decoder)
        split_steps(task, ranks)
        return cls(decoder)


@register_model("lrpe_lm_tiny", dataclass=LRPELanguageModelTinyConfig)
class LRPELanguageModelTiny(LRPELanguageModel):
    """The tiny preset: ``--arch lrpe_lm_tiny`` or ``_name: lrpe_lm_tiny``."""


def boundary_of(symbol: str | None, dictionary: Any) -> int | None:
    """Return the index of ``--document-boundary``. Raises: ChoiceError for an unknown symbol."""
    if symbol is None:
        return None
    index = dictionary.indices.get(symbol, dictionary.pad())
    if index == dictionary.pad():
        raise ChoiceError(
            f"--document-boundary {symbol!r} is no symbol of the dictionary: pass an entry of the "
            "data's dict.txt, or </s> for the ends of lines"
        )
    return index


def _embed_restarted(
    forward: Callable, dictionary: Any, boundary: int, tokens: Tensor, incremental_state: Any = None
) -> Tensor:
    """Return fairseq's absolute embeddings of positions that restart, for tokens (B, T): (B, T, C).

    forward: of fairseq's module, which counts the tokens of a line.
    """
    positions, _ = restarted(tokens.eq(boundary), tokens.eq(dictionary.pad()))
    # the embeddings of a line without padding, of which each token takes that of its position
    return forward(torch.full_like(tokens[:1], boundary))[0][positions]


def check_memory(options: Any) -> None:
    """Raise ChoiceError if the options of a model do not allow a memory of earlier segments."""
    length = options.memory_length
    check_number("--memory-length", length, least=0, most=LONGEST)
    if not length:
        return
    # one linear layer of a mixed stack is enough
    if "linear" in over_layers(options.attention_type, options.decoder_layers):
        raise ChoiceError(
            "a memory of earlier segments requires softmax attention: the state of linear "
            "attention sums over the whole text and cannot be limited to the last tokens"
        )
    if not options.no_token_positional_embeddings:
        raise ChoiceError(
            "a memory of earlier segments requires --no-token-positional-embeddings: absolute "
            "positions restart in every segment"
        )
    if options.decoder_layerdrop:
        raise ChoiceError(
            "--decoder-layerdrop cannot be used with a memory of earlier segments: a dropped layer "
            "has no input to store"
        )
