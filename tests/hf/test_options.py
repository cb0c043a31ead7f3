"""Every option of ``lrpe_lm`` and ``lrpe_roberta`` that changes a model's function."""

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import copy
from argparse import Namespace

import torch
import transformers
from fairseq import tasks
from omegaconf import OmegaConf
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from benchmarks.families import build
from lrpe_fairseq import hf
from lrpe_fairseq.attention.linear import NORMALIZERS
from lrpe_fairseq.attention.parts import PARTS
from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.models.language_model import LRPELanguageModel
from tests.end_to_end.commands import save
from tests.hf.models import (
    GREEDY,
    aligned,
    disturb,
    exported,
    exported_masked,
    in_float64,
    language_model,
    padded_left,
    random_words,
)

STACK = {
    "attention_type": "linear,softmax",
    "position_encoding": "fox,rope",
    "attention_window": "0,5",
    "decoder_layers": 3,
}
LINEAR = {"attention_type": "linear", "position_encoding": "lrpe-type2"}
SOFTMAX = {"attention_type": "softmax", "position_encoding": "rope"}
OPTIONS = {
    "learned positions": {"decoder_learned_pos": True},
    "no positions": {"no_token_positional_embeddings": True},
    "post-norm": {"decoder_normalize_before": False},
    "no final norm": {"no_decoder_final_norm": True},
    "embedding norm": {"layernorm_embedding": True},
    "embeddings as they are": {"no_scale_embedding": True},
    "untied": {"share_decoder_input_output_embed": False},
    "narrow embeddings": {"decoder_input_dim": 16, "decoder_output_dim": 16},
    "other output": {
        "decoder_input_dim": 16,
        "decoder_output_dim": 24,
        "share_decoder_input_output_embed": False,
    },
    **{f"activation {name}": {"activation_fn": name} for name in ("gelu", "gelu_fast", "tanh")},
    "activation linear": {"activation_fn": "linear"},
    **{f"normalizer {name}": {**LINEAR, "attention_normalizer": name} for name in NORMALIZERS},
    **{f"part {part}": {**LINEAR, "attention_parts": part} for part in PARTS},
    "parts of softmax": {**SOFTMAX, "attention_parts": "qk-norm,output-gate"},
    "linear window": {**LINEAR, "attention_window": "4", "attention_normalizer": "content"},
    "softmax window": {**SOFTMAX, "attention_window": "4"},
    "stack": STACK,
    "grouped queries": {**SOFTMAX, "kv_heads": 1},
    "grouped queries of linear attention": {**LINEAR, "kv_heads": 1, "head_dim": 24},
    "no bias of the output": {**SOFTMAX, "out_bias": False, "score_scale": 0.1},
    "published": {**SOFTMAX, "position_encoding": "t5", "fidelity": "published"},
    "another seed": {**LINEAR, "position_encoding": "spe", "encoding_seed": 3},
    "shared parameters": {**SOFTMAX, "position_encoding": "fire", "fire_shared": True},
    "options of rotations": {
        **SOFTMAX,
        "rotation_base": 100.0,
        "rotation_fraction": 0.5,
        "context_scaling": "yarn",
        "context_factor": 4.0,
        "context_length": 8,
    },
    **{
        f"{kind} of learned angles": {
            **SOFTMAX,
            "position_encoding": "lrpe-type2",
            "rotation_spectrum": kind,
            "rotation_fraction": 0.5,
            **more,
        }
        for kind, more in {"turns": {"context_length": 32}, "proportional": {}}.items()
    },
    "rate of angles": {**LINEAR, "angle_lr_scale": 4.0},
    "grid": {**SOFTMAX, "position_grid": "axial", "grid_width": 4},
    "checkpointed": {**LINEAR, "checkpoint_activations": True},
    "layerdrop": {**LINEAR, "decoder_layerdrop": 0.2},
    "begin with <s>": {**LINEAR, "add_bos_token": True},
}
DOCUMENTS = {
    "linear": {**LINEAR, "decoder_learned_pos": True},
    "softmax": {**SOFTMAX, "position_encoding": "t5"},
    "gates": {"attention_type": "softmax", "position_encoding": "fox", "attention_window": "3"},
}


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_option_of_the_language_model_is_exported(options):
    made, tokens = exported(**options), random_words(2, 12)
    tokens[1, 8:] = 1  # <pad>
    real = tokens != 1
    expected = made.fairseq(tokens)[0][real]
    torch.testing.assert_close(aligned(made.model)(tokens).logits[real], expected, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "lrpe-type1", "lrpe-type2"])
