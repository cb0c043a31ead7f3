"""Tokenizers: sentencepiece trained on the corpus, or GPT-2's published byte-level BPE.

A prepared corpus includes its tokenizer, so that fine-tuning data can be tokenized like the
pre-training data.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from lrpe_fairseq.experiments.records.console import UserError

SPM, GPT2_FOLDER = "spm/spm.model", "gpt2"
GPT2_FILES = ("encoder.json", "vocab.bpe")


class Tokenizer(Protocol):
    """Splits lines of text into pieces that contain no space."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that define the tokenizer."""

    def vocabulary(self) -> list[str]:
        """Return all pieces."""

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Yield each line as pieces separated by spaces; an empty line stays empty."""


class SentencePiece:
    """A sentencepiece model."""

    def __init__(self, model: Path) -> None:
        """Load the model file."""
        import sentencepiece

        self.files = (model,)
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def vocabulary(self) -> list[str]:
        """Return all pieces except the unknown one, which fairseq's dictionary adds."""
        spm = self._processor
        indices = range(spm.get_piece_size())
        return [spm.id_to_piece(index) for index in indices if not spm.is_unknown(index)]

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Yield each line as pieces separated by spaces."""
        for pieces in self._processor.encode(list(lines), out_type=str, num_threads=threads):
            yield " ".join(pieces)


class GPT2:
    """The byte-level BPE of GPT-2 and RoBERTa; pieces are written as numbers, as in fairseq."""

    def __init__(self, folder: Path) -> None:
        """Load ``encoder.json`` and ``vocab.bpe``."""
        self.files = tuple(folder / file for file in GPT2_FILES)
        self._encoder = _gpt2_encoder(*self.files)

    def vocabulary(self) -> list[str]:
        """Return the numbers of all 50,257 pieces."""
        return [str(number) for number in sorted(self._encoder.decoder)]

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Yield each line as numbers separated by spaces; ``threads`` is ignored."""
        for line in lines:
            yield " ".join(map(str, self._encoder.encode(line)))


def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a prepared corpus. Raises: UserError if it has none."""
    if (folder / SPM).is_file():
        return SentencePiece(folder / SPM)
    if all((folder / GPT2_FOLDER / file).is_file() for file in GPT2_FILES):
        return GPT2(folder / GPT2_FOLDER)
    raise UserError(
        f"{folder} has no tokenizer: prepare it with data-prep/wikitext/prepare.py "
        f"--level bpe or --level gpt2."
    )


def _gpt2_encoder(encoder: Path, merges: Path) -> Any:
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    return get_encoder(str(encoder), str(merges))
