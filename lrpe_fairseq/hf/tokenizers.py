"""Fast tokenizers that give a text the indices which fairseq's data preparation gave it.

fairseq's dictionary numbers the symbols; a tokenizer of transformers numbers its own pieces.
Here the pieces get the numbers of the dictionary. A line break is the symbol </s>, with which
fairseq ends every line.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from lrpe_fairseq.errors import ChoiceError

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
"""The first symbols of every dictionary of fairseq; dict.txt does not list them."""
BOS, PAD, EOS, UNK = SPECIALS
MASK = "<mask>"
"""The symbol that fairseq's masked_lm appends to the dictionary."""
SPACE = "\u2581"
"""How SentencePiece, and our data of characters, write a space."""
SPM, GPT2 = Path("spm/spm.model"), Path("gpt2")
"""Tokenizers in a data folder of this repository."""
GPT2_FILES = ("encoder.json", "vocab.bpe")
OVERWRITE = "#fairseq:overwrite"
IMPOSSIBLE = -1e6
"""Score of a piece that SentencePiece never uses."""


class Source(NamedTuple):
    """Where the texts of a model came from.

    symbols: of the dictionary, by index. spm: a SentencePiece model. gpt2: the folder of
    ``encoder.json`` and ``vocab.bpe``. At most one of the two is given.
    """

    symbols: tuple[str, ...]
    spm: Path | None = None
    gpt2: Path | None = None


def find_source(data: Path) -> Source:
    """Return the dictionary and the tokenizer of a folder that fairseq reads, or of its parents.

    data: the folder of ``dict.txt``, or a prepared folder whose ``bin`` has it.
    Raises: ValueError, one sentence, if there is no dictionary.
    """
    dictionary = find_dictionary(data)
    symbols = read_dictionary(dictionary)
    for folder in list(dictionary.parents)[:3]:
        if (folder / SPM).is_file():
            return Source(symbols, spm=folder / SPM)
        if all((folder / GPT2 / file).is_file() for file in GPT2_FILES):
            return Source(symbols, gpt2=folder / GPT2)
    return Source(symbols)


def find_dictionary(data: Path) -> Path:
    """Return ``dict.txt`` of a data folder; see :func:`find_source`."""
    for folder in (data, data / "bin", data / "bin" / "shard0"):
        if (folder / "dict.txt").is_file():
            return folder / "dict.txt"
    raise ValueError(
        f"{data} has no dict.txt: pass --data with the folder of the training data, or "
        "--tokenizer none"
    )


def read_dictionary(path: Path) -> tuple[str, ...]:
    """Return the symbols of a dictionary of fairseq by index, as ``Dictionary.load`` numbers them.

    A symbol that a later line overwrites has no name any more.
    """
    symbols = list(SPECIALS)
    places = {symbol: index for index, symbol in enumerate(symbols)}
    for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
        symbol, _, field = line.rpartition(" ")
        if field == OVERWRITE:
            symbol = symbol.rpartition(" ")[0]
        if symbol in places:
            symbols[places[symbol]] = f"<overwritten {places[symbol]}>"
        places[symbol] = len(symbols)
        symbols.append(symbol)
    return tuple(symbols)


def kind_of(source: Source) -> str:
    """Return the kind of a tokenizer, a key of :data:`KINDS`, by its files and its dictionary.

    Symbols of one character, with one for a space, are characters; other symbols are words.
    """
    if source.spm is not None:
        return "sentencepiece"
    if source.gpt2 is not None:
        return "gpt2"
    own = [symbol for symbol in source.symbols if symbol not in (*SPECIALS, MASK)]
    single = all(len(symbol) == 1 for symbol in own if not symbol.startswith("madeupword"))
    return "characters" if single and SPACE in own else "words"


