"""Encoder-decoder models, and translation: scored by BLEU and chrF of detokenized text."""

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf
from sacrebleu.metrics import BLEU, CHRF

from lrpe_fairseq.encodings import options_read_by
from lrpe_fairseq.experiments.data.bitext import side
from lrpe_fairseq.experiments.data.folders import manifest
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.files import relative
from lrpe_fairseq.experiments.records.keys import Cell, unread
from lrpe_fairseq.experiments.records.runs import Run
from lrpe_fairseq.experiments.records.tables import HALVES, PARTS, Table
from lrpe_fairseq.experiments.runner.devices import BIN, parse_overrides
from lrpe_fairseq.experiments.runner.processes import RunFailed, Shell
from lrpe_fairseq.experiments.runner.training import TrainingRun

BEAM = "beam"
CROSS = "model.cross.position_encoding"


@dataclass(frozen=True)
class Decoding:
    """Options of decoding. average: number of last periodic checkpoints to average."""

    beam: int = 4
    length_penalty: float = 0.6
    average: int = 5

    def __post_init__(self) -> None:
        """Raises: ValueError for a number that fairseq-generate cannot use."""
        if min(self.average, self.beam) < 1:
            raise ValueError("--average and --beam must be at least 1")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"--lenpen must be a finite number, not {self.length_penalty}")

    def mean(self, folder: Path) -> "tuple[Path, Decoding]":
        """Average the last checkpoints in ``folder`` and write the result next to them.

        Returns the path, and the options with the number of checkpoints that were averaged.
        Raises: ValueError if there is none.
        """
        newest = checkpoints.newest(folder, self.average)
        averaged = folder / checkpoints.AVERAGED
        checkpoints.average(newest, averaged)
        return averaged, replace(self, average=len(newest))

    def sentence(self, signature: str) -> str:
        """Return the protocol as stated in a run file."""
        model = f"mean of the last {self.average} checkpoints" if self.average > 1 else "one model"
        return (
            f"fairseq-generate, {model}, beam {self.beam}, "
            f"length penalty {self.length_penalty:g}, pieces joined by sentencepiece; sacrebleu on "
            f"the raw references, {signature}."
        )


@dataclass(frozen=True)
class EncoderDecoderRun(TrainingRun, ABC):
    """One ``lrpe_transformer`` with the same attention type and encoding in encoder and decoder.

    Cross-attention is stock unless a table sets ``model.cross.position_encoding``. A table names an
    option of one part as ``model.encoder.fidelity``, and of all parts as ``model.*.fidelity``.
    """

    @classmethod
    def keys_of(cls, option: str) -> list[str]:
        """Return the key of an option in every part that has it."""
        parts = HALVES if option.endswith("learned_pos") else PARTS
        return [option.replace("*", part) for part in parts] if "*" in option else [option]

    def encoding_choices(self) -> dict[str, str]:
        """Return attention and encoding of both halves, and the seed of all encodings."""
        # Its own option only if the table names it: stock cross-attention refuses the others.
        encoded = any(override.startswith(f"{CROSS}=") for override in self.overrides)
        choices = {
            "attention_type": self.attention_type,
            "position_encoding": self.position_encoding,
            "encoding_seed": str(self.seed),
        }
        chosen = {f"model.{half}.{key}": value for half in HALVES for key, value in choices.items()}
        return chosen | (self._choices_of_cross() if encoded else {})

    def _choices_of_cross(self) -> dict[str, str]:
        """Return the seed of an encoded cross-attention, and the decoder's options of its encoding.

        A YAML cannot say the latter, because fairseq's own cross-attention refuses them.
        """
        encoding = parse_overrides(self.overrides)[CROSS]
        decoder = self.yaml().model.get("decoder", {})
        # fairseq refuses options that nothing reads.
        read = (name for name in decoder if name in options_read_by(encoding))
        options = {f"model.cross.{name}": str(decoder[name]) for name in read}
        return {"model.cross.encoding_seed": str(self.seed), **options}

    @classmethod
    def _overrides(cls, cell: Cell, yaml: Any) -> tuple[str, ...]:
        """Return the overrides without those that fairseq's own cross-attention would refuse."""
        words = super()._overrides(cell, yaml)
        chosen = OmegaConf.merge(yaml, OmegaConf.from_dotlist(list(words)))
        config = checkpoints.dotted({"model": OmegaConf.to_container(chosen.model)})
        # Options that a table sets for all parts would reach stock cross-attention too.
        refused = {
            key for key in unread({CROSS: "none", **config}) if key.startswith("model.cross.")
        }
        return tuple(word for word in words if word.partition("=")[0] not in refused)


