"""The parts of a run file that a checkpoint and a training log provide."""

from typing import Any

from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.checkout import commit
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.recipes import Evaluations
from lrpe_fairseq.experiments.records.runs import Run

COUNTS = ("examples", "sentences", "tokens")  # metrics that count what was evaluated


def described_by(state: dict[str, Any]) -> Run:
    """Return the fields of a run file that the loaded checkpoint of its model provides."""
    return {**trained_by(state), "evaluated_update": checkpoints.updates(state)}


def trained_by(state: dict[str, Any]) -> Run:
    """Return the fields of a run file that any loaded checkpoint of its training provides."""
    config = checkpoints.options(state)
    return {
        "task": config["task._name"],
        "attention_type": _sides(config, "attention_type"),
        "position_encoding": _sides(config, "position_encoding"),
        "seed": config["common.seed"],
        "config": config,
    }


def diverged(update: int, evaluations: Evaluations) -> Run:
    """Return the measures of a training that ended because gradients were not finite.

    update: the last one before. Nothing was evaluated, and ``metrics`` say so.
    """
    metrics: Run = {}
    for split, protocol in evaluations:
        metrics.setdefault(split, {})[protocol] = {DIVERGED: 1}
    said = f"The training ended after update {update:,}: gradients were not finite."
    return {
        "metrics": metrics,
        "protocol": dict.fromkeys([protocol for _, protocol in evaluations], said),
        "diverged_at": update,
    }


def with_evaluations(known: Run, measured: Run, data: dict[str, str]) -> Run:
    """Return the run file ``known`` with the evaluations of ``measured`` that it lacks.

    measured: ``metrics`` and ``protocol``. data: checksums of the splits and the dictionary. The
    commit of each added evaluation is kept in ``evaluated_later``.
    """
    metrics = {split: dict(protocols) for split, protocols in known["metrics"].items()}
    added = dict(known.get("evaluated_later", {}))
    for split, protocols in measured["metrics"].items():
        for protocol, values in protocols.items():
            if protocol not in metrics.setdefault(split, {}):
                metrics[split][protocol] = values
                added[f"{split}.{protocol}"] = commit()
    checksums = {"data": {**data, **known["data"]}} if "data" in known else {}
    return {
        **known,
        "metrics": metrics,
        "protocol": {**measured["protocol"], **known["protocol"]},
        "evaluated_later": added,
        **checksums,
    }


def first_number(metrics: Run) -> str:
    """Return a metric as text, such as ``valid blocks ppl 57.30``: perplexity, or the first one."""
    split, protocols = next(iter(metrics.items()))
    protocol, measured = next(iter(protocols.items()))
    if DIVERGED in measured:
        return f"{split} {protocol} diverged"
    name = "ppl" if "ppl" in measured else next(key for key in measured if key not in COUNTS)
    return f"{split} {protocol} {name} {measured[name]:.2f}"


def _sides(config: Run, option: str) -> str | dict[str, str]:
    """Return the option's value, or those of encoder and decoder if the model has both."""
    if f"model.{option}" in config:
        return config[f"model.{option}"]
    return {side: config[f"model.{side}.{option}"] for side in ("encoder", "decoder")}
