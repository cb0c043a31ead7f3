"""A training that resumes within an epoch with other batches reads every sample of it once, or is
refused in one sentence; with every task."""

from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from fairseq import tasks

from lrpe_fairseq.compat import resumed_place
from lrpe_fairseq.errors import Refusal
from lrpe_fairseq.tasks import images
from tests.end_to_end.commands import PLUGIN, SMALL, TRAINING, configured, run_here, saved
from tests.end_to_end.every_task import TASKS, data  # noqa: F401  (a fixture)

pytestmark = pytest.mark.end_to_end


class Batches(NamedTuple):
    """What the batches of a training depend on."""

    size: int
    frequency: int
    processes: int = 1
    tokens: int | None = None


ALWAYS, IN_ORDER, NEVER = 2, 1, 0
CASES = {  # before one update, after it, when the training goes on
    "two processes": (Batches(4, 4), Batches(4, 2, 2), ALWAYS),
    "one process": (Batches(4, 2, 2), Batches(4, 4), ALWAYS),
    "half the batch": (Batches(4, 2), Batches(2, 4), IN_ORDER),
    "twice the batch": (Batches(4, 4), Batches(8, 2), IN_ORDER),
    "its halves in processes": (Batches(4, 2), Batches(2, 2, 2), IN_ORDER),
    "three processes for two": (Batches(4, 2, 2), Batches(4, 2, 3), NEVER),
    "a limit of tokens": (Batches(4, 2), Batches(4, 2, tokens=4096), NEVER),
    "twice the update": (Batches(4, 2), Batches(4, 4), ALWAYS),
    "half the update": (Batches(4, 2), Batches(2, 2), IN_ORDER),
}
FEW = ("two processes", "half the batch", "three processes for two", "twice the update")
OTHER_UPDATES = {"twice the update", "half the update"}
IN_UPDATES = {"lrpe_truncated_bptt_lm", "lrpe_images"}  # tasks whose order depends on the update


def prepared(config, batches):
    """The configuration with these batches, and its task."""
    config.distributed_training.distributed_world_size = batches.processes
    config.optimization.update_freq = [batches.frequency]
    config.dataset.batch_size, config.dataset.max_tokens = batches.size, batches.tokens
    config.dataset.required_batch_size_multiple = 1
    for section, name in (
        ("optimization", "update_freq"),
        ("dataset", "batch_size"),
        ("dataset", "required_batch_size_multiple"),
    ):
        if name in config.task:
            config.task[name] = config[section][name]
    task = tasks.setup_task(config.task)
    task.load_dataset("train")
    return SimpleNamespace(cfg=config, task=task)


def iterators(trainer):
    """The iterator of every process, as the trainer makes it."""
    chosen = trainer.cfg.dataset
    processes = trainer.cfg.distributed_training.distributed_world_size
    return [
        trainer.task.get_batch_iterator(
            trainer.task.dataset("train"),
            max_tokens=chosen.max_tokens,
            max_sentences=chosen.batch_size,
            required_batch_size_multiple=chosen.required_batch_size_multiple,
            num_shards=processes,
            shard_id=rank,
            disable_iterator_cache=True,
        )
        for rank in range(processes)
    ]


def read(made, shuffle, stop=None):
    """The samples of the next batches of every process."""
    for iterator in made:
        iterator.next_epoch_itr(shuffle=shuffle)
    rows = [iterator.epoch_batch_sampler.batches[:stop] for iterator in made]
    return [int(sample) for batches in rows for batch in batches for sample in batch]


def resumed(trainer, place, saved_with, shuffle):
    """The samples that a training reads from ``place`` of another one."""
    state = {"train_iterator": {**place, resumed_place.BATCHES: saved_with}}
    state = resumed_place.load_for_these_batches(lambda *_: state, trainer, "checkpoint_last.pt")
    made = iterators(trainer)
    for iterator in made:
        iterator.load_state_dict(state["train_iterator"])
    return read(made, shuffle)


@pytest.mark.parametrize("task", TASKS)
def test_other_batches_read_the_rest_of_the_epoch_or_are_refused(
    task,
    data,  # noqa: F811
    monkeypatch,
):
    config = configured(data(task), f"--user-dir {PLUGIN} --task {task}", TASKS[task])
    cases = CASES if task == "language_modeling" else FEW
    for name, shuffle in product(cases, (True, False)):
        before, after, when = CASES[name]
        monkeypatch.setattr(images, "get_global_world_size", lambda chosen=before: chosen.processes)
        trainer = prepared(config, before)
        made, saved_with = iterators(trainer), resumed_place.batches_in(config)
        every, first = read(made, shuffle), read(iterators(trainer), shuffle, before.frequency)
        made[0]._cur_epoch_itr.n = before.frequency
        place = made[0].state_dict()
        monkeypatch.setattr(images, "get_global_world_size", lambda chosen=after: chosen.processes)
        trainer = prepared(config, after)
        goes_on = when >= (ALWAYS if place["shuffle"] else IN_ORDER)
        if goes_on and not (task in IN_UPDATES and name in OTHER_UPDATES):
            rest = resumed(trainer, place, saved_with, shuffle)
            assert sorted(first + rest) == sorted(every), (name, shuffle)
        else:
            with pytest.raises(Refusal, match=r"resume with .*, or add --reset-dataloader"):
                resumed(trainer, place, saved_with, shuffle)


def test_a_training_refuses_other_batches_until_it_starts_a_new_pass(corpus, tmp_path, capsys):
    train = [corpus.data, TRAINING.replace("--max-tokens 128", ""), SMALL, "--disable-validation"]
    run_here("fairseq_cli.train", *train, "--batch-size 16 --max-update 3 --save-dir", tmp_path)
    other = [*train, "--batch-size 4 --max-update 4 --save-dir"]
    longer = [*train, "--batch-size 16 --tokens-per-sample 16 --max-update 4 --save-dir"]
    for given, said in ((longer, "--tokens-per-sample 32"), (other, "--batch-size 16")):
        with pytest.raises(Refusal):
            run_here("fairseq_cli.train", *given, tmp_path)
        assert f"resume with {said}, or add --reset-dataloader" in capsys.readouterr().err
    last = tmp_path / "checkpoint_last.pt"
    for case in (["--finetune-from-model", last], ["--reset-dataloader --restore-file", last]):
        folder = tmp_path / case[0][2:10]
        run_here("fairseq_cli.train", *other, folder, *case)
        assert saved(folder / last.name)["extra_state"]["train_iterator"]["iterations_in_epoch"]
