"""The floor of angles in a language model's training: its length, its options, its checkpoints."""

import copy
import math
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils

from lrpe_fairseq.encodings import build_encoding
from lrpe_fairseq.encodings.layers import encoding_options
from lrpe_fairseq.encodings.rotations.cores import LearnedRotation
from lrpe_fairseq.errors import ChoiceError, Refusal
from lrpe_fairseq.tasks.synthetic import LRPESyntheticTask
from tests.end_to_end.commands import SMALL, TRAINING, build, hydra, run, saved, yaml_config

pytestmark = pytest.mark.end_to_end

TRAIN = "fairseq_cli.train"
BARE = f"{SMALL} --no-token-positional-embeddings --attention-type linear"
TYPE2 = f"{BARE} --position-encoding lrpe-type2 --angle-floor turn --angle-parameter log"
ONCE = 2 * math.pi / 32
"""One turn in the 32 tokens of TRAINING."""


def angles_of(model):
    return [layer.self_attn.encoding.core.angles.detach() for layer in model.decoder.layers]


def test_the_floor_is_one_turn_in_the_training_blocks_unless_a_length_is_given(corpus):
    for given, length in (("", 32), ("--context-length 1000", 1000)):
        for angles in angles_of(build(corpus, TYPE2, given)[0]):
            assert bool(((angles == 0) | (angles >= 2 * math.pi / length)).all())
            assert float(angles[angles > 0].min()) < 10 * 2 * math.pi / length
            assert bool((angles == 0).any())


def test_a_masked_model_has_the_length_of_the_blocks_of_its_task(corpus):
    task = "--task masked_lm --tokens-per-sample 32 --arch lrpe_roberta_tiny"
    model = build(corpus, task, "--position-encoding lrpe-type2 --angle-floor turn")[0]
    cores = [m for m in model.modules() if isinstance(m, LearnedRotation)]
    assert [int(core.floor.length) for core in cores] == [32] * 3


def test_models_of_tasks_without_training_blocks_need_a_length(capsys):
    """The sequences of a synthetic task are longer in its tests than in training."""
    given = Namespace(angle_floor="turn", context_length=0)
    with pytest.raises(Refusal, match="--angle-floor turn needs --context-length"):
        LRPESyntheticTask.build_model(object.__new__(LRPESyntheticTask), given)
    translation = {"fidelity": "correct", "position_encoding": "rope", "angle_floor": "turn"}
    with pytest.raises(ChoiceError, match="--angle-floor turn needs --context-length"):
        build_encoding("rope", 8, 2, options=encoding_options(Namespace(**translation)))


def test_what_has_no_such_angles_is_refused_in_one_sentence(corpus):
    for name, option in (("fox", "--angle-floor turn"), ("rope", "--angle-parameter log")):
        with pytest.raises(Refusal, match="--angle-") as refused:
            build(corpus, BARE, f"--position-encoding {name}", option)
        assert "\n" not in str(refused.value).strip()
    with pytest.raises(SystemExit):
        build(corpus, BARE, "--position-encoding rope --angle-floor turns")


def test_training_by_yaml_and_by_the_command_line_keeps_the_floor_at_another_length(
    corpus, tmp_path
):
    """A trained model is read with a context 16 times as long, and trained on."""
    by_line, by_yaml = tmp_path / "line", tmp_path / "yaml"
    run(TRAIN, corpus.data, TRAINING, TYPE2, "--max-update 2 --seed 1 --save-dir", by_line)
    model = {
        "decoder_layers": 2,
        **dict.fromkeys(["decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"], 32),
        "decoder_ffn_embed_dim": 64,
        "no_token_positional_embeddings": True,
        "attention_type": "linear",
        "position_encoding": "lrpe-type2",
        "angle_floor": "turn",
        "angle_parameter": "log",
    }
    run("fairseq_cli.hydra_train", *hydra(tmp_path / "conf", yaml_config(corpus, by_yaml, model)))
    for folder in (by_line, by_yaml):
        checkpoint = folder / "checkpoint_last.pt"
        state = saved(checkpoint)["model"]
        for overrides in ({}, {"tokens_per_sample": 512}):
            given = copy.deepcopy(overrides)
            (read,), _ = checkpoint_utils.load_model_ensemble([str(checkpoint)], given)
            for angles, layer in zip(angles_of(read), read.decoder.layers, strict=True):
                assert torch.equal(angles >= ONCE / 2, angles > 0)
                core = layer.self_attn.encoding.core
                assert int(core.floor.length) == 32
                assert bool((angles == 0).any())
        assert any(key.endswith("core.log_theta") for key in state)
    resumed = [corpus.data, TRAINING, TYPE2, "--max-update 3 --seed 1 --save-dir", by_line]
    run(TRAIN, *resumed, "--tokens-per-sample 64 --reset-dataloader")
    state = saved(by_line / "checkpoint_last.pt")["model"]
    assert {int(v) for key, v in state.items() if key.endswith("floor.length")} == {32}
