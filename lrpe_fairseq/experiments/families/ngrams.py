"""Measure n-grams on the tokens, splits and protocols of language models, as run files.

A run file is ``results/runs/ngrams/<dataset>-<tokens>-in-<T>.json``: n-grams of ``ngrams.tokens``
training tokens in random blocks of T tokens, as models read them in less than an epoch, on what
models with such blocks are evaluated on.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lrpe_fairseq.experiments.data import corpus, folders, ngrams
from lrpe_fairseq.experiments.families import runs
from lrpe_fairseq.experiments.families.lm import LMRun, with_words
from lrpe_fairseq.experiments.records import fairseq_log
from lrpe_fairseq.experiments.records.files import CONFIGS, ROOT, shards_of
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.experiments.records.protocols import (
    REPEATED,
    TRUNCATED,
    Protocol,
    Window,
)
from lrpe_fairseq.experiments.records.runs import Evaluations, Run
from lrpe_fairseq.experiments.records.tables import load_tables

ORDERS = ngrams.ORDERS
EXPERIMENT = SCALE = TASK = "ngrams"
NONE = "none"
"""Attention and encoding of a run file of n-grams."""


@dataclass(frozen=True)
class Yardstick:
    """N-grams of ``tokens`` training tokens of ``data``, for models with blocks of T.

    length: T. evaluations: pairs of split and protocol.
    """

    data: Path
    tokens: int
    length: int
    evaluations: Evaluations

    @property
    def result(self) -> Path:
        """The run file."""
        name = f"{folders.dataset_name(self.data)}-{self.tokens}-in-{self.length}.json"
        return ROOT / "results" / "runs" / EXPERIMENT / name


class Corpus:
    """The tokens of the splits of a data folder, read once."""

    def __init__(self, data: Path) -> None:
        self._shards = shards_of(data)
        self._splits: dict[str, np.ndarray] = {}
        self.symbols = corpus.count_types(self._shards[0] / "dict.txt")["size"]

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of a split, int64 (N,); of train those of all shards."""
        if name not in self._splits:
            homes = self._shards if name == "train" else self._shards[:1]
            self._splits[name] = np.concatenate([corpus.read_tokens(home / name) for home in homes])
        return self._splits[name]


class Fitted:
    """N-grams of ``tokens`` training tokens, and p of the held-out tokens, kept.

    length: of the random blocks, T.
    """

    def __init__(self, texts: Corpus, tokens: int, length: int) -> None:
        self.texts = texts
        self.counted = tokens, length
        text, starts = ngrams.random_blocks(texts.split("train"), tokens, length)
        self._model = ngrams.KneserNey(text, texts.symbols, starts=starts)
        self._alone: dict[str, np.ndarray] = {}
        self._mixtures: dict[int, ngrams.Mixture] = {}
        self._mixed: dict[tuple[str, int], np.ndarray] = {}
        # The order is chosen on valid, as a rate of a model would be.
        losses = [ngrams.loss(probabilities) for probabilities in self.alone("valid")]
        self.order = 1 + int(np.argmin(losses))

    def alone(self, split: str) -> np.ndarray:
        """Return p of every token of a split by every order, (orders, N)."""
        if split not in self._alone:
            self._alone[split] = self._model.probabilities(self.texts.split(split))
        return self._alone[split]

    def mixed(self, split: str, window: int) -> np.ndarray:
        """Return p of every token of a split with a cache; the weights are fitted to ``valid``."""
        # A fit reads all of valid; several protocols share a window.
        if window not in self._mixtures:
            held_out = self.texts.split("valid")
            self._mixtures[window] = ngrams.Mixture(self._model, self.order, window, held_out)
        if (split, window) not in self._mixed:
            probabilities = self._mixtures[window].probabilities(self.texts.split(split))
            self._mixed[split, window] = probabilities
        return self._mixed[split, window]


def _training_tokens(data: Path) -> int:
    """Return the number of training tokens of all shards."""
    return sum(int(corpus.row_lengths(home / "train").sum()) for home in shards_of(data))


def tokens_read(settings: Any) -> int:
    """Return the training tokens of a language model's configuration: updates times their size."""
    update = settings.dataset.max_tokens * settings.optimization.update_freq[0]
    return int(settings.optimization.max_update) * int(update)


def yardsticks(data: Path) -> list[Yardstick]:
    """Return what the tables need that train language models on a data folder of this name."""
    there = _training_tokens(data)
    needed: dict[tuple[int, int], set[tuple[str, str]]] = {}
    for run in _trainings(data.name):
        settings = run.settings()
        key = min(there, tokens_read(settings)), int(settings.task.tokens_per_sample)
        needed.setdefault(key, set()).update(_plain(run.evaluations))
    return [
        Yardstick(data, tokens, length, tuple(sorted(evaluations)))
        for (tokens, length), evaluations in sorted(needed.items())
    ]