@pytest.mark.parametrize(
    "options",
    [{"angle_floor": "turn"}, {"angle_floor": "clip"}, {"rotation_spectrum": "turns"}],
    ids=lambda options: "-".join(map(str, options.items())),
)
def test_a_model_trained_further_at_another_length_keeps_its_angles(name, options, tmp_path):
    given = {**SOFTMAX, "position_encoding": name, "rotation_fraction": 0.5, **options}
    given |= {} if "rotation_spectrum" in options else {"rotation_fraction": 1.0}
    first, _, _ = language_model(**given, context_length=16)
    built, config, _ = language_model(**given, context_length=64)
    later = copy.deepcopy(built)
    later.load_state_dict(first.state_dict())
    hf.export(save(later, config, tmp_path / "checkpoint.pt"), tmp_path / "out", tokenizer="none")
    tokens = random_words(2, 12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = first(tokens)[0]
    torch.testing.assert_close(aligned(model)(tokens).logits, expected, rtol=0, atol=0)


def test_an_option_of_training_is_refused_in_a_configuration_and_a_conversion():
    own = {"attention_type": "linear", "position_encoding": "lrpe-type2", "angle_lr_scale": 4.0}
    with pytest.raises(ChoiceError, match="angle_lr_scale is for fairseq's optimizers: leave it"):
        hf.LRPEConfig(num_hidden_layers=1, attention=[own])
    with pytest.raises(ChoiceError, match="angle_lr_scale is for fairseq's optimizers: leave it"):
        hf.convert(build("llama"), **own)


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_padded_batch_decodes_as_it_does_without_a_cache(options):
    model, rows = exported(**options).model, [random_words(1, n, seed=n)[0] for n in (8, 3)]
    tokens, mask = padded_left(rows)
    cached, plain = (
        model.generate(tokens, attention_mask=mask, use_cache=use, num_beams=2, **GREEDY)
        for use in (True, False)
    )
    assert torch.equal(cached, plain)


@torch.no_grad()
@pytest.mark.parametrize("options", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_begin_at_their_symbol_in_blocks_and_in_decoding(options):
    made, tokens = exported(**options, document_boundary="</s>"), random_words(2, 12)
    tokens[0, [0, 5, 6]] = tokens[1, 4] = 2  # </s>
    assert made.model.config.document_boundary == 2
    expected = made.fairseq(tokens)[0]
    torch.testing.assert_close(aligned(made.model)(tokens).logits, expected, rtol=0, atol=0)
    model, cache, found = in_float64(made.model), None, []
    for block in tokens.split([3, 1, 1, 3, 4], 1):
        out = model(block, use_cache=True, past_key_values=cache)
        cache = out.get("cache", out.get("past_key_values"))
        found.append(out.logits)
    whole = model(tokens).logits
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-8, atol=1e-9)


@torch.no_grad()
def test_the_parts_of_normformer_are_exported(tmp_path):
    """fairseq builds them if the options are a namespace, as those of older checkpoints."""
    _, config, _ = language_model(**SOFTMAX)
    own = OmegaConf.to_container(config.model, resolve=True, enum_to_str=True)
    own |= {f"scale_{part}": True for part in ("attn", "fc", "heads", "resids")}
    task = tasks.setup_task(config.task)
    model = LRPELanguageModel.build_model(Namespace(**own), task).eval()
    disturb(model)
    assert any(name.endswith("w_resid") for name in model.state_dict())
    hf.export(save(model, config, tmp_path / "c.pt"), tmp_path / "out", tokenizer="none")
    tokens = random_words(2, 9)
    found = aligned(hf.LRPEForCausalLM.from_pretrained(tmp_path / "out").eval())(tokens).logits
    torch.testing.assert_close(found, model(tokens)[0], rtol=0, atol=0)


MASKED = {
    "linear": {"attention_type": "linear", "position_encoding": "lrpe-type2"},
    "softmax": {"attention_type": "softmax", "position_encoding": "t5"},
    "without positions": {"attention_type": "softmax", "no_token_positional_embeddings": True},
    "sinusoids": {"attention_type": "linear", "encoder_learned_pos": False},
    "pre-norm": {"attention_type": "softmax", "encoder_normalize_before": True},
    "untied": {"attention_type": "linear", "untie_weights_roberta": True},
    "no embedding norm": {"attention_type": "softmax", "layernorm_embedding": False},
    "states": {"attention_type": "softmax", "position_encoding": "tape"},
}


@torch.no_grad()
@pytest.mark.parametrize("options", MASKED.values(), ids=MASKED)
def test_an_exported_roberta_has_the_logits_of_fairseq_bit_for_bit(options):
    made, tokens = exported_masked(**options), random_words(2, 12)
    tokens[1, 8:] = 1
    real = tokens != 1
    expected = made.fairseq(tokens)[0][real]
    found = aligned(made.model)(tokens, attention_mask=real.long()).logits[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_bidirectional_encoder_has_no_cache():
    with pytest.raises(ValueError, match="a bidirectional encoder has no cache"):
        exported_masked(**MASKED["softmax"]).model.model(random_words(1, 4), use_cache=True)


def test_a_masked_model_learns_the_same_if_transformers_trainer_accumulates_gradients(tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    labels = random_words(8, 12)
    rows = [{"input_ids": row, "labels": row.clone()} for row in labels]
    for length, row in enumerate(rows, 2):  # other numbers of labels in each batch
        row["labels"][length:] = -100

    def step(batches):
        """The parameters and the loss after an update of 8 rows, in so many batches."""
        model = copy.deepcopy(exported_masked(**MASKED["softmax"]).model)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=8 // batches,
            gradient_accumulation_steps=batches,
            max_steps=1,
            learning_rate=1.0,
            optim="sgd",
            max_grad_norm=0.0,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        loss = transformers.Trainer(model, arguments, train_dataset=rows).train().training_loss
        return list(model.parameters()), loss

    (whole, loss), (accumulated, same) = step(1), step(4)
    assert same == pytest.approx(loss, rel=1e-4)
    for one, other in zip(whole, accumulated, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_loss_of_a_masked_model_is_the_mean_over_its_labels_without_a_count():
    model, labels = exported_masked(**MASKED["softmax"]).model, random_words(2, 12)
    labels[:, 5:] = -100
    out = model(random_words(2, 12, seed=1), labels=labels)
    expected = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss, expected)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_texts_of_the_longest_length_may_be_padded_with_learned_positions(causal):
    kind = hf.LRPEForCausalLM if causal else hf.LRPEForMaskedLM
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    own = {"absolute_positions": "learned", "max_position_embeddings": 9, "causal": causal}
    model = kind(hf.LRPEConfig(intermediate_size=16, **sizes, **own)).eval()
    words = random_words(2, 9)
    alone = model(words).logits
    for sides in ((0, 4), (4, 0)):
        padded = torch.nn.functional.pad(words, sides, value=1)
        found = model(padded, attention_mask=(padded != 1).long()).logits
        real = found[:, sides[0] : sides[0] + 9]
        torch.testing.assert_close(real, alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="learned positions for 9 tokens: cut longer texts"):
        model(random_words(2, 10))


def test_an_untied_head_of_masked_tokens_is_not_resized():
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = hf.LRPEConfig(causal=False, tie_word_embeddings=False, **sizes)
    with pytest.raises(ValueError, match="no other vocabulary: make a new model"):
        hf.LRPEForMaskedLM(config).resize_token_embeddings(30)
