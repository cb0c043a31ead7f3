"""Language-model runs: :class:`TrainingRun` scored by perplexity under two protocols."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records import checkpoints, fairseq_log
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.runner.devices import Devices
from lrpe_fairseq.experiments.runner.launch import BIN
from lrpe_fairseq.experiments.runner.processes import Children, RunFailed, run_child
from lrpe_fairseq.experiments.runner.training import TrainingRun

BLOCKS, SLIDING = "blocks", "sliding"
PLAIN_TASK = "language_modeling"
EVERYTHING = tuple((split, p) for split in ("valid", "test") for p in (BLOCKS, SLIDING))


@dataclass(frozen=True)
class LMRun(TrainingRun):
    """The training and evaluation of one language model."""

    configs: ClassVar[str] = "lm"
    data_scripts: ClassVar[Mapping[str, str]] = {
        "pydoc": "data-prep/pydoc/prepare.py",
        "wikitext-2-bpe": "data-prep/wikitext/prepare.py wikitext-2 --level bpe",
        "wikitext-103-word": "data-prep/wikitext/prepare.py wikitext-103 --level word",
        "wikitext-103-gpt2": "data-prep/wikitext/prepare.py wikitext-103 --level gpt2",
    }
    option_keys: ClassVar[Mapping[str, str]] = {
        "task": "task._name",
        "memory-length": "model.memory_length",
    }
    next_step: ClassVar[str] = "evaluate with: scripts/eval_lm.sh {best} {data}"
    evaluations: tuple[tuple[str, str], ...] = EVERYTHING

    def evaluation_command(self, split: str, protocol: str) -> list[str]:
        """Return the fairseq-eval-lm command of one (split, protocol) pair."""
        settings = self.settings()
        tokens = int(settings.task.tokens_per_sample)
        return evaluation_command(
            self.checkpoints / checkpoints.BEST,
            self.data,
            split,
            tokens_per_sample=tokens,
            context_window=context_window(protocol, tokens),
            max_tokens=int(settings.dataset.max_tokens),
            task=settings.task._name if protocol == BLOCKS else PLAIN_TASK,
        )

    def measure(self, children: Children, devices: Devices, lock: int) -> Run:
        """Return the perplexities of every (split, protocol) pair of ``evaluations``."""
        metrics: Run = {}
        for split, protocol in self.evaluations:
            log = self.folder / f"eval-{split}-{protocol}.log"
            log.unlink(missing_ok=True)
            run_child(children, self.evaluation_command(split, protocol), log, devices, lock)
            measured = read_evaluation(log, self.data, split)
            metrics.setdefault(split, {})[protocol] = measured
        tokens = int(self.settings().task.tokens_per_sample)
        used = {protocol for _, protocol in self.evaluations}
        return {"metrics": metrics, "protocol": protocols(tokens, used)}


def context_window(protocol: str, tokens_per_sample: int) -> int:
    """Return fairseq's --context-window for a protocol: 0, or half of ``tokens_per_sample``."""
    return {BLOCKS: 0, SLIDING: tokens_per_sample // 2}[protocol]


def protocols(tokens_per_sample: int, names: set[str]) -> dict[str, str]:
    """Return a one-sentence description of each protocol in ``names``."""
    half = tokens_per_sample // 2
    said = {
        BLOCKS: f"fairseq-eval-lm over non-overlapping blocks of {tokens_per_sample} tokens; a "
        "token sees the tokens before it in its block, the one token before the block, and a "
        "model's memory of earlier blocks.",
        SLIDING: f"fairseq-eval-lm --context-window {half}: windows of {tokens_per_sample} tokens "
        f"moved on by {tokens_per_sample - half}; a token sees at least the {half} before it.",
    }
    return {name: said[name] for name in sorted(names)}


def evaluation_command(
    checkpoint: Path,
    data: Path,
    split: str,
    *,
    tokens_per_sample: int,
    context_window: int,
    max_tokens: int,
    task: str = PLAIN_TASK,
) -> list[str]:
    """Return the fairseq-eval-lm command; without --tokens-per-sample it would skip everything.

    ``task``: the task that carries the memory between blocks, for models that have one.
    """
    return [
        str(BIN / "fairseq-eval-lm"),
        relative(data / "bin"),
        *("--task", task),
        *("--user-dir", "lrpe_fairseq"),
        *("--path", relative(checkpoint)),
        *("--gen-subset", split),
        *("--tokens-per-sample", str(tokens_per_sample)),
        *("--context-window", str(context_window)),
        *("--sample-break-mode", "none"),
        *("--max-tokens", str(max_tokens)),
        *("--num-workers", "0"),
        "--no-progress-bar",
    ]


def read_evaluation(log: Path, data: Path, split: str) -> dict[str, float]:
    """Return loss, ppl and tokens of an evaluation, and ``word_ppl`` if words were counted.

    If a perplexity is not finite: ``diverged`` and tokens.

    Word perplexity divides the total log-probability by the words and line ends of the text, so
    that it does not depend on the tokenization.

    Raises: RunFailed if the split was not evaluated completely.
    """
    try:
        measured = fairseq_log.parse_evaluation(log.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFailed(f"{error} ({log})") from None
    counts = manifest(data).get("splits", {}).get(split, {})
    expected = counts.get("tokens", measured["tokens"])
    if measured["tokens"] != expected:
        raise RunFailed(f"{log}: {measured['tokens']} of {expected} tokens were evaluated")
    if "loss" not in measured or "words_with_eos" not in counts:
        return measured
    bits = measured["loss"] * measured["tokens"] / counts["words_with_eos"]
    word_ppl = fairseq_log.perplexity(bits)
    if math.isinf(word_ppl):
        return {fairseq_log.DIVERGED: 1, "tokens": measured["tokens"]}
    return {**measured, "word_ppl": word_ppl}
