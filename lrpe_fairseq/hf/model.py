"""``lrpe_lm`` and ``lrpe_roberta`` as models of transformers. fairseq is not needed.

The names of the parameters are fairseq's. Hidden states are stored (T, B, C), as in fairseq, so
that results are equal bit for bit.

Axes: B batch, T time, C width, V symbols.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
)
from transformers.utils.generic import can_return_tuple

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.tokens import Given
from lrpe_fairseq.encodings import SPE
from lrpe_fairseq.encodings.core.sharing import share_across_layers
from lrpe_fairseq.encodings.rotations.cores import after_loading
from lrpe_fairseq.hf.auto import CODE
from lrpe_fairseq.hf.cache import (
    CACHE_NAME,
    StateLayer,
    new_cache,
    one_cache,
    state_layer,
)
from lrpe_fairseq.hf.calls import (
    Call,
    attended,
    is_one_sided,
    padding_of,
    positions_of,
    refuse_unknown,
)
from lrpe_fairseq.hf.config import LRPEConfig, attention_arguments
from lrpe_fairseq.hf.generation import refuse_generation
from lrpe_fairseq.hf.once import hold_once

REMOTE_CODE = '''"""The model, for trust_remote_code=True. It needs lrpe_fairseq with [hf]."""

from lrpe_fairseq import hf


class LRPEConfig(hf.LRPEConfig):
    """The configuration."""


class {name}(hf.{name}):
    """The model."""

    config_class = LRPEConfig
'''
IGNORED = ("num_items_in_batch", "cache_position", "return_dict")
"""Arguments that transformers passes to every model, and that are without effect on the logits."""


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x.float()).type_as(x)


def _gelu_accurate(x: Tensor) -> Tensor:
    """The approximation of GELU by tanh, in fairseq's order of operations."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
    return 0.5 * x * (1 + torch.tanh(inner))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": _gelu,
    "gelu_accurate": _gelu_accurate,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


class SinusoidalPositions(nn.Module):
    """fairseq's sinusoids: position s is row s + 2, because rows 0 and 1 are <s> and <pad>."""

    def __init__(self, width: int, padding_index: int) -> None:
        super().__init__()
        self.width, self.first = width, padding_index + 1

    def forward(self, positions: Tensor) -> Tensor:
        """Return the embeddings (B, T, C) of positions (B, T), float32."""
        half = self.width // 2
        step = -math.log(10000) / (half - 1)
        waves = torch.exp(torch.arange(half, dtype=torch.float, device=positions.device) * step)
        angles = (positions + self.first).float().unsqueeze(-1) * waves
        return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, self.width % 2))


class LearnedPositions(nn.Embedding):
    """fairseq's learned positions: position s is row s + 2 of ``length`` + 2."""

    def __init__(self, length: int, width: int, padding_index: int) -> None:
        super().__init__(length + padding_index + 1, width, padding_index)
        nn.init.normal_(self.weight, std=width**-0.5)
        nn.init.zeros_(self.weight[padding_index].detach())
        self.length = length

    def forward(self, positions: Tensor) -> Tensor:
        """Return the embeddings (B, T, C) of positions (B, T). Raises: ValueError beyond them."""
        if positions.numel() and int(positions.max()) >= self.length:
            raise ValueError(
                f"the model has learned positions for {self.length} tokens: cut longer texts"
            )
        return super().forward(positions + self.padding_idx + 1)


def _positions(config: LRPEConfig) -> nn.Module | None:
    width, padding = config.hidden_size, config.pad_token_id
    if config.absolute_positions == "sinusoidal":
        return SinusoidalPositions(width, padding)
    if config.absolute_positions == "learned":
        return LearnedPositions(config.max_position_embeddings, width, padding)
    return None


def _projection(from_width: int, to_width: int) -> nn.Linear | None:
    """Return a map between two widths; None if they are equal."""
    if from_width == to_width:
        return None
    projection = nn.Linear(from_width, to_width, bias=False)
    nn.init.xavier_uniform_(projection.weight)
    return projection


