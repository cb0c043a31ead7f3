"""A training that was interrupted and resumed is the uninterrupted one: the samples of every update
and the weights, with every task, to the bit."""

from functools import partial
from unittest import mock

import pytest
import torch
from fairseq.trainer import Trainer

from lrpe_fairseq.compat import batch_order
from tests.end_to_end.cases import sampled
from tests.end_to_end.commands import (
    PLUGIN,
    assert_same,
    run_here,
    saved,
    side_by_side,
    small_transformer,
    words,
)
from tests.end_to_end.every_task import TASKS, data  # noqa: F401  (a fixture)
from tests.end_to_end.forked import run_forked

pytestmark = pytest.mark.end_to_end

DECODER = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16"
ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16"
LM = f"{DECODER} --decoder-input-dim 16 --decoder-output-dim 16 --criterion cross_entropy"
MORE = {  # batches such that an epoch has a few updates, and a small model
    "language_modeling": f"{LM} --batch-size 32",
    "lrpe_truncated_bptt_lm": f"{LM} --batch-size 24 --attention-type softmax "
    "--position-encoding transformer-xl --memory-length 8 --no-token-positional-embeddings",
    "masked_lm": f"{ENCODER} --criterion masked_lm --batch-size 32",
    "translation": f"{small_transformer(1, 16, 16)} --batch-size 128",
    "sentence_prediction": f"{ENCODER} --batch-size 12",
    "lrpe_classification": f"{ENCODER} --criterion lrpe_classification --batch-size 12",
    "lrpe_images": f"{ENCODER} --criterion lrpe_classification",
    "lrpe_synthetic": f"{LM} --batch-size 64",
    "lrpe_transduction": f"{small_transformer(1, 16, 16)} --batch-size 64",
}
TRAIN = (
    f"--user-dir {PLUGIN} --optimizer adam --lr 1e-2 --required-batch-size-multiple 1 --cpu "
    "--disable-validation --no-last-checkpoints --save-interval-updates 1 --log-format none"
)
REBUILT = "--update-epoch-batch-itr True"
EVERY = [(task, more) for task in TASKS for more in ("", REBUILT)]
VARIED = [
    ("language_modeling", "--curriculum 1"),
    ("language_modeling", "--curriculum 2"),
    ("language_modeling", f"--curriculum 1 {REBUILT}"),
    ("language_modeling", "--update-ordered-indices-seed"),
    ("language_modeling", f"--update-ordered-indices-seed {REBUILT}"),
    ("language_modeling", "--update-freq 2,1 --batch-size 16"),
    ("language_modeling", "--skip-remainder-batch"),
    ("language_modeling", "--sample-break-mode eos --batch-size 150"),
    ("translation", "--grouped-shuffling"),
    ("lrpe_classification", "--random-batches"),
    ("lrpe_classification", f"--curriculum 1 --random-batches {REBUILT}"),
    ("masked_lm", "--num-workers 1"),
    ("masked_lm", "--num-workers 2 --data-buffer-size 0"),
    ("masked_lm", f"--num-workers 1 {REBUILT}"),
    ("lrpe_classification", "--num-workers 1"),
    ("lrpe_images", "--num-workers 1"),
]
DEFAULT = [
    *((task, "") for task in TASKS),
    ("language_modeling", REBUILT),
    ("language_modeling", "--curriculum 1"),
    ("language_modeling", "--update-ordered-indices-seed"),
    ("masked_lm", "--num-workers 1"),
]
END = 17  # updates: in the third epoch, or a later one


def command(task, folder, more=""):
    """The command line that trains a task on its data in ``folder``."""
    workers = "" if "--num-workers" in more else "--num-workers 0"
    return [folder, f"--task {task}", TASKS[task], TRAIN, MORE[task], workers, more]


def trained(given, folder, end, start=None):
    """Train to update ``end``, from the checkpoint ``start`` if given: the samples of each update.

    A checkpoint of every update stays in ``folder``.
    """
    read, step = [], Trainer.train_step

    def spy(trainer, samples, *rest, **keywords):
        read.append([sample["id"].tolist() for sample in samples])
        return step(trainer, samples, *rest, **keywords)

    restored = ["--restore-file", start] if start else []
    with mock.patch.object(Trainer, "train_step", spy):
        run_here("fairseq_cli.train", *given, "--max-update", end, "--save-dir", folder, *restored)
    return read


