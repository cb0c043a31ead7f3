"""The configurations of scale `paper` train with their whole vocabularies, on generated text.

One block of text is a batch here, of 4,096 tokens or more in the configuration: a CPU computes
4 x 10^12 operations of such an update in minutes, and its memory grows with the batch by
activations only.
"""

import random

import pytest

from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.files import CONFIGS, load_config
from lrpe_fairseq.experiments.runner import arithmetic, estimate, identity
from lrpe_fairseq.experiments.runner.devices import BIN, Devices, hydra_override
from tests.end_to_end.commands import run

SPECIAL = 4
TEXTS = {"train": 30, "valid": 2}  # lines
SHORT = {
    "optimization.max_update": "2",
    "optimization.update_freq": "[1]",
    "dataset.max_tokens": "512",
    "dataset.required_batch_size_multiple": "1",
    "dataset.num_workers": "0",
    "dataset.disable_validation": "true",
    "checkpoint.no_save": "true",
    "common.tensorboard_logdir": "null",
    "common.log_interval": "1",
    "distributed_training.distributed_world_size": "1",
}


@pytest.fixture
def data(tmp_path):
    """A function of the number of words: a binarized text with a dictionary of that size."""

    def generated(words):
        rng, folder = random.Random(0), tmp_path / "data"
        known = [f"w{n}" for n in range(words - SPECIAL)]
        (tmp_path / "dict.txt").write_text("".join(f"{word} 1\n" for word in known))
        for split, size in TEXTS.items():
            lines = (" ".join(rng.choices(known, k=100)) for _ in range(size))
            (tmp_path / split).write_text("\n".join(lines) + "\n")
        files = [word for split in TEXTS for word in (f"--{split}pref", tmp_path / split)]
        given = ["--only-source --workers 1 --srcdict", tmp_path / "dict.txt", "--destdir", folder]
        run("fairseq_cli.preprocess", *files, *given)
        return folder

    return generated


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("folder", "name", "words"),
    [("lm", "wikitext103", "wikitext-103-word"), ("roberta", "pretrain", "wikitext-103-gpt2")],
)
def test_a_paper_configuration_trains_with_its_whole_vocabulary(
    folder, name, words, data, tmp_path
):
    words = arithmetic.WORDS[words]
    chosen = {**SHORT, "task.data": str(data(words)), "checkpoint.save_dir": str(tmp_path / "c")}
    command = [str(BIN / "fairseq-hydra-train"), "--config-dir", str(CONFIGS / folder)]
    command += ["--config-name", name, *(hydra_override(*pair) for pair in chosen.items())]
    log = tmp_path / "log"
    status, peak = estimate._resources(command, Devices(), log)
    assert status == 0, fairseq_log.last_line(log)
    assert max(fairseq_log.read_training_log(log).inner) == 2
    options = identity.options(identity.resolved(load_config(CONFIGS / folder / f"{name}.yaml")))
    short = {**options, "dataset.max_tokens": 512, "optimization.update_freq": [1]}
    shape = arithmetic.shape_of(short, words)
    assert fairseq_log.million_parameters(log) == pytest.approx(shape.parameters / 1e6, rel=0.02)
    program = 0.5e9  # Python with torch and fairseq
    expected = arithmetic.memory(short, shape, "fp32", 1) + program
    print(f"{name}: peak {peak / 1e9:.2f} GB, arithmetic {expected / 1e9:.2f} GB")
    assert expected / 1.5 < peak < expected * 1.5
