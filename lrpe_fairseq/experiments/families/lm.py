"""Language models, scored by perplexity under several protocols, and masked ones, by their loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lrpe_fairseq import patterns
from lrpe_fairseq.encodings import has_rotations
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records import checkpoints, fairseq_log
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import first_shard, relative
from lrpe_fairseq.experiments.records.protocols import BLOCKS, BOUNDED, SLIDING, Protocol
from lrpe_fairseq.experiments.records.runs import Evaluations, Run
from lrpe_fairseq.experiments.runner.devices import BIN
from lrpe_fairseq.experiments.runner.processes import RunFailed, Shell, written_by
from lrpe_fairseq.experiments.runner.training import TrainingRun

PLAIN_TASK = "language_modeling"
FACTORS = "model.longrope_factors"
WITHOUT_EOS = ("pg19", "gutenberg")  # books: perplexity per word does not count line ends
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
        "books": "data-prep/books/prepare.py books",
        "pg19": "data-prep/books/prepare.py pg19",
        "gutenberg": "data-prep/gutenberg/prepare.py",
        "gutenberg-first-1": "data-prep/gutenberg/prepare.py --shards 1",
        "books4096": "data-prep/gutenberg/prepare.py --shards 1 --vocab-size 4096 "
        "--held-out-books 6 14",
    }
    next_step: ClassVar[str] = "evaluate with: scripts/eval_lm.sh {best} {data}"
    evaluations: Evaluations = EVERYTHING

    @property
    def tokens_per_sample(self) -> int:
        """The length T of the blocks in training."""
        return int(self.settings().task.tokens_per_sample)

    def require_inputs(self) -> None:
        """Also require that the model has positions for every length of evaluation."""
        super().require_inputs()
        protocols = [Protocol.parse(name) for _, name in self.evaluations]
        model = {f"model.{key}": value for key, value in self.settings().model.items()}
        require_positions(model, self.tokens_per_sample, protocols)

    def measure(self, run: Shell) -> Run:
        """Return the perplexities of every (split, protocol) pair of ``evaluations``."""
        settings = self.settings()
        options = {
            "task._name": settings.task._name,
            "task.tokens_per_sample": self.tokens_per_sample,
            "dataset.max_tokens": settings.dataset.get("max_tokens"),
        }
        best = self.checkpoints / checkpoints.BEST
        return measure(best, self.data, self.evaluations, options, self.folder, run)


def measure(
    checkpoint: Path,
    data: Path,
    evaluations: Evaluations,
    options: Mapping[str, Any],
    folder: Path,
    run: Shell,
) -> Run:
    """Return ``metrics`` and ``protocol`` of a checkpoint.

    options: of its training, by dotted key; ``model.longrope_factors`` are those of protocols with
        longrope. If batches counted samples and ``dataset.max_tokens`` is None, one block is
        evaluated at a time. folder: of the logs.
    Raises: RunFailed if an evaluation fails or did not score every token.
    """
    metrics: Run = {}
    trained = options["task.tokens_per_sample"]
    known = {name: Protocol.parse(name) for name in sorted({name for _, name in evaluations})}
    for split in dict.fromkeys(split for split, _ in evaluations):
        names = [name for split_of, name in evaluations if split_of == split]
        by_protocol: Run = {}
        for name in (name for name in names if known[name].by_fairseq):
            log = folder / f"eval-{checkpoint.stem}-{split}-{name}.log"
            run(evaluation_command(checkpoint, data, split, name, options), log)
            by_protocol[name] = read_evaluation(log, data, split)
        # In one process: the model is loaded once for all lengths.
        if others := [name for name in names if name not in by_protocol]:
            out = folder / f"eval-{checkpoint.stem}-{split}-lengths.json"
            factors = options.get(FACTORS, "")
            words = ("--longrope-factors", factors) if factors else ()
            measured = written_by(run, out, "score_lm", checkpoint, data, split, *others, *words)
            by_protocol |= {n: _complete(n, measured[n], data, split, trained, out) for n in others}
        metrics[split] = {name: by_protocol[name] for name in names}
    sentences = {name: protocol.sentence(trained) for name, protocol in known.items()}
    return {"metrics": metrics, "protocol": sentences}


def require_positions(options: Mapping[str, Any], trained: int, wanted: Sequence[Protocol]) -> None:
    """Refuse a protocol that is longer than learned positions, or changes what a model lacks.

    options: of the training, by dotted key. Sinusoidal positions have any length.
    Raises: UserError.
    """
    names = patterns.values(options["model.position_encoding"])
    if not any(map(has_rotations, names)) and any(p.scaling != "none" for p in wanted):
        raise UserError(
            f"position encoding {', '.join(names)} has no rotations to scale: evaluate it without "
            "context scaling"
        )
    if any(p.bounded for p in wanted) and not _divides_by_sums(options):
        raise UserError(
            "+bounded evaluates linear attention of the normalizer rotated, which this model does "
            "not have in all linear layers: evaluate it without +bounded"
        )
    # Refused before the training: it would be found after hours.
    longest = max((protocol.longest for protocol in wanted), default=0)
    learned = options.get("model.decoder_learned_pos") and not options.get(
        "model.no_token_positional_embeddings"
    )
    if learned and longest > trained:
        raise UserError(
            f"a model with learned absolute positions has none beyond the {trained} tokens of its "
            f"training, so it cannot be evaluated at {longest}: use sinusoidal positions or none"
        )


def _divides_by_sums(options: Mapping[str, Any]) -> bool:
    """True if all layers of linear attention divide by sums of scores, some without a bound."""
    attention = options["model.attention_type"]
    normalizer = options.get("model.attention_normalizer") or "rotated"
    # After so many layers both patterns begin again.
    layers = math.lcm(len(patterns.values(attention)), len(patterns.values(normalizer)))
    kinds, names = (patterns.over_layers(pattern, layers) for pattern in (attention, normalizer))
    of_linear = {name for kind, name in zip(kinds, names, strict=True) if kind == "linear"}
    return "rotated" in of_linear and of_linear <= {"rotated", BOUNDED}


def evaluation_command(
    checkpoint: Path, data: Path, split: str, protocol: str, options: Mapping[str, Any]
) -> list[str]:
    """Return the fairseq-eval-lm command; its default for --tokens-per-sample is refused.

    A model with a memory of earlier blocks needs the task of its training to carry it.
    """
    tokens = options["task.tokens_per_sample"]
    parsed = Protocol.parse(protocol)
    overrides = parsed.overrides(tokens, options.get(FACTORS, ""))
    return [
        str(BIN / "fairseq-eval-lm"),
        relative(first_shard(data)),
        *("--task", options["task._name"] if parsed.kind == BLOCKS else PLAIN_TASK),
        *("--user-dir", "lrpe_fairseq"),
        *("--path", relative(checkpoint)),
        *("--gen-subset", split),
        *("--tokens-per-sample", str(tokens)),
        *("--context-window", str(parsed.context_window(tokens))),
        *("--sample-break-mode", "none"),
        *("--max-tokens", str(options["dataset.max_tokens"] or tokens)),
        # Workers of a data loader would cost more than the evaluation of a small model.
        *("--num-workers", "0"),
        *(("--model-overrides", str(overrides)) if overrides else ()),
        "--no-progress-bar",
    ]


def read_evaluation(log: Path, data: Path, split: str) -> dict[str, float]:
    """Return loss, ppl and tokens of an evaluation, and ``word_ppl`` if words were counted.

    If a perplexity is not finite: ``diverged`` and tokens.

    Raises: ValueError without a perplexity; RunFailed if the split was not evaluated completely.
    """
    return _complete(BLOCKS, fairseq_log.parse_evaluation(log), data, split, 0, log)


def _complete(
    name: str, measured: Run, data: Path, split: str, trained: int, source: Path
) -> dict[str, float]:
    """Return the metrics of a protocol, which must have scored all tokens of the manifest.

    Raises: RunFailed if it has not.
    """
    protocol = Protocol.parse(name)
    tokens = manifest(data).get("splits", {}).get(split, {}).get("tokens")
    expected = protocol.count(tokens, trained) if tokens else measured["tokens"]
    # fairseq leaves out what does not fit into a batch, without an error.
    if measured["tokens"] != expected:
        raise RunFailed(f"{source}: {measured['tokens']} of {expected} tokens were evaluated")
    return measured if protocol.is_partial else with_words(measured, data, split)


def with_words(measured: Run, data: Path, split: str) -> dict[str, float]:
    """Return ``measured`` with ``word_ppl``, if the manifest counts words.

    Word perplexity divides the total log-probability by the words and line ends of the text, so
    that it does not depend on the tokenization. On PG-19 and the like it divides by the words
    alone, as the metric published with PG-19 does.
    """
    known = manifest(data)
    counts = known.get("splits", {}).get(split, {})
    corpus = known.get("corpus", "").partition("-first-")[0]  # a part counts like the whole
    count = "words" if corpus in WITHOUT_EOS else "words_with_eos"
    if "loss" not in measured or not counts.get(count):
        return measured
    bits = measured["loss"] * measured["tokens"] / counts[count]
    word_ppl = fairseq_log.perplexity(bits)
    if math.isinf(word_ppl):
        return {fairseq_log.DIVERGED: 1, "tokens": measured["tokens"]}
    return {**measured, "word_ppl": word_ppl}


# --- masked language models --------------------------------------------------------------------

MASKED = "masked"
MASK_SEED = 1
EXACT_ABOVE = 0.005 / (0.0005 * math.log(2))
"""The perplexity where both of fairseq's rounded numbers have the same relative error."""
PROTOCOL = {
    MASKED: "fairseq-validate over non-overlapping blocks; 15 % of the tokens are predicted, the "
    f"same ones of every model (mask seed {MASK_SEED}). The loss is in bits per predicted token."
}


