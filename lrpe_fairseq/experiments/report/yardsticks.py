"""N-grams beside the columns of language models: ``results/runs/ngrams/*.json``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lrpe_fairseq.experiments.records import keys
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.records.tables import Column

if TYPE_CHECKING:
    from lrpe_fairseq.experiments.report.sheets import Sheet

EXPERIMENT = "ngrams"
MODELS = "lrpe_lm"
"""The beginning of the names of language models."""
METRICS = {"ppl": "ppl", "word_ppl": "word_ppl"}
"""Metric of a column -> that of n-grams."""
NAME, CACHED = "{order}-grams, modified Kneser-Ney", "the same with a cache of the context"
"""The names of the two lines in tables and pictures."""
TOKENS, LENGTH = "ngrams.tokens", "task.tokens_per_sample"


class Yardsticks:
    """The run files of n-grams among ``runs``: dataset, training tokens and T -> run."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._known = {
            (run["dataset"], run["config"][TOKENS], run["config"][LENGTH]): run
            for run in runs.values()
            if run["experiment"] == EXPERIMENT
        }

    def of(self, sheet: "Sheet", column: Column) -> dict[str, float]:
        """Return ``ppl``, ``cache-ppl``, ``order`` and ``cache-window`` beside a column.

        Empty for a column of another metric, of other models, or without a run file. Raises:
        ValueError if the n-grams were measured on other tests than the models.
        """
        # Other metrics and means over columns have no n-grams.
        if column.metric not in METRICS or column.mean_of:
            return {}
        runs_of_rows = (sheet.runs_of(row, column) for row in sheet.table.rows)
        some = next((item for runs in runs_of_rows for item in runs.items()), None)
        run = self._beside(some[1]) if some else None
        if run is None:
            return {}
        # Scaled rotations change the model, not the tokens that are scored.
        protocol = column.protocol.partition("+")[0]
        measured = run["metrics"].get(column.split, {}).get(protocol, {})
        if not measured:
            return {}
        _require_same_tests(some, run, column.split)
        metric = METRICS[column.metric]
        return {
            "ppl": measured[metric],
            "cache-ppl": measured[f"cache-{metric}"],
            "order": measured["order"],
            "cache-window": measured["cache-window"],
        }

    def _beside(self, model: Run) -> Run | None:
        """Return the n-grams of as many tokens as a model has read, or of the whole corpus."""
        config = model["config"]
        # A masked model predicts from both sides; n-grams are no yardstick for it.
        if not str(config.get("model._name", "")).startswith(MODELS):
            return None
        # Tokens that were read: updates times tokens over all processes.
        sizes = keys.sizes(config, "dataset.max_tokens")
        if not sizes:
            return None
        read = int(config["optimization.max_update"] * sizes[0])
        place = model["dataset"], config[LENGTH]
        known = {n: run for (data, n, t), run in self._known.items() if (data, t) == place}
        whole = {run["config"]["ngrams.corpus"] for run in known.values()}
        # A model that has read its text more than once is compared with n-grams of the whole text.
        return known.get(min([read, *whole]))


def _require_same_tests(model: tuple[str, Run], ngrams: Run, split: str) -> None:
    """Raise ValueError if the checksums of a split are known and differ."""
    name, run = model
    theirs = run.get("data", {}).get(split)
    ours = ngrams.get("data", {}).get(split)
    # Old run files lack checksums.
    if theirs and ours and theirs != ours:
        raise ValueError(f"{name} was evaluated on another split {split} than its n-grams")