def build_tokenizer(
    source: Source, size: int, *, kind: str = "auto", masked: bool = False, begin: str = EOS
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model.

    Args:
        size: number of symbols that the model has.
        kind: a key of :data:`KINDS`, or "auto"; see :func:`kind_of`.
        masked: True for a masked language model: <s> text </s>, and a <mask> after the dictionary.
        begin: the symbol before a text of a language model.
    Raises: ChoiceError for an unknown kind, or if the dictionary has another size than the model
        or lacks pieces of the tokenizer.
    """
    symbols = [*source.symbols, MASK] if masked else source.symbols
    if len(symbols) != size:
        raise ChoiceError(
            f"the dictionary has {len(symbols)} symbols, but the model {size}: pass --data with "
            "the folder of its training data"
        )
    kind = kind_of(source) if kind == "auto" else kind
    if kind not in KINDS:
        raise ChoiceError(f"unknown tokenizer {kind!r}; choose one of {', '.join(KINDS)}")
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = KINDS[kind](vocabulary, source)
    tokenizer.add_special_tokens([AddedToken(EOS, normalized=True, special=True)])
    first = BOS if masked else begin
    last = f" {EOS}" if masked else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A{last}",
        pair=f"{first} $A {EOS} $B{last}",
        special_tokens=[(symbol, vocabulary[symbol]) for symbol in (BOS, EOS)],
    )
    return _wrapped(tokenizer, first, masked)


def _wrapped(tokenizer: Tokenizer, first: str, masked: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers with the names of the special symbols.

    The unknown symbol is not among them, because "<unk>" within a text, such as WikiText's, would
    be cut out of its word.
    """
    eos = AddedToken(EOS, normalized=True, special=True)
    names: dict[str, Any] = {"pad_token": PAD, "eos_token": eos}
    names["bos_token"] = eos if first == EOS else first
    if masked:
        names |= {"mask_token": MASK, "cls_token": BOS, "sep_token": eos}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="right" if masked else "left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


# --- kinds of tokenizers --------------------------------------------------------------------------


def _words(vocabulary: Mapping[str, int], source: Source) -> Tokenizer:
    """Words between whitespace, as ``fairseq-preprocess`` splits lines."""
    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=UNK))
    tokenizer.normalizer = normalizers.Replace("\n", EOS)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _characters(vocabulary: Mapping[str, int], source: Source) -> Tokenizer:
    """Characters, with one for a space; a run of unknown ones is one unknown symbol."""
    spaces = normalizers.Sequence(_spaces(prefix=False))
    return _pieces(vocabulary, [], spaces, prefix=False)


