"""Tokenizers: sentencepiece trained on the corpus, or GPT-2's published byte pairs.

A prepared corpus keeps its tokenizer, so that other text can be tokenized the same way: a
model is fine-tuned on the pieces that it was pre-trained on.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from lrpe_fairseq.experiments.records.console import UserError

SPM, GPT2_FOLDER = "spm/spm.model", "gpt2"
GPT2_FILES = ("encoder.json", "vocab.bpe")


class Tokenizer(Protocol):
    """Cuts lines of text into pieces without blanks."""

    @property
    def files(self) -> tuple[Path, ...]:
        """What it is read from."""

    def vocabulary(self) -> list[str]:
        """Every piece there can be."""

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Each line as pieces separated by blanks; an empty one stays empty."""


class SentencePiece:
    """A sentencepiece model."""

    def __init__(self, model: Path) -> None:
        """Load the model."""
        import sentencepiece

        self.files = (model,)
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def vocabulary(self) -> list[str]:
        """Every piece but the unknown one, which is fairseq's own."""
        spm = self._processor
        indices = range(spm.get_piece_size())
        return [spm.id_to_piece(index) for index in indices if not spm.is_unknown(index)]

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Each line as pieces separated by blanks."""
        for pieces in self._processor.encode(list(lines), out_type=str, num_threads=threads):
            yield " ".join(pieces)


class GPT2:
    """The byte-level BPE of GPT-2, which RoBERTa shares: pieces are its numbers, as in fairseq."""

    def __init__(self, folder: Path) -> None:
        """Load ``encoder.json`` and ``vocab.bpe``."""
        self.files = tuple(folder / file for file in GPT2_FILES)
        self._encoder = _gpt2_encoder(*self.files)

    def vocabulary(self) -> list[str]:
        """The numbers of all its 50,257 pieces."""
        return [str(number) for number in sorted(self._encoder.decoder)]

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Each line as numbers separated by blanks; ``threads`` has no effect."""
        for line in lines:
            yield " ".join(map(str, self._encoder.encode(line)))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a prepared corpus. Raises: UserError if it keeps none."""
    if (folder / SPM).is_file():
        return SentencePiece(folder / SPM)
    if all((folder / GPT2_FOLDER / file).is_file() for file in GPT2_FILES):
        return GPT2(folder / GPT2_FOLDER)
    raise UserError(
        f"{folder} keeps no tokenizer: prepare it with data-prep/wikitext/prepare.py "
        f"--level bpe or --level gpt2."
    )


def _gpt2_encoder(encoder: Path, merges: Path) -> Any:
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    return get_encoder(str(encoder), str(merges))
