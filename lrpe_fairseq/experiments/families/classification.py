"""Classification runs: :class:`TrainingRun` scored by accuracy."""

import filecmp
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data import folders
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner.processes import Shell, written_by
from lrpe_fairseq.experiments.runner.training import TrainingRun

ACCURACY = "accuracy"
"""The protocol, and its first metric."""
ON = f"{ACCURACY}-on-"
"""Followed by a data folder: the protocol of other data with the same dictionaries."""
CHOSEN = "The checkpoint is the one with the best validation accuracy."


@dataclass(frozen=True)
class ClassificationRun(TrainingRun):
    """The training and evaluation of one classifier."""

    configs: ClassVar[str] = "classification"
    data_scripts: ClassVar[Mapping[str, str]] = {
        "digits": "data-prep/digits/prepare.py",
        "mnist5k-14": "data-prep/mnist5k/prepare.py --size 14",
        "mnist5k-28": "data-prep/mnist5k/prepare.py --size 28",
        "mnist": "data-prep/mnist5k/prepare.py --whole",
        "listops-20-100": "data-prep/listops/prepare.py --length 20-100",
        "listops-100-400": "data-prep/listops/prepare.py --length 100-400",
        "listops": "data-prep/listops/prepare.py --length 500-2000",
        "sst2-bytes": "data-prep/sst2-bytes/prepare.py",
        "lra-text": "data-prep/lra/prepare.py text",
        "lra-retrieval": "data-prep/lra/prepare.py retrieval",
        "lra-pathfinder32": "data-prep/lra/prepare.py pathfinder",
        "lra-image": "data-prep/lra/prepare.py image",
        "pathfinder16": "data-prep/pathfinder/prepare.py --size 16",
        "retrieval-78-130": "data-prep/retrieval/prepare.py",
        "imagenet": "data-prep/imagenet/prepare.py",
        "cifar10": "data-prep/cifar10/prepare.py",
        "cifar10-jpeg": "data-prep/cifar10/prepare.py --jpeg",
    }
    curve: ClassVar[str] = "valid_accuracy"
    next_step: ClassVar[str] = "evaluate with: scripts/eval_classifier.sh {best} {data}"
    evaluations: tuple[tuple[str, str], ...] = (("valid", ACCURACY), ("test", ACCURACY))

    def data_of(self, protocol: str) -> Path:
        """Return the data folder of a protocol. Raises: ValueError for an unknown protocol."""
        if protocol == ACCURACY:
            return self.data
        name = protocol.removeprefix(ON)
        # Other data lie beside those of the training.
        if name in ("", protocol) or "/" in name:
            raise ValueError(f"{protocol!r} is no protocol: choose {ACCURACY} or {ON}DATA")
        return self.data.parent / name

    def require_inputs(self) -> None:
        """Also require the other data that the model is evaluated on."""
        super().require_inputs()
        for split, protocol in self.evaluations:
            if (data := self.data_of(protocol)) != self.data:
                folders.require(data, self.preparation_of(data))
                folders.require_splits(data, [split])
                folders.verify(data)

    def prepare_data(self, source: Path | None = None) -> None:
        """Also prepare the other data that the model is evaluated on, without ``source``."""
        super().prepare_data(source)
        for data in {self.data_of(protocol) for _, protocol in self.evaluations} - {self.data}:
            # --from names the source of the training data only.
            folders.prepare(data, self.preparation_of(data))

    def measure(self, run: Shell) -> Run:
        """Return accuracy and loss of every (split, protocol) pair of ``evaluations``."""
        metrics: Run = {}
        sentences: dict[str, str] = {}
        splits_of: dict[str, list[str]] = {}
        for split, protocol in dict.fromkeys(self.evaluations):
            splits_of.setdefault(protocol, []).append(split)
        for protocol, splits in splits_of.items():
            best = self.checkpoints / checkpoints.BEST
            data = self.data_of(protocol)
            out = self.folder / f"eval-{protocol}.json"
            measured = written_by(run, out, "eval_classifier", best, data, "--splits", *splits)
            for split in splits:
                metrics.setdefault(split, {})[protocol] = measured["metrics"][split][ACCURACY]
            where = "" if data == self.data else f" On {folders.dataset_name(data)}."
            sentences[protocol] = f"{measured['protocol'][ACCURACY]}{where} {CHOSEN}"
        return {"metrics": metrics, "protocol": sentences}


def protocol(data: Path, longest: int, cut: int) -> str:
    """Return the protocol in words. cut: number of evaluated inputs cut at ``longest`` tokens."""
    sizes = manifest(data).get("splits", {})
    named = ", ".join(f"{split} {counts['examples']:,}" for split, counts in sizes.items())
    return (
        "Accuracy times 100, and cross-entropy in bits per example, over all examples of a split."
        + (f" Examples: {named}." if named else "")
        + (f" {cut:,} inputs are cut at {longest:,} tokens." if cut else "")
        + _selection(data, sizes)
    )


def _selection(data: Path, splits: Collection[str]) -> str:
    """Say that the measured split also selects the checkpoint, if it does."""
    if splits and "test" not in splits:
        return " There is no test split: the accuracy on valid also selects the checkpoint."
    valid, test = (data / "bin" / "input0" / f"{split}.bin" for split in ("valid", "test"))
    # Some published splits are the same file; a test accuracy is then a validation accuracy.
    if valid.exists() and test.exists() and filecmp.cmp(valid, test, shallow=False):
        return " Valid is the test split: the accuracy on it also selects the checkpoint."
    return ""
