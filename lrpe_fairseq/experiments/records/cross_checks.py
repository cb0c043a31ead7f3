"""Check fields of a run file that depend on each other, to detect edits of one of them."""

import math
from collections.abc import Iterator
from typing import Any

from lrpe_fairseq.experiments.records.protocols import PAIRED, TRUNCATED

Run = dict[str, Any]
ROUNDING = {
    "rel_tol": 1e-4,
    "abs_tol": 0.005,
}  # rounding of a loss with 4 and a perplexity with 2 decimals
VALIDATIONS = (
    0.1  # relative difference between validation in training and evaluation of the best checkpoint
)
NAMED = {  # field -> the option of the model, or of its encoder and decoder, with the same value
    "seed": "common.seed",
    "task": "task._name",
    "attention_type": "model.attention_type",
    "position_encoding": "model.position_encoding",
}


def cross_check(run: Run) -> None:
    """Raise ValueError, naming the field, if two fields contradict each other."""
    for name, option in NAMED.items():
        _check_option(run, name, option)
    for split, protocols in run["metrics"].items():
        for protocol, measured in protocols.items():
            _check_perplexities(f"{split}.{protocol}", measured)
        _check_tokens(split, protocols)
    _check_updates(run)
    _check_curve(run)


def _check_option(run: Run, name: str, option: str) -> None:
    value, config = run[name], run["config"]
    sides = value if isinstance(value, dict) else {"": value}
    for side, one in sides.items():
        key = option.replace("model.", f"model.{side}.") if side else option
        if config.get(key, one) != one:
            raise ValueError(
                f"the run's field '{name}' is {one!r}, but its config has {key} {config[key]!r}"
            )


def _check_perplexities(where: str, measured: Run) -> None:
    """Check ppl = 2^loss, and word_ppl = 2^(loss tokens / words) for an integer number of words."""
    loss, ppl, word_ppl = (measured.get(name) for name in ("loss", "ppl", "word_ppl"))
    if None not in (loss, ppl) and not (loss < 1024 and math.isclose(2**loss, ppl, **ROUNDING)):
        raise ValueError(f"the run's metric {where}.ppl is {ppl}, not 2 to its loss of {loss}")
    if loss is None or "tokens" not in measured or word_ppl is None or word_ppl <= 1:
        return
    words = loss * measured["tokens"] / math.log2(word_ppl)
    if abs(words - round(words)) > 1e-3:
        raise ValueError(
            f"the run's metric {where}.word_ppl is {word_ppl}, which is 2^(loss tokens / words) "
            "for no number of words"
        )


def _check_tokens(split: str, protocols: Run) -> None:
    """Check that protocols count equal tokens: all of the split, or the paired ones."""
    counts = {p: measured["tokens"] for p, measured in protocols.items() if "tokens" in measured}
    paired = {p: n for p, n in counts.items() if p.split("-")[0] in (PAIRED, TRUNCATED)}
    whole = {p: n for p, n in counts.items() if p not in paired}
    if any(len(set(part.values())) > 1 for part in (paired, whole)):
        raise ValueError(f"the run's metric {split} counts different tokens: {counts}")
    if any(count != int(count) or count < 1 for count in counts.values()):
        raise ValueError(f"the run's metric {split} counts no whole number of tokens: {counts}")


def _check_updates(run: Run) -> None:
    last = run["config"].get("optimization.max_update") or math.inf
    seen = [("evaluated_update", run.get("evaluated_update", 0))]
    seen += [("curve", point["updates"]) for point in run.get("curve", [])[-1:]]
    for name, updates in seen:
        if updates > last:
            raise ValueError(
                f"the run's field '{name}' goes to update {updates}, but its config has "
                f"optimization.max_update {last}"
            )


def _check_curve(run: Run) -> None:
    """Check that tokens ascend and the evaluated checkpoint's point is near its evaluation."""
    tokens = [point["tokens"] for point in run.get("curve", [])]
    if sorted(tokens) != tokens:
        raise ValueError("the tokens of the run's field 'curve' do not ascend")
    evaluated = run["metrics"].get("valid", {}).get("blocks", {}).get("ppl")
    for validated in _validated(run):
        if evaluated and abs(math.log(validated / evaluated)) > VALIDATIONS:
            raise ValueError(
                f"the run's field 'curve' has perplexity {validated} at its evaluated_update, but "
                f"the metric valid.blocks.ppl is {evaluated}"
            )


def _validated(run: Run) -> Iterator[float]:
    """Return the perplexity of the curve at the evaluated update, or None."""
    for point in run.get("curve", []):
        if point["updates"] == run.get("evaluated_update") and point.get("valid_ppl", 0) > 0:
            yield point["valid_ppl"]
