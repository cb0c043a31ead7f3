"""Converted models with the attention of transformers again."""

import copy

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
from transformers import AutoModelForCausalLM

from benchmarks.families import MODELS, build, difference, tokens
from lrpe_fairseq import hf
from lrpe_fairseq.errors import ChoiceError
from tests.hf.models import Adapted, exported, subclassed


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_folded_back_is_saved_to_the_files_of_the_original(name, tmp_path):
    original = build(name)
    model = hf.fold_back(hf.convert(copy.deepcopy(original)))
    assert type(model) is type(original)
    assert difference(original, model, tokens()) == 0
    assert not model.base_model._forward_pre_hooks
    for each, folder in ((original, "one"), (model, "two")):
        each.save_pretrained(tmp_path / folder)
    written = {path.name for path in (tmp_path / "two").iterdir()}
    assert written == {path.name for path in (tmp_path / "one").iterdir()}
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_what_was_trained_after_the_conversion_is_folded_back(name, tmp_path):
    model = hf.convert(build(name), layers=[0, 2]).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    model.eval()
    before = model(tokens()).logits
    stock = hf.fold_back(model)
    torch.testing.assert_close(stock(tokens()).logits, before, rtol=1e-4, atol=5e-6)
    stock.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert difference(stock, loaded, tokens()) == 0


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_frozen_weights_stay_frozen(name):
    model = build(name).requires_grad_(False)
    before = sum(p.requires_grad for p in model.parameters())
    model = hf.convert(model)
    assert before == sum(p.requires_grad for p in model.parameters()) == 0


def test_a_model_is_converted_and_folded_back_again_and_again():
    model = build("llama")
    for _ in range(2):
        model = hf.fold_back(hf.convert(model))
    assert difference(model, build("llama"), tokens()) == 0
    prompt = tokens(length=9)
    said = [m.generate(prompt, max_new_tokens=5) for m in (model, build("llama"))]
    assert torch.equal(*said)


def test_other_attention_is_not_folded_back_and_the_model_stays_as_it_was():
    model = hf.convert(build("llama"), layers=[0])
    hf.convert(model, layers=[1, 2], position_encoding="none")
    before = model(tokens()).logits
    with pytest.raises(ChoiceError, match="layers 1, 2 have another attention"):
        hf.fold_back(model)
    torch.testing.assert_close(model(tokens()).logits, before, rtol=0, atol=0)
    assert model.config.lrpe.keys() == {"0", "1", "2"}
    for other in (build("llama"), exported().model):
        with pytest.raises(ChoiceError, match="is no converted model"):
            hf.fold_back(other)


@pytest.mark.parametrize("adapted", [Adapted, subclassed])
def test_adapters_are_not_folded_back_and_the_model_stays_as_it_was(adapted):
    model = hf.convert(build("llama"))
    attention = model.model.layers[1].self_attn.attention
    attention.v_proj = adapted(attention.v_proj)
    before = model(tokens()).logits
    with pytest.raises(ChoiceError, match="merge the adapters first"):
        hf.fold_back(model)
    torch.testing.assert_close(model(tokens()).logits, before, rtol=0, atol=0)
