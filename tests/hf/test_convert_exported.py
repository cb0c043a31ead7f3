"""``convert`` of an exported model: other attention in its layers, with its weights."""

import copy

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
from transformers import AutoModelForCausalLM

from lrpe_fairseq import hf
from lrpe_fairseq.errors import ChoiceError
from tests.hf.models import (
    GREEDY,
    Adapted,
    exported,
    exported_masked,
    random_words,
    subclassed,
)

ROPE = {"attention_type": "softmax", "position_encoding": "rope"}


def copied(**options):
    return copy.deepcopy(exported(**options).model)


@torch.no_grad()
def change_of_logits(model, other):
    words = random_words(2, 24)
    return float((model(words).logits - other(words).logits).abs().max())


@pytest.mark.parametrize(
    "options", [ROPE, {"position_encoding": "lrpe-type2", "attention_type": "linear"}]
)
def test_without_options_an_exported_model_computes_what_it_did_before(options):
    model = copied(**options)
    changed = hf.convert(copy.deepcopy(model))
    assert change_of_logits(model, changed) == 0
    assert changed.lm_head.weight is changed.model.embed_tokens.weight


def test_open_gates_and_weak_reflections_start_near_the_model():
    model = copied(**ROPE)
    for options in (
        {"position_encoding": "gated:rope", "fox_bias": 14.0},
        {"position_encoding": "gated:path:rope", "fox_bias": 14.0, "path_bias": -14.0},
    ):
        assert change_of_logits(model, hf.convert(copy.deepcopy(model), **options)) < 1e-3
    for options in (
        {"position_encoding": "none"},
        {"attention_type": "linear", "normalizer": "content"},
        {"position_encoding": "gated:rope", "fox_bias": 0.0},
        {"context_scaling": "linear", "context_factor": 4.0},
    ):
        assert change_of_logits(model, hf.convert(copy.deepcopy(model), **options)) > 1e-2


def test_learned_angles_are_kept_under_gates():
    model = copied(attention_type="linear", position_encoding="lrpe-type2")
    changed = hf.convert(
        copy.deepcopy(model), position_encoding="gated:lrpe-type2", fox_bias=14.0, layers=[1]
    )
    assert change_of_logits(model, changed) < 1e-3
    theta = [m.model.layers[1].self_attn.encoding.core.theta for m in (model, changed)]
    assert torch.equal(*theta)


def test_parameters_that_layers_share_are_kept_when_the_first_layer_changes():
    shared = {"attention_type": "softmax", "position_encoding": "fire", "fire_shared": True}
    model = copied(**shared, fire_length=8)
    changed = hf.convert(copy.deepcopy(model), layers=[0], position_encoding="none")
    own = [dict(m.model.layers[1].self_attn.encoding.named_parameters()) for m in (model, changed)]
    assert own[0].keys() == own[1].keys()
    for name, parameter in own[0].items():
        assert torch.equal(parameter, own[1][name]), name


def test_only_named_layers_change_and_the_model_is_saved_and_generates(tmp_path):
    model = hf.convert(copied(**ROPE), layers=[1], attention_type="linear", normalizer="content")
    assert [own["attention_type"] for own in model.config.attention] == ["softmax", "linear"]
    prompt = random_words(1, 6)
    cached, plain = (model.generate(prompt, use_cache=use, **GREEDY) for use in (True, False))
    assert torch.equal(cached, plain)
    model.save_pretrained(tmp_path)
    assert change_of_logits(model, AutoModelForCausalLM.from_pretrained(tmp_path)) == 0
    hf.convert(model, attention_type="softmax", position_encoding="none")
    assert {own["position_encoding"] for own in model.config.attention} == {"none"}


def test_refused_options_leave_an_exported_model_as_it_was():
    model = copied(**ROPE)
    before = copy.deepcopy(model)
    for message, options in {
        "unknown position encoding": {"position_encoding": "rop"},
        "no encoding has the option 'fox_bia'": {"position_encoding": "fox", "fox_bia": 3.0},
        "the model has layers 0 to 1": {"layers": [2]},
    }.items():
        with pytest.raises(ChoiceError, match=message):
            hf.convert(model, **options)
    assert change_of_logits(model, before) == 0
    with pytest.raises(ChoiceError, match="cannot be converted"):
        hf.convert(copy.deepcopy(exported_masked().model))


@pytest.mark.parametrize("adapted", [Adapted, subclassed])
@pytest.mark.parametrize(
    "place", ["lm_head", "model.layers.0.fc1", "model.layers.1.self_attn.q_proj"]
)
def test_adapters_are_refused_because_their_weights_would_be_lost(place, adapted):
    model = copied(**ROPE)
    parent, _, name = place.rpartition(".")
    parent = model.get_submodule(parent)
    setattr(parent, name, adapted(getattr(parent, name)))
    before = copy.deepcopy(model)
    with pytest.raises(ChoiceError, match="merge the adapters first"):
        hf.convert(model, layers=[0])
    assert change_of_logits(model, before) == 0


def test_weights_that_the_options_remove_are_no_adapters():
    options = {"attention_type": "linear", "position_encoding": "fox"}
    model = copied(**options, attention_normalizer="layernorm")
    assert any(".norm." in name for name in model.state_dict())
    hf.convert(model, position_encoding="rope", normalizer="content")
    assert not any(".norm." in name for name in model.state_dict())


@pytest.mark.parametrize("options", [{}, {"position_encoding": "rope"}])
def test_frozen_weights_stay_frozen(options):
    model = copied(attention_type="linear", position_encoding="lrpe-type2").requires_grad_(False)
    model.lm_head.requires_grad_(True)  # and the embeddings, which are tied to it
    hf.convert(model, layers=[1], **options)
    learned = [name for name, own in model.named_parameters() if own.requires_grad]
    assert learned == ["model.embed_tokens.weight"]


def test_new_weights_of_a_frozen_model_learn():
    model = copied(attention_type="linear", position_encoding="lrpe-type2").requires_grad_(False)
    hf.convert(model, position_encoding="gated:lrpe-type3", layers=[1])
    learned = {name for name, own in model.named_parameters() if own.requires_grad}
    assert learned
    assert all(name.startswith("model.layers.1.self_attn.encoding.") for name in learned)
