"""The run file: one JSON file per trained and evaluated model, written atomically.

The path of a run file is ``results/runs/<experiment>/<anything>.json``. It is a plain dict with the
fields of :data:`FIELDS`; :data:`OPTIONAL` ones are checked if present, and further fields are kept.
This module does not need fairseq.

A file holds in ``config`` what differs from ``base-<scale>.json`` of its folder, in ``without`` the
keys of the base that it lacks, and in ``config_hash`` a hash of the whole configuration. The first
run of a scale writes the base, which never changes: a later edit of a YAML or of a default does not
reinterpret a run. An evaluation by hand has its whole configuration in its file, and so has a run
file in a pack of another machine, until the pages are rendered.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.records import bases
from lrpe_fairseq.experiments.records.fairseq_log import DIVERGED
from lrpe_fairseq.experiments.records.files import commit, write_json
from lrpe_fairseq.experiments.records.protocols import PAIRED, REPEATED, TRUNCATED

Run = dict[str, Any]
Evaluations = tuple[tuple[str, str], ...]
"""(split, protocol) pairs."""

BY_HAND = "by-hand"
"""Experiment and scale of an evaluation by hand."""
NAME = (str,)
ONE_OR_TWO = (str, dict)  # a name, or {"encoder": name, "decoder": name}
NUMBER = (int, float)

FIELDS: dict[str, tuple[type, ...]] = {
    "experiment": NAME,  # the folder under results/runs
    "dataset": NAME,
    "task": NAME,  # fairseq's task
    "attention_type": ONE_OR_TWO,
    "position_encoding": ONE_OR_TWO,
    "seed": (int,),
    "scale": NAME,  # "paper", "small", ...: runs of different scales are never in one table
    "metrics": (dict,),  # split -> protocol -> metric -> number
    "protocol": (dict,),  # protocol -> one sentence that describes it
    "config": (dict,),  # every option, by fairseq's dotted key; in the file by :mod:`.bases`
    "commit": NAME,
    "versions": (dict,),
    "hardware": (dict,),
    "wall_seconds": NUMBER,  # of training
}
OPTIONAL: dict[str, tuple[type, ...]] = {
    "kernels": (dict,),  # available ones, and in "served" attention -> kernels; old runs lack both
    "peak_memory_mb": NUMBER,
    "million_parameters": NUMBER,  # of the model, learned or not, without buffers
    "tokens_per_second": NUMBER,  # of training, unless it diverged before its first logged update
    "data": (dict,),  # split, or "dictionary" -> sha256; old runs lack it
    "machines": (list,),  # of training and evaluation, if they differ; fields are of the first
    "commits": (list,),  # of a training in several parts, in order; "commit" is the first
    "diverged_at": (int,),  # of a training that ended there, because gradients were not finite
    "averaged_updates": (list,),  # of the checkpoints whose mean was evaluated, in translation
    "evaluated_later": (dict,),  # split.protocol -> commit, of evaluations added to a finished run
    "curve": (list,),  # of {"updates", "tokens", a metric such as "valid_ppl"}, updates ascending
}
ROUNDING = {"rel_tol": 1e-4, "abs_tol": 0.005}
"""Rounding of a loss with 4 and a perplexity with 2 decimals."""


COUNTS = ("examples", "sentences", "tokens")  # metrics that count what was evaluated


def validate(run: Run) -> None:
    """Raise ValueError, one sentence, for the first error of ``run``."""
    if not _is(run, dict):
        raise ValueError(f"a run is an object of fields, not {type(run).__name__}")
    for name, types in FIELDS.items():
        if name not in run:
            raise ValueError(f"the run lacks the field '{name}'")
        _check_type(name, run[name], types)
    for name in OPTIONAL.keys() & run.keys():
        _check_type(name, run[name], OPTIONAL[name])
    # JSON knows neither nan nor inf, and other readers fail at them.
    for path, value in _leaves(run):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"the run's value {'.'.join(path)} is {value}, not a finite number")
    _check_metrics(run["metrics"], run["protocol"])


def write_run(path: Path | str, run: Run) -> None:
    """Write ``run`` atomically. Raises: ValueError if it is invalid; OSError naming ``path``."""
    validate(run)
    try:
        write_json(Path(path), _stored(run, Path(path)), sort_keys=True)
    except OSError as error:
        message = f"cannot write this result: {error.strerror}"
        raise OSError(error.errno, message, str(path)) from error


def _stored(run: Run, path: Path) -> Run:
    """Return the content of the file ``path``. An evaluation by hand has no base beside it."""
    return run if run["experiment"] == BY_HAND else bases.packed(run, path)


def read_run(path: Path | str) -> Run:
    """Read a run file.

    Raises: ValueError, which names the file, if it is invalid; BaseError, which is one, if it is
        invalid because of its base.
    """
    try:
        run = json.loads(Path(path).read_text(encoding="utf-8"))
        run = bases.unpacked(run, Path(path)) if isinstance(run, dict) else run
        validate(run)
    except ValueError as error:
        kind = bases.BaseError if isinstance(error, bases.BaseError) else ValueError
        raise kind(f"{path} is not a run file: {error}") from error
    return run


def run_files(root: Path | str) -> list[Path]:
    """Return the paths of the run files under ``root`` (``results/runs``), sorted."""
    # Files of a writer that was killed begin with a dot.
    skipped = (".", bases.PREFIX)
    return [p for p in sorted(Path(root).rglob("*.json")) if not p.name.startswith(skipped)]


def shorten(root: Path | str) -> None:
    """Store what run files under ``root`` have whole as differences from the bases beside them.

    A pack of another machine has whole configurations: its base may be another one.
    """
    for path in run_files(root):
        if b'"config_hash"' not in path.read_bytes():
            write_run(path, read_run(path))


def read_runs(root: Path | str) -> dict[str, Run]:
    """Return every run under ``root`` (``results/runs``) by relative path, sorted.

    Raises: ValueError for an invalid run file, or one in another experiment's folder.
    """
    runs = {}
    for path in run_files(root):
        name = path.relative_to(root).as_posix()
        runs[name] = read_run(path)
        if runs[name]["experiment"] != name.split("/")[0]:
            raise ValueError(f"{name} says that its experiment is {runs[name]['experiment']!r}")
    return runs


def _is(value: Any, *types: type) -> bool:
    """As isinstance, except that True is not a number."""
    return isinstance(value, types) and not isinstance(value, bool)


def _check_type(name: str, value: Any, types: tuple[type, ...]) -> None:
    """Check the type of a field. Raises: ValueError."""
    if not _is(value, *types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f"the run's field '{name}' must be {wanted}, not {type(value).__name__}")


def _check_metrics(metrics: Run, protocols: Run) -> None:
    """Check names and numbers, that ppl = 2^loss, and that protocols count equal tokens.

    Raises: ValueError.
    """
    measured = list(_leaves(metrics))
    if not measured:
        raise ValueError("the run's field 'metrics' holds no number")
    for path, value in measured:
        if len(path) != 3 or not _is(value, *NUMBER):
            raise ValueError(
                f"the run's metric {'.'.join(path)} is not split.protocol.metric with a number"
            )
        if not _is(protocols.get(path[1]), str):
            raise ValueError(f"the run's field 'protocol' does not describe '{path[1]}'")
    for split, by_protocol in metrics.items():
        for protocol, numbers in by_protocol.items():
            _check_perplexity(f"{split}.{protocol}.ppl", numbers.get("loss"), numbers.get("ppl"))
        _check_tokens(split, by_protocol)


def _check_perplexity(where: str, loss: float | None, ppl: float | None) -> None:
    """Check that a perplexity is 2 to its loss, up to rounding. Raises: ValueError."""
    # Both come from one output: if they disagree, one was read wrongly.
    if None not in (loss, ppl) and not (loss < 1024 and math.isclose(2**loss, ppl, **ROUNDING)):
        raise ValueError(f"the run's metric {where} is {ppl}, not 2 to its loss of {loss}")


def _check_tokens(split: str, protocols: Run) -> None:
    """Check that protocols count equal tokens: the whole split, the paired, or the repeated.

    Raises: ValueError.
    """
    counts = {name: numbers["tokens"] for name, numbers in protocols.items() if "tokens" in numbers}
    kinds: dict[str, set[int]] = {}
    for name, count in counts.items():
        kind = name.split("-")[0]
        part = "all"
        if kind in (PAIRED, TRUNCATED):
            part = PAIRED
        elif kind == REPEATED:
            part = REPEATED
        kinds.setdefault(part, set()).add(count)
    if any(len(different) > 1 for different in kinds.values()):
        raise ValueError(f"the run's metric {split} counts different tokens: {counts}")


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(tree, dict | list | tuple):
        yield path, tree
        return
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(inner, (*path, str(key)))


# --- what a run file says of its training --------------------------------------------------------


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
    sentence = f"The training ended after update {update:,}: gradients were not finite."
    return {
        "metrics": metrics,
        "protocol": dict.fromkeys([protocol for _, protocol in evaluations], sentence),
        "diverged_at": update,
    }


def with_evaluations(known: Run, measured: Run, data: dict[str, str], here: Run) -> Run:
    """Return the run file ``known`` with the evaluations of ``measured`` that it lacks.

    measured: ``metrics`` and ``protocol``. data: checksums of the splits and the dictionary. here:
    the machine that evaluated. The commit of each added evaluation is kept in ``evaluated_later``.
    """
    metrics = {split: dict(protocols) for split, protocols in known["metrics"].items()}
    added = dict(known.get("evaluated_later", {}))
    for split, protocols in measured["metrics"].items():
        for protocol, values in protocols.items():
            if protocol not in metrics.setdefault(split, {}):
                metrics[split][protocol] = values
                added[f"{split}.{protocol}"] = commit()
    # An old run file without checksums gets none for its new part: they would speak for all of it.
    checksums = {"data": {**data, **known["data"]}} if "data" in known else {}
    return {
        **known,
        "metrics": metrics,
        # A sentence that describes known numbers stays.
        "protocol": {**measured["protocol"], **known["protocol"]},
        "evaluated_later": added,
        **checksums,
        **with_machines(known, [here]),
    }


def machines_of(run: Run) -> list[Run]:
    """Return ``versions`` and ``hardware`` of the machines that trained and evaluated a run."""
    return run.get("machines") or [{name: run[name] for name in ("versions", "hardware")}]


def with_machines(run: Run, others: list[Run]) -> Run:
    """Return the field ``machines`` of a run with others; {} if the run was on no other one."""
    known = machines_of(run)
    added = [machine for machine in others if machine not in known]
    return {"machines": [*known, *added]} if added else {}


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
