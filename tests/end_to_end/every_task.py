"""Data and options of every task of this package, and of the tasks of fairseq that it trains."""

import shutil

import pytest

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples, synthetic, transduction
from lrpe_fairseq.experiments.data.examples import BYTES, Examples
from tests.test_data_prep import load
from tests.test_images import write_class_folders

TASKS = {
    "language_modeling": "--arch lrpe_lm_tiny --tokens-per-sample 32",
    "lrpe_truncated_bptt_lm": "--arch lrpe_lm_tiny --tokens-per-sample 32",
    "masked_lm": "--arch lrpe_roberta_tiny --tokens-per-sample 32",
    "translation": "--arch lrpe_transformer_tiny -s en -t de",
    "sentence_prediction": "--arch lrpe_roberta_tiny --num-classes 3 "
    "--criterion sentence_prediction",
    "lrpe_classification": "--arch lrpe_classifier_tiny --num-classes 3",
    "lrpe_images": "--arch lrpe_vit_tiny --num-classes 2 --image-size 32 --no-augmentation "
    "--curriculum 9 --batch-size 4 --repeats 2 --update-freq 2",
    "lrpe_synthetic": "--arch lrpe_lm_tiny",
    "lrpe_transduction": "--arch lrpe_transformer_tiny -s source -t target",
}


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory):
    """A function that returns the data of a task."""
    folder = tmp_path_factory.mktemp("data")

    def copied(task):
        return corpus.data

    def paired(task):
        for side in ("en", "de"):
            shutil.copy(corpus.data / "dict.txt", folder / f"dict.{side}.txt")
            for kind in ("bin", "idx"):
                shutil.copy(corpus.data / f"train.{kind}", folder / f"train.en-de.{side}.{kind}")
        return folder

    def classes(task):
        rows = Examples([[n, 2 * n] for n in range(1, 60)], [n % 3 for n in range(1, 60)])
        steps = prep.Steps(folder / task, "test", "bytes")
        every = dict.fromkeys(prep.SPLITS, rows)
        examples.prepare(steps, {}, lambda: every, symbols=BYTES, classes=3)
        return folder / task / "bin"

    def drawn(task):
        write_class_folders(folder / "given", count=60)
        given = ["--dest", folder / task, "--from", folder / "given", "--any-images"]
        assert load("imagenet").main(list(map(str, given))) == 0
        return folder / task / "bin"

    def generated(task):
        if task == "lrpe_synthetic":
            synthetic.prepare(folder / task, synthetic.Recipe("mqar", "tiny"))
        else:
            transduction.prepare(folder / task, transduction.Recipe("tree-copy", "tiny", "depth"))
        return folder / task / "bin"

    made = {"translation": paired, "sentence_prediction": classes, "lrpe_classification": classes}
    made |= {"lrpe_images": drawn, "lrpe_synthetic": generated, "lrpe_transduction": generated}
    return lambda task: made.get(task, copied)(task)
