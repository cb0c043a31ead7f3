"""The order of batches after a resumption: that of an uninterrupted training.

fairseq makes the batches of a training once, for epoch 1 (``seed + 1`` decides which samples come
together), keeps them, and shuffles them anew in every epoch. It also keeps the data loader: whether
it shuffles, and the epoch that its worker processes know, stay as in epoch 1. A training that
resumes in epoch 2 makes other batches, for epoch 2, and skips as many of them as the first training
had read of its own.

Here the checkpoint records the epoch that its batches were made for (:data:`BUILT`) and whether its
loader shuffles, and a resumed training makes the same batches and the same loader. Checkpoints
without a record are taken to come from a training that was never interrupted.

Batches that are not kept are made anew in every epoch, so that they need no record: those of
``--update-epoch-batch-itr True``, of sharded data, and of datasets whose ``ordered_indices`` depend
on the epoch.

The first argument of each replacement is the function of fairseq that it replaces.
"""

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fairseq import trainer
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks import FairseqTask

from lrpe_fairseq.compat.patching import replace_method

logger = logging.getLogger(__name__)

BUILT = "built_epoch"
"""Key of the state of an iterator in a checkpoint: the epoch that its batches were made for."""

_PLACE = "_resumed_place"
"""Attribute of a trainer between loading a checkpoint and making the iterator that it resumes."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint was saved in the data, and how its batches were made.

    epoch: the epoch that is resumed. read: batches of it that each process has read. built: the
    epoch that the batches were made for. shuffle: whether the resumed epoch is shuffled if its
    loader is its own; shuffle_kept: if it is that of earlier epochs. seed_shift: what is added to
    the seed of the resumed epoch to get that of the batches.
    """

    epoch: int
    read: int
    built: int
    shuffle: bool
    shuffle_kept: bool
    seed_shift: int = 0


_RESUMED = ContextVar[Place | None]("resumed place", default=None)
"""Set while the first training iterator after a resumption is made."""


def resume_in_the_same_order() -> None:
    """Read the rest of an epoch, and all later ones, in the order of an uninterrupted training.

    Break: a training that resumes in epoch 2 or later without ``--update-epoch-batch-itr True``
    makes other batches than the training that was interrupted, skips as many as that had read of
    its own, and so reads samples twice and leaves others out.
    """
    replace_method(EpochBatchIterator, "__init__", record_epoch)
    replace_method(EpochBatchIterator, "state_dict", state_of_iterator)
    replace_method(trainer.Trainer, "get_train_iterator", train_iterator)
    replace_method(FairseqTask, "get_batch_iterator", batch_iterator)


def origin(cfg: Any) -> dict[str, Any]:
    """Return what a checkpoint without :data:`BUILT` says of its batches by its configuration.

    kept: whether an uninterrupted training keeps the batches of epoch 1, if its dataset allows
    it. curriculum: the epochs at the start that are not shuffled.
    """
    task = cfg["task"]
    data = task.get("data") if hasattr(task, "get") else getattr(task, "data", None)
    rebuilt = cfg["dataset"].get("update_epoch_batch_itr", False)
    # several folders are shards, of which every epoch reads another one
    return {
        "kept": not rebuilt and os.pathsep not in str(data or ""),
        "curriculum": cfg["dataset"].get("curriculum", 0),
    }


def remember(trainer: Any, state: dict[str, Any], saved_by: dict[str, Any]) -> None:
    """Let the next training iterator of ``trainer`` continue from ``state``.

    state: of the iterator, from the checkpoint. saved_by: the :func:`origin` of the checkpoint.
    """
    epoch = state["epoch"]
    shuffle = state.get("shuffle", True)
    if BUILT in state:
        built = state[BUILT]
        shuffle_kept = shuffle
    else:
        # older checkpoints: what a training does that was never interrupted
        built = 1 if saved_by["kept"] else epoch
        shuffle_kept = built > saved_by["curriculum"]
    shifts = trainer.cfg.dataset.update_ordered_indices_seed  # adds the epoch to the seed
    place = Place(
        epoch=epoch,
        read=state.get("iterations_in_epoch", 0),
        built=built,
        shuffle=shuffle,
        shuffle_kept=shuffle_kept,
        seed_shift=built - epoch if shifts else 0,
    )
    setattr(trainer, _PLACE, place)


def record_epoch(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Construct an ``EpochBatchIterator`` that knows the epoch it was made for."""
    original(self, *args, **kwargs)
    self.built_epoch = self.epoch  # ``epoch`` itself goes on


def state_of_iterator(original: Callable, self: Any) -> dict[str, Any]:
    """Return the state of an ``EpochBatchIterator`` with :data:`BUILT`.

    ``shuffle`` is what the loader does. In fairseq it is what was asked for in this epoch, which a
    loader of an earlier epoch ignores.
    """
    state = original(self)
    state[BUILT] = self.built_epoch
    sampler = getattr(self, "epoch_batch_sampler", None)
    if sampler is not None:
        state["shuffle"] = sampler.shuffle
    return state


def train_iterator(original: Callable, self: Any, *args: Any, **options: Any) -> Any:
    """Return ``Trainer.get_train_iterator``; after a resumption, as the first training made it."""
    place = vars(self).pop(_PLACE, None)
    # not resumed, or the iterator of a later epoch
    if place is None:
        return original(self, *args, **options)
    if options.get("load_dataset", True) and not self.task.has_sharded_data("train"):
        # an uninterrupted training loads data that are not sharded once, for epoch 1
        logger.info("loading train data for epoch 1")
        self.task.load_dataset(
            self.cfg.dataset.train_subset,
            epoch=1,
            combine=options.get("combine", True),
            data_selector=options.get("data_selector"),
            tpu=self.tpu,
        )
        options["load_dataset"] = False
    # the task makes the iterator, and is not told what for
    resumed = _RESUMED.set(place)
    try:
        iterator = original(self, *args, **options)
    finally:
        _RESUMED.reset(resumed)
    _restore_loader(self, iterator, place)
    return iterator


def batch_iterator(original: Callable, self: Any, dataset: Any, *args: Any, **options: Any) -> Any:
    """Return ``FairseqTask.get_batch_iterator``, with the batches of the epoch in :data:`BUILT`."""
    place = _RESUMED.get()
    if place is not None and self.can_reuse_epoch_itr(dataset):
        rebuilt = options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr")
        if place.read or not rebuilt:
            options["epoch"] = place.built
            options["seed"] = options["seed"] + place.seed_shift
    return original(self, dataset, *args, **options)


def _restore_loader(trainer: Any, iterator: Any, place: Place) -> None:
    """Give ``iterator`` the loader that the resumed training had, if it has one for all epochs.

    Trap: worker processes that persist do not learn of later epochs. They are started while the
    dataset is in the epoch that the batches were made for.
    """
    kept = iterator in trainer.task.dataset_to_epoch_iter.values()
    ends = place.read >= len(iterator)  # fairseq refuses such a place unless it makes the loader
    one_loader = getattr(iterator, "reuse_dataloader", False)
    resumes_within = kept or place.read
    if not one_loader or not resumes_within or ends:
        return
    iterator._get_iterator_for_epoch(
        iterator.built_epoch,
        place.shuffle_kept if kept else place.shuffle,
        fix_batches_to_gpus=trainer.cfg.distributed_training.fix_batches_to_gpus,
    )
    if kept and iterator.persistent_workers:
        iter(iterator.dataloader)  # starts the workers
    iterator.dataset.set_epoch(place.epoch)  # for samples that depend on the epoch
    if callable(iterator.batch_sampler):  # batches of every epoch
        iterator._frozen_batches = None
