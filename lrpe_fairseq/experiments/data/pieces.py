"""Tokenizers: sentencepiece trained on the corpus, or GPT-2's published byte-level BPE.

A prepared corpus includes its tokenizer, so that fine-tuning data can be tokenized like the
pre-training data.
"""

import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.records.console import UserError
from lrpe_fairseq.experiments.records.files import atomic_write

SPM, GPT2_FOLDER = "spm/spm.model", "gpt2"
UNKNOWN_WORD = "<unk>"  # replaces rare words in WikiText; also fairseq's unknown symbol
MIRRORS = (
    "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/",
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/",
)
SHA256 = {  # of GPT-2's files
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


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
        # A second <unk> would shift all ids of the model.
        return [spm.id_to_piece(index) for index in indices if not spm.is_unknown(index)]

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Yield each line as pieces separated by spaces; an empty line stays empty."""
        for pieces in self._processor.encode(list(lines), out_type=str, num_threads=threads):
            yield " ".join(pieces)


class GPT2:
    """The byte-level BPE of GPT-2 and RoBERTa; pieces are written as numbers, as in fairseq."""

    def __init__(self, folder: Path) -> None:
        """Load ``encoder.json`` and ``vocab.bpe``."""
        from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

        self.files = tuple(folder / file for file in SHA256)
        self._encoder = get_encoder(*map(str, self.files))

    def vocabulary(self) -> list[str]:
        """Return the numbers of all 50,257 pieces."""
        return [str(number) for number in sorted(self._encoder.decoder)]

    def cut(self, lines: Sequence[str], threads: int = 1) -> Iterator[str]:
        """Yield each line as numbers separated by spaces; ``threads`` is ignored."""
        for line in lines:
            yield " ".join(map(str, self._encoder.encode(line)))


Tokenizer = SentencePiece | GPT2


def obtain_gpt2(dest: Path, from_dir: Path | None, sha256: Mapping[str, str] = SHA256) -> GPT2:
    """Return the verified tokenizer, whose files are written to the data folder ``dest``.

    Raises: UserError if a file is missing, truncated or another version.
    """
    folder = dest / GPT2_FOLDER
    for file, checksum in sha256.items():
        prep.obtain(file, [mirror + file for mirror in MIRRORS], checksum, folder, from_dir)
    return GPT2(folder)


def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a prepared corpus. Raises: UserError if it has none."""
    if (folder / SPM).is_file():
        return SentencePiece(folder / SPM)
    if all((folder / GPT2_FOLDER / file).is_file() for file in SHA256):
        return GPT2(folder / GPT2_FOLDER)
    raise UserError(
        f"{folder} has no tokenizer: prepare it with data-prep/wikitext/prepare.py "
        f"--level bpe or --level gpt2."
    )


def train_sentencepiece(
    lines: Iterable[str],
    model: Path,
    vocab_size: int,
    kind: str = "bpe",
    option: str = "--vocab-size",
    **options: Any,
) -> None:
    """Train a sentencepiece model in one thread, so that the result is deterministic.

    There is no Unicode normalization, every character has a piece, and the ``<unk>`` of the corpus
    is one piece, so that pieces and words encode the same text.

    Args:
        vocab_size: the number of pieces; at most that many with ``kind="char"``.
        kind: "bpe", or "char" for one piece per character, with ``▁`` for a space.
        options: further options of sentencepiece's trainer; they replace those here.

    Raises: UserError if the text has too few pieces for ``vocab_size``.
    """
    import sentencepiece

    trained = io.BytesIO()
    characters = kind == "char"
    chosen = {
        "model_type": kind,
        "vocab_size": vocab_size,
        "hard_vocab_limit": not characters,
        "add_dummy_prefix": not characters,  # a space before the first word of a line
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        "max_sentence_length": 1 << 20,  # the default drops lines above 4,192 bytes
        # With more threads the pieces differ from call to call.
        "num_threads": 1,
        "bos_id": -1,
        "eos_id": -1,
        "user_defined_symbols": [] if characters else [f"▁{UNKNOWN_WORD}"],
        "minloglevel": 2,
        **options,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for line in lines if line), model_writer=trained, **chosen
        )
    except RuntimeError as error:
        raise UserError(
            f"sentencepiece cannot make {vocab_size} pieces: choose {option} {_possible(error)}."
        ) from None
    with atomic_write(model, "wb") as out:
        out.write(trained.getvalue())


def _possible(error: RuntimeError) -> str:
    """Return which numbers of pieces are possible; sentencepiece says it in its error only."""
    largest = re.search(r"value <= (\d+)", str(error))
    return f"at most {largest[1]}" if largest else f"another number ({error})"


def encode(tokenizer: Tokenizer, source: Path, target: Path, threads: int = 1) -> None:
    """Encode ``source`` line by line as pieces; empty lines are kept."""
    lines = prep.read_lines(source)
    # In batches: sentencepiece encodes a list in several threads, and a corpus does not fit.
    batches = iter(lambda: list(itertools.islice(lines, 20_000)), [])
    cut = (tokenizer.cut(batch, threads) for batch in batches)
    prep.write_lines(target, itertools.chain.from_iterable(cut))


def write_dictionary(tokenizer: Tokenizer, train_pieces: Path, target: Path) -> None:
    """Write a fairseq dictionary of all pieces of a tokenizer, most frequent first.

    fairseq-preprocess would list only the pieces in the encoded train split. A piece that BPE
    always merges there, but not in another split, would become ``<unk>``.
    """
    counts = Counter(p for line in prep.read_lines(train_pieces) for p in line.split())
    # Frequent pieces first, which adaptive softmax and adaptive inputs need; ties by name, so that
    # it is deterministic.
    pieces = sorted(tokenizer.vocabulary(), key=lambda piece: (-counts[piece], piece))
    filler = -(len(pieces) + prep.FAIRSEQ_SPECIALS) % 8  # as fairseq pads its dictionaries
    pieces += [f"madeupword{i:04d}" for i in range(filler)]
    prep.write_lines(target, (f"{piece} {counts[piece]}" for piece in pieces))


def run_sentencepiece(
    steps: prep.Steps, texts: Mapping[str, Path], vocab_size: int, kind: str = "bpe"
) -> SentencePiece:
    """Step: train ``spm/spm.model`` on ``texts``."""
    model = steps.dest / SPM

    def make() -> None:
        lines = itertools.chain.from_iterable(map(prep.read_lines, texts.values()))
        train_sentencepiece(lines, model, vocab_size, kind)

    reads = {**texts, "vocab_size": vocab_size, **({} if kind == "bpe" else {"kind": kind})}
    steps.run("train sentencepiece", reads, [model], make)
    return SentencePiece(model)


def run_pieces(
    steps: prep.Steps, texts: Mapping[str, Path], tokenizer: Tokenizer, workers: int = 1
) -> None:
    """Steps: write ``pieces/`` with the tokenizer's dictionary, then ``bin/``."""
    dictionary = steps.dest / "pieces" / "dict.txt"
    pieces = {split: steps.dest / "pieces" / f"{split}.txt" for split in texts}

    def encode_all() -> None:
        for split, text in texts.items():
            encode(tokenizer, text, pieces[split], workers)
        write_dictionary(tokenizer, pieces["train"], dictionary)

    reads = {**texts, **{file.name: file for file in tokenizer.files}}
    steps.run("encode", reads, [*pieces.values(), dictionary], encode_all)
    steps.binarize(pieces, dictionary, workers)