def checkpoints(folder):
    """The checkpoint of every update, within an epoch and at its end, and the ends."""
    within = {int(path.stem.split("_")[2]): path for path in folder.glob("checkpoint_*_*.pt")}
    ends = {
        saved(path)["optimizer_history"][-1]["num_updates"]: path
        for path in folder.glob("checkpoint[0-9]*.pt")
    }
    return within | ends, sorted(ends)


@pytest.mark.parametrize(("task", "more"), sampled([*EVERY, *VARIED], DEFAULT))
def test_a_resumed_training_reads_the_samples_of_the_uninterrupted_one_to_the_same_weights(
    task,
    more,
    data,  # noqa: F811
    tmp_path,
):
    given = command(task, data(task), more)
    every = trained(given, tmp_path / "whole", END)
    assert len(every) == END
    whole, ends = checkpoints(tmp_path / "whole")
    second, third = ends[0] + 1, ends[1] + 1
    assert third < ([*ends[2:], END])[0]
    begun, again, later = tmp_path / "begun", tmp_path / "again", tmp_path / "later"
    # within the second epoch, and once more within the third
    assert trained(given, begun, third, whole[second]) == every[second:third]
    assert trained(given, again, END, checkpoints(begun)[0][third]) == every[third:]
    # between two epochs
    assert trained(given, later, END, whole[ends[1]]) == every[ends[1] :]
    for folder in (again, later):
        assert_same(saved(checkpoints(folder)[0][END])["model"], saved(whole[END])["model"])


def trained_by_two(given, folder, end, start=None):
    """As :func:`trained`, by two processes that communicate through gloo; nothing is returned."""
    group = folder.with_name(f"{folder.name}-group")
    restored = ["--restore-file", start] if start else []
    ours = [*given, "--max-update", end, "--save-dir", folder, *restored]
    ours += ["--distributed-world-size 2 --distributed-backend gloo --distributed-no-spawn"]
    ours += [f"--ddp-backend legacy_ddp --distributed-init-method file://{group}"]
    ranks = [words([*ours, "--distributed-rank", rank]) for rank in range(2)]
    for done in side_by_side(*(partial(run_forked, "fairseq_cli.train", rank) for rank in ranks)):
        assert done.returncode == 0, done.stdout + done.stderr


TOGETHER = [("language_modeling", ""), ("lrpe_truncated_bptt_lm", "")]


@pytest.mark.parametrize(("task", "more"), sampled(EVERY, TOGETHER))
def test_two_processes_that_resume_reach_the_weights_of_the_uninterrupted_training(
    task,
    more,
    data,  # noqa: F811
    tmp_path,
):
    given = command(task, data(task), more)
    trained_by_two(given, tmp_path / "whole", END)
    whole, ends = checkpoints(tmp_path / "whole")
    assert ends[0] < 5
    assert len(ends) > 1
    for number, update in enumerate((ends[0] + 1, ends[1])):
        trained_by_two(given, tmp_path / str(number), END, whole[update])
        resumed, _ = checkpoints(tmp_path / str(number))
        assert_same(saved(resumed[END])["model"], saved(whole[END])["model"])


def test_a_checkpoint_without_a_record_resumes_as_if_it_had_never_been_interrupted(
    data,  # noqa: F811
    tmp_path,
):
    given = command("language_modeling", data("language_modeling"), "--curriculum 1")
    every = trained(given, tmp_path / "whole", END)
    whole, ends = checkpoints(tmp_path / "whole")
    for update in (ends[0] + 1, ends[1]):
        state = saved(whole[update])
        place = state["extra_state"]["train_iterator"]
        assert place.pop(batch_order.BUILT) == 1
        place["shuffle"] = True  # what fairseq records in an epoch after those of --curriculum
        torch.save(state, tmp_path / "old.pt")
        resumed = trained(given, tmp_path / str(update), END, tmp_path / "old.pt")
        assert resumed == every[update:]


def test_the_rest_of_an_epoch_is_read_when_batches_are_rebuilt_from_now_on_or_no_longer(
    data,  # noqa: F811
    tmp_path,
):
    folder = data("language_modeling")
    for before, after in (("", REBUILT), (REBUILT, "")):
        given = command("language_modeling", folder, before)
        every = trained(given, tmp_path / f"whole{before}", END)
        whole, ends = checkpoints(tmp_path / f"whole{before}")
        first, end = ends[0] + 1, ends[1]
        given = command("language_modeling", folder, after)
        begun, again = tmp_path / f"begun{before}", tmp_path / f"again{before}"
        read = trained(given, begun, END, whole[first])
        assert read[: end - first] == every[first:end]
        third = checkpoints(begun)[0][end + 1]
        assert trained(given, again, END, third) == read[end + 1 - first :]