def _pieces(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    spaces: normalizers.Normalizer,
    prefix: bool,
    byte_fallback: bool = False,
) -> Tokenizer:
    """Byte-pair encoding of characters."""
    tokenizer = Tokenizer(
        models.BPE(
            dict(vocabulary),
            list(merges),
            unk_token=UNK,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    tokenizer.normalizer = spaces
    tokenizer.decoder = _decoder(prefix, byte_fallback)
    return tokenizer


def _decoder(prefix: bool, byte_fallback: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " ")]
    steps += [decoders.ByteFallback()] if byte_fallback else []
    steps += [decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if prefix else []
    return decoders.Sequence(steps)


def _spaces(
    prefix: bool,
    collapse: bool = True,
    symbols: Sequence[str] = (),
    charsmap: bytes = b"",
) -> list[normalizers.Normalizer]:
    """Return the steps that write every line of a text as SentencePiece does, and its end as </s>.

    Args:
        prefix: a space before each line that is not empty.
        collapse: one space for several, and none around a line.
        symbols: defined by the user. They and </s> are normalized as well before they are searched,
            and must not change.
        charsmap: SentencePiece's normalization of characters, compiled.
    """
    kept = "|".join(map(re.escape, (EOS, *symbols)))
    line = f"(?!(?:{kept})\\z)(?!{EOS})(?=[\\s\\S])"  # begins here
    steps: list[normalizers.Normalizer] = [normalizers.Replace("\n", EOS)]
    steps += [normalizers.Precompiled(charsmap)] if charsmap else []
    if prefix:
        steps += [
            normalizers.Replace(Regex(f"\\A{line}"), " "),
            normalizers.Replace(Regex(f"{EOS}(?!\\z|{EOS})"), f"{EOS} "),
        ]
    if collapse:
        steps += [
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(f" (?={EOS}|\\z)"), ""),
        ]
    if collapse and not prefix:
        steps += [
            normalizers.Replace(Regex("\\A "), ""),
            normalizers.Replace(f"{EOS} ", EOS),
        ]
    return [*steps, normalizers.Replace(" ", SPACE)]


def _gpt2(vocabulary: Mapping[str, int], source: Source) -> Tokenizer:
    """GPT-2's byte-level pieces, which fairseq's dictionary lists by their numbers."""
    encoder, merges = _gpt2_files(source)
    missing = [piece for piece, number in encoder.items() if str(number) not in vocabulary]
    if missing:
        raise ChoiceError(
            f"the dictionary lacks {len(missing)} of the {len(encoder)} pieces of GPT-2, so it is "
            "no dictionary of all pieces: choose --tokenizer none"
        )
    numbers = {str(number): piece for piece, number in encoder.items()}
    named = {numbers.get(symbol, symbol): index for symbol, index in vocabulary.items()}
    tokenizer = Tokenizer(models.BPE(named, merges))
    tokenizer.normalizer = normalizers.Replace("\n", EOS)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2_files(source: Source) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the numbers of GPT-2's pieces and its merges, in order."""
    if source.gpt2 is None:
        raise ChoiceError(f"the data have no {GPT2}/{GPT2_FILES[0]}: choose another --tokenizer")
    encoder_file, merges_file = (source.gpt2 / file for file in GPT2_FILES)
    encoder = json.loads(encoder_file.read_text(encoding="utf-8"))
    lines = merges_file.read_text(encoding="utf-8").split("\n")[1:]
    pairs = (line.split() for line in lines)
    return encoder, [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


# --- SentencePiece --------------------------------------------------------------------------------


def _sentencepiece(vocabulary: Mapping[str, int], source: Source) -> Tokenizer:
    """A SentencePiece model of kind bpe, char or unigram, with the numbers of the dictionary."""
    model = _read_spm(source)
    given, trained = model.normalizer_spec, model.trainer_spec
    if trained.treat_whitespace_as_suffix:
        raise ChoiceError(
            f"{source.spm} writes spaces at the ends of words, which is not exported: choose "
            "--tokenizer none"
        )
    of_user = [p.piece for p in model.pieces if p.type == p.Type.Value("USER_DEFINED")]
    symbols = [piece for piece in of_user if piece in vocabulary]
    prefix = given.add_dummy_prefix
    steps = _spaces(prefix, given.remove_extra_whitespaces, symbols, given.precompiled_charsmap)
    spaces, kinds = normalizers.Sequence(steps), trained.ModelType
    if trained.model_type == kinds.Value("UNIGRAM"):
        tokenizer = _unigram(vocabulary, model, spaces, prefix)
    elif trained.model_type in (kinds.Value("BPE"), kinds.Value("CHAR")):
        is_bpe = trained.model_type == kinds.Value("BPE")
        merges = _merges(model, vocabulary) if is_bpe else []
        tokenizer = _pieces(vocabulary, merges, spaces, prefix, trained.byte_fallback)
    else:
        raise ChoiceError(f"{source.spm} is no model of kind bpe, char or unigram")
    tokenizer.add_tokens([AddedToken(s, normalized=True, special=False) for s in symbols])
    return tokenizer


def _read_spm(source: Source) -> Any:
    """Return a SentencePiece model as its protocol buffer."""
    if source.spm is None:
        raise ChoiceError(f"the data have no {SPM}: choose another --tokenizer")
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ChoiceError(
            f"a SentencePiece model needs sentencepiece and protobuf ({error}): pip install "
            "sentencepiece protobuf"
        ) from None
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(source.spm.read_bytes())
    return model


def _merges(model: Any, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a model of kind bpe, best first: the pairs of pieces that are a piece.

    SentencePiece merges the pair whose union has the highest score.
    """
    normal = model.SentencePiece.Type.Value("NORMAL")
    scores = {p.piece: p.score for p in model.pieces if p.type == normal and p.piece in vocabulary}
    found = [
        (-score, vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _unigram(
    vocabulary: Mapping[str, int],
    model: Any,
    spaces: normalizers.Normalizer,
    prefix: bool,
) -> Tokenizer:
    """Return a unigram model; symbols that are no pieces have an impossible score."""
    normal = model.SentencePiece.Type.Value("NORMAL")
    scores = {p.piece: p.score for p in model.pieces if p.type == normal}
    pieces = [(symbol, scores.get(symbol, IMPOSSIBLE)) for symbol in vocabulary]
    fallback = model.trainer_spec.byte_fallback
    tokenizer = Tokenizer(models.Unigram(pieces, vocabulary[UNK], fallback))
    tokenizer.normalizer = spaces
    tokenizer.decoder = _decoder(prefix, fallback)
    return tokenizer


KINDS: dict[str, Callable[[Mapping[str, int], Source], Tokenizer]] = {
    "characters": _characters,
    "words": _words,
    "sentencepiece": _sentencepiece,
    "gpt2": _gpt2,
}
"""The tokenizers by kind: functions of symbol -> index, and of the source."""