class LRPELayer(nn.Module):
    """fairseq's transformer layer with our self-attention. x: (T, B, C)."""

    def __init__(self, config: LRPEConfig, index: int) -> None:
        super().__init__()
        width, inner, heads = (
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
        )
        self.self_attn = MultiheadAttention(width, heads, **attention_arguments(config, index))
        self.attn_ln = nn.LayerNorm(width) if config.scale_attn else None
        self.c_attn = nn.Parameter(torch.ones(heads)) if config.scale_heads else None
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.ffn_layernorm = nn.LayerNorm(inner) if config.scale_fc else None
        self.w_resid = nn.Parameter(torch.ones(width)) if config.scale_resids else None
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.normalize_before = config.normalize_before
        if self.self_attn.encoding.has_states:
            self.self_attn.update = self.self_attn.encoding.update()

    def forward(self, x: Tensor, call: Call, past: StateLayer | None) -> Tensor:
        """Compute the layer after the tokens of ``past``; see :func:`attended`."""
        y = self.self_attn_layer_norm(x) if self.normalize_before else x
        x = x + self.dropout(self._attention(y, call, past))
        x = x if self.normalize_before else self.self_attn_layer_norm(x)
        y = self.final_layer_norm(x) if self.normalize_before else x
        y = self.dropout(self._feed_forward(y))
        x = (x if self.w_resid is None else torch.mul(self.w_resid, x)) + y
        return x if self.normalize_before else self.final_layer_norm(x)

    def _attention(self, y: Tensor, call: Call, past: StateLayer | None) -> Tensor:
        out = attended(self.self_attn, y.transpose(0, 1), call, past).transpose(0, 1)
        if self.c_attn is not None:
            heads = out.reshape(*out.shape[:2], len(self.c_attn), -1)
            out = torch.einsum("tbhd,h->tbhd", heads, self.c_attn).reshape(y.shape)
        return out if self.attn_ln is None else self.attn_ln(out)

    def _feed_forward(self, y: Tensor) -> Tensor:
        y = self.activation_dropout(self.activation(self.fc1(y)))
        y = y if self.ffn_layernorm is None else self.ffn_layernorm(y)
        y = self.fc2(y)
        self.self_attn.advance(self.fc2, (), y)  # the states of an encoding such as tape
        return y


