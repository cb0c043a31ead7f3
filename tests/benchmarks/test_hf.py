"""The measurements of models in transformers, with tiny models."""

import math

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")
pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.families import GROUPED, build, tokens
from benchmarks.hf import common, generation, lengths, recipes, versions
from lrpe_fairseq.experiments.records.files import write_json
from lrpe_fairseq.hf.cache import CACHE_NAME


def test_perplexities_are_of_the_tokens_between_two_ends():
    losses = torch.tensor([1.0] * 3 + [2.0] * 4)  # of tokens 2 to 8
    assert lengths.perplexities(losses, (4, 8)) == pytest.approx([math.e, math.e**2])
    rows = lengths.rows_of(torch.ones(255), torch.zeros(255))
    assert rows == [{"to": 256, "original": pytest.approx(math.e), "converted": 1.0}]


def test_the_loss_is_that_of_transformers():
    model, block = build("llama"), tokens()
    expected = float(model(block, labels=block).loss)
    assert common.loss(model, block) == pytest.approx(expected, rel=1e-5)


def test_a_training_lowers_the_loss_and_every_block_is_read_once():
    model = build("llama")
    blocks = tokens(1, 16).repeat(40, 1)
    before = common.loss(model, blocks[:1])
    assert common.train(model, blocks, rows=4, rate=3e-3, seed=1) > 0
    assert common.loss(model, blocks[:1]) < before - 0.5


def test_an_interrupted_measurement_continues_with_the_same_settings_only(tmp_path):
    path = tmp_path / "cells.json"
    assert common.cells_of(path, {"updates": 8}) == []
    write_json(path, {"settings": {"updates": 8}, "cells": [{"recipe": "none"}]})
    assert common.cells_of(path, {"updates": 8}) == [{"recipe": "none"}]
    with pytest.raises(SystemExit, match="has other settings"):
        common.cells_of(path, {"updates": 9})


def four_layers():
    torch.manual_seed(0)
    config = LlamaConfig(**{**GROUPED, "num_hidden_layers": 4})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_changes_a_copy_and_is_trained(name):
    model, blocks = four_layers(), tokens(12, 16)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings = {"seeds": 2, "rows": 2, "learning_rate": 1e-2}
    found = recipes.cell(model, name, 2, (blocks[:8], blocks[8:]), settings)
    assert found["recipe"] == name
    assert found["end"] != found["start"]
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    if name == recipes.CONTROL:
        assert found["start"] == pytest.approx(common.loss(model, blocks[8:]), rel=1e-6)


def test_random_caches_continue_as_those_of_a_text_of_that_length():
    for name, model in generation.models(four_layers()).items():
        text = generation.Continuation(model, 9, 3)
        text()
        assert text.tokens.shape == (1, 13), name
        assert text.cache.get_seq_length() == 12
        text()
        assert text.tokens.shape == (1, 16)
        with torch.no_grad():
            step = model(tokens(1, 1), **{CACHE_NAME: text.cache})
        assert step.logits.isfinite().all()


def test_counts_of_tests_are_those_of_the_last_line_of_pytest():
    line = "1 failed, 25 passed, 3 skipped, 2 errors in 2.0s"
    found = {name: versions.count_of(line, name) for name in versions.COUNTS}
    assert found == {"passed": 25, "failed": 1, "errors": 2, "skipped": 3}
