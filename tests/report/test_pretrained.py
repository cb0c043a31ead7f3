"""The measured parts of docs/huggingface.md."""

import json

import pytest

from lrpe_fairseq.experiments.report import pretrained

STATED = {
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "hardware": {"cpu": "a CPU", "gpus": []},
    "threads": 1,
    "commit": "0123456789abcdef",
}
CONTROL, NONE = "unchanged (control)", "none"
CELLS = [
    {"recipe": CONTROL, "seed": 1, "start": 3.5, "end": 3.25, "hours": 0.5},
    {"recipe": NONE, "seed": 1, "start": 5.5, "end": 4.5, "hours": 0.5},
    {"recipe": CONTROL, "seed": 2, "start": 3.5, "end": 3.0, "hours": 0.25},
]
RECIPES = {
    "settings": {
        "updates": 8,
        "rows": 2,
        "tokens": 256,
        "validation_blocks": 8,
        "learning_rate": 1e-4,
    },
    "cells": CELLS,
}
OWN = {
    "settings": {
        "updates": 90,
        "updates_before": 1800,
        "length": 128,
        "blocks": 20,
        "rows": 8,
        "learning_rate": 1e-3,
    },
    "cells": [{"recipe": "rope", "seed": 1, "perplexity": {"128": 50.04, "2048": 99.0}}],
}


def part(root, name, measured):
    folder = root / pretrained.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"hf-{name}.json").write_text(json.dumps({**STATED, **measured}))
    return pretrained.parts(root)[name]


def test_a_part_without_a_file_refers_to_one_list_with_its_command(tmp_path):
    found = pretrained.parts(tmp_path)
    listed = found.pop("missing")
    assert set(found.values()) == {pretrained.MISSING}
    heading, empty, *lines = listed.splitlines()
    assert (heading, empty) == ("## Not measured yet", "")
    assert [line.split(":")[0] for line in lines] == [f"- {name}" for name in found]
    part(tmp_path, "own", OWN)
    assert "benchmarks.hf.own" not in pretrained.parts(tmp_path)["missing"]
    assert pretrained._missing([]) == ""


def test_every_part_ends_with_versions_hardware_and_commit(tmp_path):
    text = part(tmp_path, "own", OWN)
    assert text.endswith("torch 2.13.0, transformers 5.24.0, a CPU, 1 thread, commit 01234567.")


def test_losses_of_recipes_stand_beside_the_control_of_the_same_seed(tmp_path):
    text = part(tmp_path, "recipes", RECIPES)
    assert f"| {CONTROL} | 3.500 / 3.500 | 3.250 / 3.000 | – | 0.75 |" in text
    assert "| none | 5.500 | 4.500 | +1.250 | 0.50 |" in text  # its second seed is missing
    assert "8 updates of 2 x 256 tokens of a book, 4,096 in all" in text
    assert "2,048 tokens of validation" in text


def test_perplexities_of_a_model_of_ours_stand_by_context(tmp_path):
    text = part(tmp_path, "own", OWN)
    assert "| recipe | 128 tokens | 2,048 tokens |" in text
    assert "| rope | 50.0 | 99.0 |" in text
    assert "than 5 % above that at 128 tokens, for each seed: none." in text


def test_a_recipe_is_level_where_no_seed_rises_with_the_context(tmp_path):
    def cell(recipe, seed, last):
        return {"recipe": recipe, "seed": seed, "perplexity": {"128": 100.0, "2048": last}}

    cells = [cell("gates", 1, 105.0), cell("gates", 2, 90.0), cell("yarn", 1, 99.0)]
    text = part(tmp_path, "own", {**OWN, "cells": [*cells, cell("yarn", 2, 106.0)]})
    assert "for each seed: gates." in text


def test_perplexities_by_position_name_their_tokens(tmp_path):
    rows = [
        {"to": 256, "original": 30.0, "converted": 30.0},
        {"to": 10240, "original": 20.5, "converted": 20.5},
    ]
    text = part(tmp_path, "lengths", {"rows": rows, "largest_difference": 1.5e-5})
    assert "| 257 to 10,240 | 20.500 | 20.500 |" in text
    assert "more than 1.5e-05 nats" in text


def test_speeds_have_a_ratio_with_quartiles(tmp_path):
    row = {"attention": "softmax", "length": 8192, "tokens_per_second": 5.04, "ratio": 0.8}
    text = part(tmp_path, "generation", {"rows": [{**row, "quartiles": [0.7, 0.9]}]})
    assert "| softmax | 8,192 | 5.0 | 0.80 | 0.70 to 0.90 |" in text


def test_a_metric_that_a_model_lacks_is_a_dash(tmp_path):
    rows = {"a": {"metrics": {"lines bits_per_byte": 1.5}}, "b": {"metrics": {"niah 256": 1.0}}}
    text = part(tmp_path, "harness", {"rows": rows, "settings": {"limit": 2, "length": 256}})
    assert "| lines bits_per_byte | 1.5000 | – |" in text
    assert "| niah 256 | – | 1.0000 |" in text
    assert text.splitlines()[-3] == "2 examples of a task; those of RULER have 256 tokens."


def test_minutes_of_the_installation_are_those_of_pip_and_of_the_text(tmp_path):
    seconds = {"build": 9.0, "environment": 9.0, "install": 60.0, "generate": 30.0}
    found = {"text": "The war\nbegan", "torch": "2.14.1", "transformers": "5.24.0"}
    text = part(tmp_path, "installation", {"seconds": seconds, **found})
    assert text.startswith("1.5 minutes: 60 seconds")
    assert "“The war began”. The new environment got torch 2.14.1 and transformers 5.24.0" in text


@pytest.mark.parametrize("count", [1, 2])
def test_versions_have_a_row_each(tmp_path, count):
    rows = [
        {"transformers": f"5.{n}.0", "passed": 9, "failed": 0, "errors": 0, "skipped": 1}
        for n in range(count)
    ]
    text = part(tmp_path, "versions", {"rows": rows, "settings": {"tests": ["convert"]}})
    assert text.count("| 9 | 0 | 1 |") == count
    assert "tests/hf/test_convert.py" in text
