"""A checkpoint is evaluated with the words of its training, wherever it and its data lie."""

import shutil

import pytest

from lrpe_fairseq import dictionaries
from lrpe_fairseq.experiments.commands import eval_lm
from lrpe_fairseq.experiments.records import checkpoints
from tests.end_to_end.commands import SMALL, TRAINING, run, saved
from tests.trial import checkpoint

WORDS, OTHERS = ("a 3\nb 2\n", "a 3\nc 2\n")
"""Two dictionaries of equal size."""
DATA, RUN = "data/mine/bin", "runs/mine"


def written(folder, text):
    """A dictionary in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dict.txt").write_text(text)
    return folder / "dict.txt"


def trained(folder, save_dir=RUN, data=DATA, **more):
    """A checkpoint of a training that was started in ``folder`` and reads its data there."""
    written(folder / DATA, WORDS)
    cfg = {"task": {"data": str(data)}, "checkpoint": {"save_dir": str(save_dir)}}
    return checkpoint(folder / RUN / "checkpoint_best.pt", 5, cfg=cfg, **more)


def compared(path, dictionary, embedding="not compared"):
    """Whether a dictionary is taken, and whether only its size was compared."""
    said: list[str] = []
    same = checkpoints.same_dictionary(path, embedding, dictionary, say=said.append)
    assert all("only the number of words" in sentence for sentence in said)
    return same, bool(said)


@pytest.mark.parametrize(
    ("save_dir", "started"), [(RUN, "."), (f"./{RUN}/", "."), ("mine", "runs"), (".", RUN)]
)
def test_relative_data_of_a_training_are_found_from_where_it_was_started(
    tmp_path, monkeypatch, save_dir, started
):
    monkeypatch.chdir("/")
    path = trained(tmp_path, save_dir)
    written(tmp_path / DATA, "")
    written(tmp_path / started / DATA, WORDS)
    assert compared(path, written(tmp_path / "same", WORDS)) == (True, False)
    assert compared(path, written(tmp_path / "other", OTHERS)) == (False, False)


@pytest.mark.parametrize("save_dir", ["elsewhere", "../runs/mine", "/absolute", ""])
def test_of_a_checkpoint_that_was_moved_the_data_are_sought_from_where_the_user_stands(
    tmp_path, monkeypatch, save_dir
):
    path = trained(tmp_path, save_dir)
    same, other = (written(tmp_path / name, text) for name, text in (("s", WORDS), ("o", OTHERS)))
    monkeypatch.chdir("/")
    assert compared(path, other) == (True, True)
    monkeypatch.chdir(tmp_path)
    assert compared(path, other) == (False, False)
    assert compared(path, same) == (True, False)


def test_a_dictionary_is_not_compared_with_itself(tmp_path):
    path = trained(tmp_path)
    written(tmp_path / DATA, OTHERS)  # prepared again
    (tmp_path / "link").symlink_to(tmp_path / DATA)
    for folder in (DATA, "link"):
        assert compared(path, tmp_path / folder / "dict.txt") == (True, True)


def test_words_that_a_checkpoint_records_are_compared_also_if_the_data_were_prepared_again(
    tmp_path,
):
    record = {dictionaries.KEY: {"dict.txt": dictionaries.checksum(written(tmp_path, WORDS))}}
    path = trained(tmp_path, **record)
    assert compared(path, tmp_path / DATA / "dict.txt") == (True, False)
    assert compared(path, written(tmp_path / DATA, OTHERS)) == (False, False)


def test_words_that_an_older_checkpoint_records_by_side_are_compared(tmp_path):
    record = {dictionaries.SIDES_KEY: {"target": dictionaries.checksum(written(tmp_path, WORDS))}}
    path = trained(tmp_path, **record)
    (tmp_path / DATA / "dict.txt").unlink()  # only the record says which words these are
    same = written(tmp_path / "same", WORDS)
    other = written(tmp_path / "other", OTHERS)
    assert compared(path, same, "decoder.embed_tokens.weight") == (True, False)
    assert compared(path, other, "decoder.embed_tokens.weight") == (False, False)


def test_dictionaries_of_inputs_and_labels_have_the_names_of_their_folders(tmp_path):
    for name in (".", "input0", "label", "too/deep"):
        written(tmp_path / name, WORDS)
    found = dictionaries.checksums(tmp_path)
    assert found.keys() == {"dict.txt", "input0/dict.txt", "label/dict.txt"}
    assert dictionaries.checksums(tmp_path / "absent") == {}


@pytest.mark.end_to_end
def test_a_training_of_fairseq_records_its_words_and_others_of_equal_size_are_refused(
    corpus, tmp_path
):
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(corpus.data, data / "bin")
    model = "--attention-type linear --position-encoding rope --max-update 1 --save-dir"
    run("fairseq_cli.train", data / "bin", TRAINING, SMALL, model, folder)
    path = folder / "checkpoint_best.pt"
    record = saved(path)[dictionaries.KEY]
    assert record.items() >= dictionaries.checksums(corpus.data).items()
    first, second, *rest = (data / "bin" / "dict.txt").read_text().splitlines()
    (data / "bin" / "dict.txt").write_text("\n".join([second, first, *rest, ""]))
    with pytest.raises(ValueError, match=r"is not the dictionary that .* was trained with"):
        eval_lm.evaluate_lm(path, data, ["test"])
