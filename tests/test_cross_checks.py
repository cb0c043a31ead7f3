"""A run file that was edited carelessly is refused with one sentence that names the field."""

import copy

import pytest

from lrpe_fairseq.experiments.records.runs import environment, validate, write_run
from tests.test_experiments import a_record

BLOCKS = {"loss": 6.0, "ppl": 64.0, "tokens": 1000, "word_ppl": 2**12.0}  # 500 words
POINT = {"updates": 450, "tokens": 9000, "valid_ppl": 64.1}
RUN = a_record(
    metrics={"valid": {"blocks": BLOCKS, "sliding": {**BLOCKS, "loss": 5.0, "ppl": 32.0,
             "word_ppl": 2**10.0}}},
    protocol={"blocks": "blocks.", "sliding": "windows."},
    config={"common.seed": 1, "task._name": "language_modeling", "model.attention_type": "linear",
            "model.position_encoding": "none", "optimization.max_update": 900},
    evaluated_update=450,
    curve=[POINT, {"updates": 900, "tokens": 18000, "valid_ppl": 70.0}],
)  # fmt: skip
EDITS = {
    "metrics valid blocks ppl": (46.0, r"valid\.blocks\.ppl is 46\.0, not 2 to its loss of 6\.0"),
    "metrics valid blocks loss": (6.1, r"valid\.blocks\.ppl is 64\.0, not 2 to its loss of 6\.1"),
    "metrics valid sliding ppl": (32.2, r"valid\.sliding\.ppl is 32\.2"),
    "metrics valid blocks word_ppl": (4069.0, r"valid\.blocks\.word_ppl is 4069\.0"),
    "metrics valid blocks tokens": (1001, r"valid\.blocks\.word_ppl|different tokens"),
    "seed": (2, "'seed' is 2, but its config has common.seed 1"),
    "config common.seed": (3, "'seed' is 1, but its config has common.seed 3"),
    "task": (
        "masked_lm",
        "'task' is 'masked_lm', but its config has task._name 'language_modeling'",
    ),
    "attention_type": ("softmax", "'attention_type' is 'softmax', but its config"),
    "position_encoding": ("rope", "'position_encoding' is 'rope', but its config"),
    "evaluated_update": (4500, "'evaluated_update' goes to update 4500, .*max_update 900"),
    "config optimization.max_update": (800, "'curve' goes to update 900, .*max_update 800"),
    "curve 0 tokens": (90000, "tokens of the run's field 'curve' do not ascend"),
    "curve 0 valid_ppl": (46.1, r"'curve' has perplexity 46\.1 .* valid\.blocks\.ppl is 64\.0"),
}


@pytest.mark.parametrize("where", EDITS)
def test_a_careless_edit_is_refused_by_the_name_of_the_field(where):
    value, said = EDITS[where]
    run = copy.deepcopy(RUN)
    validate(run)
    *path, last = (int(key) if key.isdigit() else key for key in where.split())
    place = run
    for key in path:
        place = place[key]
    place[last] = value
    with pytest.raises(ValueError, match=said) as refused:
        validate(run)
    assert "\n" not in str(refused.value)


def test_protocols_of_one_split_count_the_same_tokens():
    run = copy.deepcopy(RUN)
    run["metrics"]["valid"]["sliding"] = {"ppl": 32.0, "tokens": 999}
    with pytest.raises(ValueError, match="valid counts different tokens"):
        validate(run)


def test_the_half_of_a_model_whose_encoding_was_edited_is_named():
    sides = {"encoder": "rope", "decoder": "none"}
    config = {f"model.{side}.position_encoding": name for side, name in sides.items()}
    validate(a_record(position_encoding=sides, config=config))
    config["model.encoder.position_encoding"] = "spe"
    said = r"'position_encoding' is 'rope', but its config has model\.encoder"
    with pytest.raises(ValueError, match=said):
        validate(a_record(position_encoding=sides, config=config))


def test_a_run_file_says_which_kernels_ran_and_that_is_an_object(tmp_path):
    kernels = environment()["kernels"]
    assert kernels
    assert all(isinstance(text, str) and text for text in kernels.values())
    write_run(tmp_path / "run.json", {**RUN, "kernels": kernels})
    with pytest.raises(ValueError, match="'kernels' must be an object, not str"):
        validate({**RUN, "kernels": "fast"})
