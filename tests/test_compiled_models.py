"""Whole models of fairseq and of transformers under torch.compile: one graph, results of eager."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from omegaconf import OmegaConf
from torch._dynamo.exc import Unsupported

from lrpe_fairseq.models.language_model import LRPELanguageModel, LRPELanguageModelConfig
from lrpe_fairseq.models.masked_lm import LRPERobertaConfig, LRPERobertaModel
from lrpe_fairseq.models.translation import LRPETransformer, LRPETransformerTinyConfig
from tests.test_classifier import model_of as classifier


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def task():
    torch.manual_seed(0)
    words = Dictionary()
    for index in range(40):
        words.add_symbol(f"w{index}")
    return SimpleNamespace(source_dictionary=words, target_dictionary=words, dictionary=words)


def language_model(attention_type, name, **more):
    shape = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_embed_dim": 32}
    shape |= {f"decoder_{part}_dim": 32 for part in ("embed", "input", "output")}
    chosen = {"attention_type": attention_type, "position_encoding": name}
    lengths = {"tokens_per_sample": 64, "max_target_positions": 64}
    flags = {"add_bos_token": False, "tpu": False, "dropout": 0.0, **more}
    config = LRPELanguageModelConfig(**chosen, **shape, **lengths, **flags)
    return LRPELanguageModel.build_model(config, task()).double()


def roberta(attention_type, name, **more):
    shape = {"encoder_layers": 2, "encoder_attention_heads": 2, "max_positions": 64}
    shape |= {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 32}
    chosen = {"attention_type": attention_type, "position_encoding": name}
    config = LRPERobertaConfig(**chosen, **shape, **more)
    return LRPERobertaModel.build_model(config, task()).double().eval()


def transformer(**options):
    config = OmegaConf.structured(LRPETransformerTinyConfig(**options))
    words = task().source_dictionary
    languages = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    config = OmegaConf.create({"model": config}).model  # its interpolations start at "model"
    return LRPETransformer.build_model(config, languages).double()


BUILDERS = {
    "lm": language_model,
    "roberta": roberta,
    "transformer": transformer,
    "classifier": classifier,
}


def assert_one_graph(model, *inputs, fullgraph=True):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    results = []
    for function in (model, compiled):
        model.zero_grad()
        torch.manual_seed(1)  # of dropout
        out = function(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        out.square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([out.detach(), *(g.clone() for g in grads)])
    for found, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model", ["linear lrpe-type2", "softmax rope"])
def test_a_step_of_a_language_model_is_one_graph(model, padded):
    """fairseq itself reads if a batch has padding, which no compiler can trace."""
    built = language_model(*model.split())
    text = torch.randint(4, 40, (2, 20))
    if padded:
        text[1, 15:] = 1
    assert_one_graph(built, text)


@pytest.mark.parametrize("checkpoint_activations", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        "lm linear lrpe-type2",
        "lm softmax fox",
        "lm linear path",
        "roberta softmax t5",
        "classifier",
        "transformer",
    ],
)
def test_a_step_with_dropout_is_one_graph(model, checkpoint_activations):
    """Also if activations are computed again; the recomputation drops the same numbers."""
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    options = {"checkpoint_activations": checkpoint_activations, **rates}
    text = torch.randint(4, 40, (2, 20))
    text[1, 15:] = 1
    arch, *chosen = model.split()
    inputs = (text, text.ne(1).sum(1), text) if arch == "transformer" else (text,)
    assert_one_graph(BUILDERS[arch](*chosen, **options).train(), *inputs)


def test_noise_of_training_and_recomputed_activations_are_several_graphs():
    """A layer of SPE draws its noise, which a recomputation in a graph must not do again."""
    text = torch.randint(4, 40, (2, 20))
    model = language_model("softmax", "spe", checkpoint_activations=True).train()
    assert_one_graph(model, text, fullgraph=False)
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="side effect"):
        assert_one_graph(model, text)


@pytest.mark.parametrize("model", ["linear rope", "softmax t5"])
def test_a_padded_step_of_roberta_is_one_graph(model):
    text = torch.randint(4, 40, (2, 20))
    text[1, 15:] = 1
    assert_one_graph(roberta(*model.split()), text)


def test_a_compiled_step_stores_no_mask_of_its_relu():
    """Inductor's masks cost a CPU more than the activation; see ``layers.on_rows``."""
    model = language_model("softmax", "rope").float()
    text = torch.randint(4, 40, (2, 20))
    numbers = text.numel() * model.decoder.layers[0].fc1.out_features

    def is_mask(tensor):
        return tensor.dtype == torch.bool and tensor.numel() == numbers

    masks = []

    def keep(tensor):
        masks.append(is_mask(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        torch.compile(model, fullgraph=True)(text)[0].sum().backward()
    assert len(masks) > 10
    assert not any(masks)