@dataclass(frozen=True)
class TranslationRun(EncoderDecoderRun):
    """One model; attention and encoding are those of the half that is not ``fixed``, or of both."""

    configs: ClassVar[str] = "translation"
    data_scripts: ClassVar[Mapping[str, str]] = {
        "multi30k": "data-prep/multi30k/prepare.py",
        "mixed-en-de": "data-prep/newstest/prepare.py --mixed --vocab-size 10000",
        "wmt14-en-de": "data-prep/wmt14-en-de/prepare.py",
    }
    next_step: ClassVar[str] = "evaluate with: scripts/eval_mt.sh {best} {data}"
    evaluations: tuple[tuple[str, str], ...] = (("valid", BEAM), ("test", BEAM))
    decoding: Decoding = Decoding()
    fixed: tuple[tuple[str, str], ...] = ()  # side, attention and encoding of one half

    @classmethod
    def fields_of(cls, table: Table) -> dict[str, Any]:
        """Return the half that all cells of the table share, if there is one."""
        return {"fixed": tuple(table.fixed.items())}

    def encoding_choices(self) -> dict[str, str]:
        """Return attention type and encoding of encoder and decoder as configuration keys."""
        chosen = super().encoding_choices()
        if fixed := dict(self.fixed):
            chosen[f"model.{fixed['side']}.attention_type"] = fixed["attention"]
            chosen[f"model.{fixed['side']}.position_encoding"] = fixed["encoding"]
        return chosen

    def measure(self, run: Shell) -> Run:
        """Return BLEU and chrF of every split of ``evaluations``, and what was averaged."""
        # Before they are averaged: a finished run deletes them.
        updates = list(checkpoints.periodic(self.checkpoints))[-self.decoding.average :]
        averaged, decoding = self._averaged()
        splits = [split for split, _ in self.evaluations]
        measured = measure(averaged, self.data, splits, decoding, self.folder, run)
        return {**measured, "averaged_updates": updates} if updates else measured

    def _averaged(self) -> tuple[Path, Decoding]:
        """Average the last checkpoints. A finished run has deleted them and left their average."""
        kept = self.checkpoints / checkpoints.AVERAGED
        # Evaluations that are added later must be of the same weights.
        if kept.exists() and not checkpoints.periodic(self.checkpoints):
            return kept, self.decoding
        return self.decoding.mean(self.checkpoints)


def measure(
    checkpoint: Path, data: Path, splits: Sequence[str], decoding: Decoding, logs: Path, run: Shell
) -> Run:
    """Return ``metrics`` and ``protocol`` of a checkpoint. logs: folder of the translations.

    Raises: RunFailed if the dictionaries differ from the checkpoint's, fairseq-generate fails (for
        example on a source that is too long), or a sentence is missing.
    """
    require_dictionaries(checkpoint, data)
    metrics: Run = {}
    for split in splits:
        log = logs / f"eval-{split}-{BEAM}.log"
        run(generate_command(checkpoint, data, split, decoding), log)
        metrics[split] = {}
        metrics[split][BEAM], signature = score(log, data, split)
    return {"metrics": metrics, "protocol": {BEAM: decoding.sentence(signature)}}


def require_dictionaries(checkpoint: Path, data: Path) -> None:
    """Raise RunFailed unless ``data`` has the dictionaries that the model was trained with."""
    known = manifest(data)
    if not known.get("languages") or "texts" not in known:
        raise RunFailed(
            f"{relative(data / 'manifest.json')} names no languages and texts to score with: "
            "prepare the data with a script of data-prep"
        )
    for part, language in zip(("encoder", "decoder"), known["languages"], strict=True):
        dictionary = data / "bin" / f"dict.{language}.txt"
        if not checkpoints.same_dictionary(
            checkpoint, f"{part}.embed_tokens.weight", dictionary, say=print
        ):
            raise RunFailed(
                f"{relative(dictionary)} is not the dictionary that {relative(checkpoint)} was "
                "trained with: evaluate it on its training data"
            )


def generate_command(checkpoint: Path, data: Path, split: str, decoding: Decoding) -> list[str]:
    """Return the fairseq-generate command; a bare --remove-bpe would not join the pieces."""
    return [
        str(BIN / "fairseq-generate"),
        relative(data / "bin"),
        *("--user-dir", "lrpe_fairseq"),
        *("--path", relative(checkpoint)),
        *("--gen-subset", split),
        *("--beam", str(decoding.beam)),
        *("--lenpen", str(decoding.length_penalty)),
        *("--remove-bpe", "sentencepiece"),
        *("--max-tokens", "4000"),
        *("--num-workers", "0"),
        # Its carriage returns would join lines of the log.
        "--no-progress-bar",
    ]


def score(log: Path, data: Path, split: str) -> tuple[dict[str, float], str]:
    """Return scores and signature of a log. Raises: RunFailed if a sentence is missing."""
    texts, languages = (manifest(data)[key] for key in ("texts", "languages"))
    reference = text_lines(side(data / texts[split], languages[1]).read_text(encoding="utf-8"))
    translations = hypotheses(log.read_text(encoding="utf-8"))
    # A missing sentence would shift all pairs after it, and BLEU with them.
    if sorted(translations) != list(range(len(reference))):
        raise RunFailed(
            f"{log}: only {len(translations)} of {len(reference)} sentences were translated"
        )
    translated = [translations[index] for index in range(len(reference))]
    return scores(translated, reference)


def scores(translated: Sequence[str], reference: Sequence[str]) -> tuple[dict[str, float], str]:
    """Return corpus BLEU and chrF of detokenized text, and BLEU's signature."""
    bleu = BLEU()
    chrf = CHRF()
    metrics = {
        "bleu": bleu.corpus_score(list(translated), [list(reference)]).score,
        "chrf": chrf.corpus_score(list(translated), [list(reference)]).score,
        "sentences": len(reference),
    }
    return metrics, str(bleu.get_signature())


def hypotheses(output: str) -> dict[int, str]:
    """Return sentence number -> best translation in the output of fairseq-generate."""
    # H-: hypothesis, with the number of the sentence; fairseq prints them by length.
    lines = (line.split("\t") for line in text_lines(output) if line.startswith("H-"))
    return {int(number.removeprefix("H-")): text for number, _, text in lines}


def text_lines(text: str) -> list[str]:
    """Split a text at newlines. Not ``splitlines``: newstest2009 has U+0085 inside lines."""
    return text.removesuffix("\n").split("\n")
