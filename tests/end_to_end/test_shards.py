"""Training over shards: each epoch reads its own, a resumed training goes on in the right one."""

import random
from pathlib import Path
from unittest import mock

import pytest
from fairseq.data import data_utils

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data.folders import data_home, joined_shards
from lrpe_fairseq.experiments.families.lm import PretrainingRun
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.files import CONFIGS, read_json
from tests.end_to_end.commands import PLUGIN, assert_same, last_loss, run_here, saved
from tests.trial import trial

pytestmark = pytest.mark.end_to_end

LINES = (40, 60)
UPDATES = 12  # about five of the first shard, five of the second, and two of the first again
TRAIN = (
    f"--user-dir {PLUGIN} --task masked_lm --tokens-per-sample 32 --criterion masked_lm "
    "--sample-break-mode complete --arch lrpe_roberta_tiny --encoder-layers 1 "
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --attention-type linear "
    "--position-encoding lrpe-tmlr-type2 --attention-normalizer layernorm --optimizer adam "
    "--lr 1e-2 --max-tokens 128 --num-workers 0 --cpu --log-format simple --no-epoch-checkpoints "
    "--update-epoch-batch-itr True"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two shards of other lengths, with one dictionary; only the first validates."""
    folder, rng = tmp_path_factory.mktemp("shards"), random.Random(0)
    (folder / "dict.txt").write_text("".join(f"w{number} 1\n" for number in range(20)))
    for number, lines in enumerate(LINES):
        texts = {"train": folder / f"train{number}", "valid": folder / f"valid{number}"}
        for split, path in texts.items():
            size = lines if split == "train" else 10
            path.write_text("".join(f"{' '.join(_words(rng))}\n" for _ in range(size)))
        prep.write_binary(texts, folder / "bin" / f"shard{number}", folder / "dict.txt")
    return folder


def _words(rng):
    return [f"w{rng.randrange(20)}" for _ in range(rng.randint(5, 12))]


def trained(data, folder, ends):
    """Train to each of ``ends`` as a new training that resumes; the checkpoint and shards read."""
    read: dict[str, list[str]] = {"train": [], "valid": []}
    load = data_utils.load_indexed_dataset

    def spy(path, *rest, **keywords):
        read[Path(path).name].append(Path(path).parent.name)
        return load(path, *rest, **keywords)

    with mock.patch.object(data_utils, "load_indexed_dataset", spy):
        for end in ends:
            words = [joined_shards(data), TRAIN, f"--max-update {end}", "--save-dir", folder]
            run_here("fairseq_cli.train", *words)
    assert set(read["valid"]) == {"shard0"}
    return folder / "checkpoint_last.pt", read["train"]


def test_each_epoch_reads_its_own_shard_in_a_resumed_training_as_in_the_uninterrupted_one(
    data, tmp_path
):
    whole, shards = trained(data, tmp_path / "whole", (UPDATES,))
    assert shards == ["shard0", "shard1", "shard0"]
    resumed, shards = trained(data, tmp_path / "resumed", (UPDATES // 2 + 1, UPDATES))
    assert shards == ["shard0", "shard1", "shard1", "shard0"]
    assert last_loss(whole) == last_loss(resumed)
    for state in (saved(whole), saved(resumed)):
        assert state["extra_state"]["train_iterator"]["epoch"] == 3
    assert_same(saved(resumed)["model"], saved(whole)["model"])


def test_a_run_trains_over_the_shards_and_is_validated_on_the_first(data, tmp_path):
    made = trial(tmp_path, PretrainingRun, config="pretrain-small", data=data)
    assert made.chosen()["task.data"] == joined_shards(data)
    assert f"++task.data={joined_shards(data)}" in made.command()
    assert str(data / "bin" / "shard0") in made.validation(made.task, "valid")
    assert set(made.data_checksums()) == {"train", "valid", "dictionary"}


def test_the_dictionary_of_shards_is_remembered_as_that_of_one_folder(data, tmp_path):
    checkpoints.remember_dictionaries(tmp_path, data)
    assert read_json(tmp_path / checkpoints.DICTIONARIES).keys() == {"dict.txt"}


def test_a_configuration_that_names_shards_keeps_them_until_data_are_prepared(tmp_path):
    data = data_home(PLANNED)
    assert data == Path("data/wikibook")
    given = {"config": "pretrain-wikibook", "data": CONFIGS.parent / data, "scale": "paper"}
    made = trial(tmp_path, PretrainingRun, **given)
    if not (CONFIGS.parent / data / "bin").exists():
        assert made.chosen()["task.data"] == made.settings().task.data == PLANNED


PLANNED = ":".join(f"data/wikibook/bin/shard{number}" for number in range(8))
