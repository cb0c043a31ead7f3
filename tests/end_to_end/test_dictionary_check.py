"""A checkpoint is read with the dictionaries that it was trained with only."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from lrpe_fairseq import dictionaries
from lrpe_fairseq.compat import dictionary_check
from tests.end_to_end.commands import PLUGIN, SMALL, TRAINING, built, configured, save, words
from tests.end_to_end.forked import run_forked

pytestmark = pytest.mark.end_to_end

OURS, OTHERS, FEWER = ([f"{letter}{n}" for n in range(size)] for letter, size in
                       (("w", 20), ("v", 20), ("w", 12)))  # fmt: skip


def folder_of(tmp_path, name, symbols):
    """A data folder that has only a dictionary."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in symbols))
    return folder


def read(checkpoint, data):
    """Read a checkpoint as fairseq-eval-lm does, with the dictionary of ``data``."""
    task = tasks.setup_task(configured(data, TRAINING, SMALL).task)
    return checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], task=task)


RECORDS = {  # of this version and of older ones: key -> the part that it has
    "sides and files": ("dictionaries", {"dict.txt", "source", "target"}),
    "files": ("dictionaries", {"dict.txt"}),
    "sides": ("lrpe_dictionaries", {"source", "target"}),
}


def with_record(path, task, data, kind):
    """Add the record of a version to a checkpoint."""
    key, names = RECORDS[kind]
    every = dictionaries.checksums(data) | dictionary_check.checksums_of_task(task)
    record = {name: checksum for name, checksum in every.items() if name in names}
    assert record.keys() == names
    torch.save({**torch.load(path, weights_only=True), key: record}, path)


@pytest.mark.parametrize(
    ("recorded", "gone"), [*((kind, True) for kind in RECORDS), ("", False), ("", True)]
)
def test_another_dictionary_is_refused_in_one_sentence(tmp_path, recorded, gone):
    """Without a record and the training data, only the number of words can be compared."""
    data = folder_of(tmp_path, "trained", OURS)
    model, task, config = built(data, TRAINING, SMALL)
    path = save(model, config, tmp_path / "model.pt")
    if recorded:
        with_record(path, task, data, recorded)
    same = tmp_path / "moved"
    shutil.move(data, same) if gone else shutil.copytree(data, same)
    assert len(read(path, same)[0]) == 1
    refused = [folder_of(tmp_path, "fewer", FEWER)]
    others = folder_of(tmp_path, "others", OTHERS)
    if recorded or not gone:
        refused.append(others)
    else:
        assert len(read(path, others)[0]) == 1
    for folder in refused:
        with pytest.raises(SystemExit, match=f"dictionary of {folder} is not the one that"):
            read(path, folder)


def test_a_training_records_its_dictionaries_and_its_tools_refuse_others(corpus, tmp_path):
    train = words([corpus.data, TRAINING, SMALL, "--max-update 1 --save-dir", tmp_path])
    assert run_forked("fairseq_cli.train", train).returncode == 0
    last = tmp_path / "checkpoint_last.pt"
    record = torch.load(last, weights_only=True)[dictionaries.KEY]
    assert record.keys() == {"dict.txt", "source", "target"}
    assert len(set(record.values())) == 1  # both sides are the dictionary of the file
    others = tmp_path / "others"
    shutil.copytree(corpus.data, others)
    lines = (others / "dict.txt").read_text().splitlines()
    (others / "dict.txt").write_text("\n".join([*lines[1:], lines[0], ""]))
    for tool, options in (
        ("eval_lm", "--gen-subset test"),
        ("validate", "--task language_modeling --valid-subset valid --max-tokens 128"),
    ):
        line = words([others, f"--user-dir {PLUGIN} --cpu --path", last, options])
        ended = run_forked(f"fairseq_cli.{tool}", line)
        assert ended.returncode == 2
        assert "Traceback" not in ended.stderr
        assert "is not the one that" in ended.stderr.splitlines()[-1]


def test_the_checksum_is_that_of_the_words_without_the_symbols_that_tasks_add():
    dictionary = Dictionary()
    for word in ("a", "b"):
        dictionary.add_symbol(word)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=None)
    of_words = {"source": dictionaries.checksum_of_words(["a", "b"])}
    assert dictionary_check.checksums_of_task(task) == of_words
    dictionary.add_symbol("<mask>")
    assert dictionary_check.checksums_of_task(task) == of_words


def test_the_checksum_depends_on_the_order_of_the_words():
    checksum = dictionaries.checksum_of_words
    assert checksum(["b", "a"]) != checksum(["a", "b"])


def test_a_task_without_dictionaries_has_no_checksums():
    class Task:
        @property
        def source_dictionary(self):
            raise NotImplementedError

    assert dictionary_check.checksums_of_task(Task()) == {}
    assert dictionary_check._checksums_of_data(OmegaConf.create({"task": {"data": None}})) == {}