def _layers(config: LRPEConfig) -> nn.ModuleList:
    """Return all layers in torch's default dtype, their encodings in float32 or wider.

    transformers sets that default to the dtype of a model and loads every weight in the dtype that
    it was built with. Phases in half precision would be wrong.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        layers = nn.ModuleList(LRPELayer(config, i) for i in range(config.num_hidden_layers))
    finally:
        torch.set_default_dtype(dtype)
    return layers.to(dtype)


class LRPEPreTrainedModel(PreTrainedModel):
    """What all exported models share: loading, saving, and parameters shared between layers."""

    config_class = LRPEConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["LRPELayer"]
    _keys_to_ignore_on_load_missing = [r"\.floor\.clips$"]  # of exports that are older than it

    @classmethod
    def get_init_context(cls, *given: Any, **keywords: Any) -> list:
        """Build the model on the CPU, not on the meta device.

        Constructors compute fixed angles, which are not among the weights.
        """
        return [*super().get_init_context(*given, **keywords), torch.device("cpu")]

    def _init_weights(self, module: nn.Module) -> None:
        """Keep what the constructors drew; transformers would draw again."""

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, **keywords: Any
    ) -> None:
        """Write configuration and weights, and the module that ``trust_remote_code`` loads."""
        name = type(self).__name__
        self.config.auto_map = {
            "AutoConfig": f"{CODE}.LRPEConfig",
            self.auto_class: f"{CODE}.{name}",
        }
        super().save_pretrained(save_directory, is_main_process=is_main_process, **keywords)
        if is_main_process:
            code = REMOTE_CODE.format(name=name)
            Path(save_directory, f"{CODE}.py").write_text(code, encoding="utf-8")

    def tie_weights(self, *given: Any, **keywords: Any) -> None:
        """Tie output weights to the embeddings, and encodings that share parameters.

        transformers calls it after loading, which assigns buffers without ``load_state_dict``.
        """
        super().tie_weights(*given, **keywords)
        share_across_layers(self)
        after_loading(self)


class LRPEModel(LRPEPreTrainedModel):
    """Embeddings and the stack of layers."""

    auto_class = "AutoModel"

    def __init__(self, config: LRPEConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        own = config.embedding_size or width
        self.embed_tokens = nn.Embedding(config.vocab_size, own, config.pad_token_id)
        nn.init.normal_(self.embed_tokens.weight, std=own**-0.5)
        nn.init.zeros_(self.embed_tokens.weight[config.pad_token_id].detach())
        self.embed_scale = math.sqrt(width) if config.scale_embedding else 1.0
        self.project_in_dim = _projection(own, width)
        self.embed_positions = _positions(config)
        self.layernorm_embedding = nn.LayerNorm(width) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = _layers(config)
        normalized = config.normalize_before and config.final_norm
        self.layer_norm = nn.LayerNorm(width) if normalized else None
        self.project_out_dim = _projection(width, config.output_size or width)
        self._begin_stack()
        self.post_init()

    def _begin_stack(self) -> None:
        """Let all layers read one ``Given``; share parameters, which are saved once."""
        updating = [a for a in self._attention() if a.update is not None]
        if updating:
            updating[-1].update = None  # no layer reads the states after the last one
        self.given = Given()
        for attention in self._attention():
            attention.given = self.given
        share_across_layers(self)
        self.codes = [part.code for part in self.modules() if isinstance(part, SPE)]
        hold_once(self)

    def _attention(self) -> list[MultiheadAttention]:
        return [layer.self_attn for layer in self.layers]

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embeddings."""
        self.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **unknown: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the features (B, T, C) of the next T tokens.

        Args:
            input_ids: int64 (B, T).
            attention_mask: (B, S), 0 at padding; its last T columns are those of the tokens. None:
                the symbol <pad> is padding, as in fairseq.
            cache, past_key_values: two names of the states of the tokens before, of which
                transformers 5.24 has the first and older releases the second.
            inputs_embeds: (B, T, C), the result of the embeddings, instead of ``input_ids``.
            use_cache: True to make a cache if none is given.
            output_hidden_states: True to return the inputs of all layers and the features.
        Raises: TypeError for unknown arguments, ValueError for arguments that do not fit.
        """
        refuse_unknown("an exported lrpe_fairseq model", unknown, IGNORED)
        cache = one_cache(cache, past_key_values)
        if cache is None and use_cache:
            cache = new_cache()
        if cache is not None and not self.config.causal:
            raise ValueError("a bidirectional encoder has no cache: leave out use_cache")
        past = [None if cache is None else state_layer(cache, i) for i in range(len(self.layers))]
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        call = self._call(input_ids, attention_mask, embedded)
        x = self._embedded(embedded, call, past)
        x, inner = self._through_layers(x.transpose(0, 1).contiguous(), call, past)
        states = tuple(y.transpose(0, 1) for y in inner) if output_hidden_states else None
        found = {CACHE_NAME: cache, "hidden_states": states}
        return BaseModelOutputWithPast(last_hidden_state=x.transpose(0, 1), **found)

    def _call(self, ids: Tensor | None, attention_mask: Tensor | None, embedded: Tensor) -> Call:
        """Return padding and documents of the tokens. embedded: (B, T, C)."""
        if attention_mask is None and ids is not None:
            attention_mask = ids != self.config.pad_token_id
        padding = padding_of(attention_mask, embedded.shape[1])
        starts = None
        if self.config.document_boundary is not None:
            if ids is None:
                raise ValueError("documents begin at a symbol: pass input_ids, not inputs_embeds")
            starts = ids == self.config.document_boundary
        return Call(padding, is_one_sided(padding), starts)

    def _embedded(self, embedded: Tensor, call: Call, past: list[StateLayer | None]) -> Tensor:
        """Return the input of the first layer, (B, T, C)."""
        x = self.embed_scale * embedded
        x = x if self.project_in_dim is None else self.project_in_dim(x)
        if self.embed_positions is not None:
            state = None if past[0] is None else past[0].state
            before = None if state is None else state.next_position
            positions = positions_of(x, call, before)
            if call.padding is not None:  # padding may stand beyond the learned positions
                positions = positions.masked_fill(call.padding, 0)
            x = x + self.embed_positions(positions).to(x)
        x = x if self.layernorm_embedding is None else self.layernorm_embedding(x)
        x = self.dropout(x)
        if not self.config.causal and call.padding is not None:
            x = x * (1 - call.padding.unsqueeze(-1).type_as(x))
        return x

    def _through_layers(
        self, x: Tensor, call: Call, past: list[StateLayer | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the features (T, B, C) of x (T, B, C), and the inputs of all layers with them."""
        self._begin_pass()
        inner = []
        for layer, own in zip(self.layers, past, strict=True):
            inner.append(x)
            x = layer(x, call, own)
        x = x if self.layer_norm is None else self.layer_norm(x)
        x = x if self.project_out_dim is None else self.project_out_dim(x)
        return x, [*inner, x]

    def _begin_pass(self) -> None:
        """Forget states of the pass before; let SPE draw new noise in training."""
        self.given.states = None
        if self.training:
            for code in self.codes:
                code.drawn = None


