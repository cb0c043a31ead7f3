"""What a run file says of its training: read from a checkpoint, and kept in ``usage.json``.

A training has one part per start or resumption; ``usage.json`` in its run folder has the commits
of all parts and the checksums of the data.
"""

from pathlib import Path

from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.files import commit, read_json, write_json
from lrpe_fairseq.experiments.records.keys import Evaluations
from lrpe_fairseq.experiments.records.runs import Run

USAGE = "usage.json"
COUNTS = ("examples", "sentences", "tokens")  # metrics that count what was evaluated


def usage(folder: Path) -> Run:
    """Return ``commits`` (in order) and ``data`` (checksums) of a run folder.

    If an older version started the training, some of them are missing.
    """
    return read_json(folder / USAGE)


def begin_part(folder: Path, data: dict[str, str], *, resumed: bool) -> None:
    """Store the commit and the data checksums of a part that starts."""
    known = usage(folder) if resumed else {}
    commits = list(dict.fromkeys([*known.get("commits", []), commit()]))
    write_json(folder / USAGE, {**known, "commits": commits, "data": data})


def provenance(folder: Path) -> Run:
    """Return fields of a run file: ``commit`` of the first part, ``commits`` if several.

    Empty if an older version started the training, whose commit is then unknown.
    """
    commits = usage(folder).get("commits", [])
    first = {"commit": commits[0]} if commits else {}
    return first | ({"commits": commits} if len(commits) > 1 else {})


def settings_of(config: Run) -> Run:
    """Return the fields of a run file that the options of its training provide."""
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
