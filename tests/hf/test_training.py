"""Exported and converted models in ``transformers.Trainer``."""

import copy

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import MODELS, build
from lrpe_fairseq import hf
from tests.hf.models import exported, random_words

SMOOTHED = 0.1


def smoothed_loss(model, tokens, folder):
    """The loss that Trainer computes with label smoothing."""
    arguments = transformers.TrainingArguments(
        str(folder), label_smoothing_factor=SMOOTHED, use_cpu=True, report_to=[]
    )
    trainer = transformers.Trainer(model, arguments)
    return trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens})


def expected_loss(model, tokens):
    """The smoothed loss of every token after the tokens before it."""
    logs = model(tokens).logits[:, :-1].log_softmax(-1)
    of_labels = -logs.gather(-1, tokens[:, 1:, None]).mean()
    return (1 - SMOOTHED) * of_labels - SMOOTHED * logs.mean()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["exported", *MODELS])
def test_label_smoothing_reads_the_next_token(kind, tmp_path):
    model = copy.deepcopy(exported().model) if kind == "exported" else hf.convert(build(kind))
    tokens = random_words(2, 12)
    loss = smoothed_loss(model.eval(), tokens, tmp_path)
    torch.testing.assert_close(loss, expected_loss(model, tokens), rtol=1e-5, atol=1e-5)


def test_classes_of_transformers_are_found_beside_those_of_this_package(tmp_path):
    stock = AutoModelForCausalLM.from_config(MODELS["llama"].config())
    assert type(stock) is transformers.LlamaForCausalLM
    for model in (exported().model, hf.convert(stock)):
        model.save_pretrained(tmp_path / type(model).__name__)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / type(model).__name__)
        assert type(loaded) is type(model)
        assert type(AutoConfig.from_pretrained(loaded.name_or_path)) is type(model.config)