class LRPEForCausalLM(LRPEPreTrainedModel, GenerationMixin):
    """``lrpe_lm``: a language model that continues texts."""

    auto_class = "AutoModelForCausalLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LRPEConfig) -> None:
        super().__init__(config)
        if not config.causal:
            raise ValueError("a bidirectional encoder is an LRPEForMaskedLM")
        self.model = LRPEModel(config)
        width = config.output_size or config.hidden_size
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=width**-0.5)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the output layer."""
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **unknown: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits (B, T, V) of the tokens after each token; see :class:`LRPEModel`.

        Args:
            labels: int64 (B, T), the tokens themselves, -100 where no loss is wanted.
            logits_to_keep: number of last tokens with logits, or their indices; 0: all.
            num_items_in_batch: what the sum of losses is divided by; None: the number of labels.
        """
        found = self.model(
            input_ids,
            attention_mask=attention_mask,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            **unknown,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        own = {CACHE_NAME: found.get(CACHE_NAME), "hidden_states": found.hidden_states}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **own)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **keywords: Any,
    ) -> Any:
        """Continue texts; see ``GenerationMixin.generate``.

        Raises: ValueError, one sentence, for contrastive search, an assistant, prompt lookup or
            another cache than the dynamic one.
        """
        config = self.generation_config if generation_config is None else generation_config
        refuse_generation(config, keywords)
        return super().generate(inputs, generation_config, **keywords)


class MaskedLMHead(nn.Module):
    """fairseq's head of RoBERTa."""

    def __init__(self, config: LRPEConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.dense = nn.Linear(width, width)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.layer_norm = nn.LayerNorm(width)
        self.weight = nn.Linear(width, config.vocab_size, bias=False).weight
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of features (..., C)."""
        x = self.layer_norm(self.activation(self.dense(x)))
        return F.linear(x, self.weight) + self.bias


class LRPEForMaskedLM(LRPEPreTrainedModel):
    """``lrpe_roberta``: a bidirectional encoder that fills in masked tokens."""

    auto_class = "AutoModelForMaskedLM"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LRPEConfig) -> None:
        super().__init__(config)
        if config.causal:
            raise ValueError("a causal model is an LRPEForCausalLM")
        self.model = LRPEModel(config)
        self.lm_head = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, whose weight is tied to the embeddings."""
        return self.lm_head

    def resize_token_embeddings(self, *given: Any, **keywords: Any) -> nn.Embedding:
        """Resize embeddings that are tied to the head. Raises: ValueError if they are not."""
        if not self.config.tie_word_embeddings:
            raise ValueError(
                "a head that is not tied to the embeddings takes no other vocabulary: make a new "
                "model"
            )
        return super().resize_token_embeddings(*given, **keywords)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unknown: Any,
    ) -> MaskedLMOutput:
        """Compute the logits (B, T, V) of the symbol at each token; see :class:`LRPEModel`.

        Args:
            labels: int64 (B, T), the symbols, -100 where no loss is wanted.
            num_items_in_batch: what the sum of losses is divided by; None: the number of labels.
        """
        found = self.model(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            **unknown,
        )
        logits = self.lm_head(found.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=found.hidden_states)