@dataclass(frozen=True)
class PretrainingRun(TrainingRun):
    """The pre-training and validation of one masked language model."""

    configs: ClassVar[str] = "roberta"
    task: ClassVar[str] = "masked_lm"
    data_scripts: ClassVar[Mapping[str, str]] = {
        "wikitext-2-bpe": "data-prep/wikitext/prepare.py wikitext-2 --level bpe",
        "wikitext-103-gpt2": "data-prep/wikitext/prepare.py wikitext-103 --level gpt2",
        "wikibook": "data-prep/wikibook/prepare.py",
    }
    next_step: ClassVar[str] = "fine-tune with: scripts/finetune_glue.sh {best} all"
    evaluations: tuple[tuple[str, str], ...] = (("valid", MASKED), ("test", MASKED))

    def measure(self, run: Shell) -> Run:
        """Return loss and perplexity of every split of ``evaluations``, with the shared masks."""
        metrics: Run = {}
        settings = self.settings()
        # A training whose batches count samples has none: one block is evaluated at a time.
        size = settings.dataset.get("max_tokens") or settings.task.tokens_per_sample
        options = ["--max-tokens", str(size), "--required-batch-size-multiple", "1"]
        options += ["--model-overrides", f"{{'seed': {MASK_SEED}}}"]
        for split, protocol in self.evaluations:
            log = self.folder / f"eval-{split}-{protocol}.log"
            run(self.validation(self.task, split, *options), log)
            metrics[split] = {protocol: read_validation(log, split)}
        return {"metrics": metrics, "protocol": PROTOCOL}


def read_validation(log: Path, split: str) -> dict[str, float]:
    """Read ``loss`` (bits) and ``ppl``, or ``diverged``, from the output of fairseq-validate.

    Trap: fairseq rounds the loss to 3 decimals and its perplexity, of the loss before rounding, to
    2. Above a perplexity of about 14 the second is more exact.
    """
    printed = fairseq_log.parse_validation(log, split)
    exact = EXACT_ABOVE < printed["ppl"] < math.inf
    return fairseq_log.scored(math.log2(printed["ppl"]) if exact else printed["loss"])