def _trainings(name: str) -> list[LMRun]:
    tables = load_tables(CONFIGS / "tables")
    cells = (runs(table, scale, [1]) for table in tables for scale in table.scales)
    planned = itertools.chain.from_iterable(cells)
    return [run for run in planned if isinstance(run, LMRun) and run.data.name == name]


def _plain(evaluations: Evaluations) -> set[tuple[str, str]]:
    """Return the evaluations that score tokens, without a scaling of rotations."""
    named = {(split, protocol.partition("+")[0]) for split, protocol in evaluations}
    return {(split, name) for split, name in named if Protocol.parse(name).kind != REPEATED}


def measure(wanted: Sequence[Yardstick]) -> Iterator[Run]:
    """Yield the run files of yardsticks of one data folder; one model is in memory at a time."""
    texts = Corpus(wanted[0].data) if wanted else None
    fit = None
    for one in wanted:
        begun = time.monotonic()
        if fit is None or fit.counted != (one.tokens, one.length):
            fit = Fitted(texts, one.tokens, one.length)
        metrics: Run = {}
        for split, name in one.evaluations:
            metrics.setdefault(split, {})[name] = scores(fit, one, split, name)
        yield _record(one, metrics, len(texts.split("train")), time.monotonic() - begun)


def _record(wanted: Yardstick, metrics: Run, there: int, seconds: float) -> Run:
    names = dict.fromkeys(name for _, name in wanted.evaluations)
    return {
        "experiment": EXPERIMENT,
        "scale": SCALE,
        "dataset": folders.dataset_name(wanted.data),
        "task": TASK,
        "attention_type": NONE,
        "position_encoding": NONE,
        "seed": 0,
        "metrics": metrics,
        "protocol": {name: _sentence(name, wanted.length) for name in names},
        "config": {
            "ngrams.tokens": wanted.tokens,
            "ngrams.draw": ngrams.DRAW,
            "ngrams.corpus": there,
            "ngrams.orders": ngrams.ORDERS,
            "task.tokens_per_sample": wanted.length,
        },
        "wall_seconds": round(max(0.1, seconds), 1),
        "data": folders.checksums(wanted.data, {"train", "valid", *metrics}),
        **environment(),
    }


def scores(fit: Fitted, wanted: Yardstick, split: str, name: str) -> dict[str, float]:
    """Return ``ppl`` and ``loss`` of the best order and with a cache, and ``ppl-N`` of every order.

    Metrics with a cache begin with ``cache-``; ``cache-window`` is its size.
    """
    protocol = Protocol.parse(name)
    text = fit.texts.split(split)
    places = scored_places(protocol.windows(len(text), wanted.length))
    window = window_of(protocol, wanted.length)
    losses = {
        order: ngrams.loss(probabilities, places)
        for order, probabilities in enumerate(fit.alone(split), 1)
    }
    cached_loss = ngrams.loss(fit.mixed(split, window), places)
    alone = {**fairseq_log.scored(losses[fit.order]), "tokens": len(places)}
    mixed = {**fairseq_log.scored(cached_loss), "tokens": len(places)}
    if not protocol.is_partial:  # the manifest counts the words of whole splits only
        alone = with_words(alone, wanted.data, split)
        mixed = with_words(mixed, wanted.data, split)
    orders = {f"ppl-{order}": fairseq_log.perplexity(loss) for order, loss in losses.items()}
    cached = {f"cache-{metric}": value for metric, value in mixed.items() if metric != "tokens"}
    return {**alone, **orders, **cached, "order": fit.order, "cache-window": window}


def scored_places(windows: Any) -> np.ndarray:
    """Return the places of the scored tokens of windows in the text, ascending."""
    parts: list[Window] = list(windows)
    return np.concatenate([np.arange(w.first, w.end) for w in parts])


def window_of(protocol: Protocol, length: int) -> int:
    """Return the tokens of context that a protocol gives at most, for training blocks of length."""
    return length if protocol.kind == TRUNCATED else protocol.length or length


def _sentence(name: str, length: int) -> str:
    protocol = Protocol.parse(name)
    return (
        f"Modified Kneser-Ney of the order with the lowest validation loss, on the tokens that are "
        f"scored under this protocol of models: {protocol.sentence(length)} An n-gram reads across "
        f"blocks. cache: mixed with the frequencies of what followed the same 0, 1 and 2 tokens "
        f"among the last {window_of(protocol, length)} tokens; the weights are fitted to valid."
    )


def by_hand(data: Path, tokens: int | None, length: int, evaluations: Evaluations) -> Yardstick:
    """Return a yardstick of all training tokens of a data folder, or of ``tokens`` of them."""
    there = _training_tokens(data)
    return Yardstick(data, min(tokens or there, there), length, tuple(sorted(evaluations)))
