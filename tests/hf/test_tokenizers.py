"""Tokenizers give the indices that fairseq's data preparation gives, and the text back."""

import random

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

from fairseq.data import Dictionary
from transformers import AutoTokenizer

from lrpe_fairseq.errors import ChoiceError
from lrpe_fairseq.experiments.data import pieces
from lrpe_fairseq.hf.tokenizers import (
    KINDS,
    Source,
    build_tokenizer,
    find_source,
    kind_of,
    read_dictionary,
)
from tests.test_glue import gpt2_files

TEXT = "the cat sat on a mat , mats theory naïve über @-@ <unk> <unk>-ish ."
WORDS = TEXT.split()
STRANGE = ("漢字 é", "Ⅳ ﬁ", "\u2581x", "(((")
MODELS = {
    "bpe": ("bpe", 60, {}),
    "characters": ("char", 60, {}),
    "unigram": ("unigram", 36, {}),
    "bpe without a first space": ("bpe", 60, {"add_dummy_prefix": False}),
    "bpe that keeps spaces": ("bpe", 60, {"remove_extra_whitespaces": False}),
    "bpe with bytes": ("bpe", 300, {"byte_fallback": True}),
    "bpe of normalized text": ("bpe", 60, {"normalization_rule_name": "nmt_nfkc"}),
    "unigram of normalized text": ("unigram", 36, {"normalization_rule_name": "nmt_nfkc"}),
}


def sentence(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 10)))


def strange(rng):
    """A line with irregular spaces and characters that training has not seen."""
    line = sentence(rng) if rng.random() < 0.9 else ""
    line = line.replace(" ", "  ", 1) if rng.random() < 0.3 else line
    line = f" {line} " if rng.random() < 0.3 else line
    return f"{line} {rng.choice(STRANGE)}" if rng.random() < 0.3 else line


def reloaded(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def as_fairseq(dictionary, cut, lines):
    """Indices of a text: </s> at the beginning and after every line but the last."""
    found = [dictionary.eos()]
    for last, line in enumerate(cut, start=1 - len(lines)):
        encoded = dictionary.encode_line(line, append_eos=last != 0, add_if_not_exist=False)
        found += encoded.tolist()
    return found


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def sentencepiece(request, tmp_path_factory):
    """A prepared folder, its SentencePiece model, and fairseq's dictionary."""
    kind, size, options = request.param
    folder, rng = tmp_path_factory.mktemp("spm"), random.Random(0)
    lines = [sentence(rng) for _ in range(300)]
    for name in ("bin", "spm"):
        (folder / name).mkdir()
    pieces.train_sentencepiece(lines, folder / pieces.SPM, size, kind, **options)
    model = pieces.SentencePiece(folder / pieces.SPM)
    (folder / "train.txt").write_text("\n".join(model.cut(lines)) + "\n")
    pieces.write_dictionary(model, folder / "train.txt", folder / "bin" / "dict.txt")
    return folder, model, Dictionary.load(str(folder / "bin" / "dict.txt"))


def test_pieces_have_the_indices_of_sentencepiece_and_fairseq(sentencepiece, tmp_path):
    folder, model, dictionary = sentencepiece
    source, rng = find_source(folder), random.Random(1)
    assert list(source.symbols) == dictionary.symbols
    assert kind_of(source) == "sentencepiece"
    tokenizer = reloaded(build_tokenizer(source, len(dictionary)), tmp_path)
    for _ in range(200):
        lines = [strange(rng) for _ in range(rng.randint(1, 4))]
        expected = as_fairseq(dictionary, model.cut(lines), lines)
        assert tokenizer("\n".join(lines)).input_ids == expected, lines


def test_a_decoded_text_is_the_text(sentencepiece):
    folder, _, dictionary = sentencepiece
    tokenizer = build_tokenizer(find_source(folder), len(dictionary))
    text = "the cat sat on a mat , naïve"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    batch = tokenizer([text, "the"], padding=True).input_ids
    assert batch[1][0] == tokenizer.pad_token_id == 1
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 2


def words_folder(folder, lines):
    """A folder with the dictionary that fairseq-preprocess makes of lines."""
    dictionary = Dictionary()
    for line in lines:
        dictionary.encode_line(line)
    dictionary.finalize()
    dictionary.save(str(folder / "dict.txt"))
    return dictionary


def test_words_have_the_indices_of_fairseq(tmp_path):
    rng = random.Random(0)
    dictionary = words_folder(tmp_path, [sentence(rng) for _ in range(50)])
    source = find_source(tmp_path)
    assert kind_of(source) == "words"
    tokenizer = reloaded(build_tokenizer(source, len(dictionary)), tmp_path / "out")
    for _ in range(200):
        lines = [strange(rng) for _ in range(rng.randint(1, 4))]
        assert tokenizer("\n".join(lines)).input_ids == as_fairseq(dictionary, lines, lines), lines
    assert tokenizer.decode(tokenizer("the cat").input_ids, skip_special_tokens=True) == "the cat"


def test_characters_without_a_model_have_the_indices_of_fairseq(tmp_path):
    rng = random.Random(0)

    def cut(line):
        return " ".join(line.replace(" ", "\u2581"))

    lines = [sentence(rng).replace("<unk>", "") for _ in range(50)]
    dictionary = words_folder(tmp_path, map(cut, lines))
    source = find_source(tmp_path)
    assert kind_of(source) == "characters"
    tokenizer = reloaded(build_tokenizer(source, len(dictionary)), tmp_path / "out")
    for text in lines:
        text = " ".join(text.split())
        assert tokenizer(text).input_ids == as_fairseq(dictionary, [cut(text)], [text])
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_the_pieces_of_gpt2_have_the_indices_of_fairseq(tmp_path):
    gpt2 = pieces.GPT2(gpt2_files(tmp_path / "gpt2"))
    (tmp_path / "bin").mkdir()
    rng = random.Random(0)
    lines = [sentence(rng) for _ in range(50)]
    (tmp_path / "pieces").write_text("\n".join(gpt2.cut(lines)) + "\n")
    pieces.write_dictionary(gpt2, tmp_path / "pieces", tmp_path / "bin" / "dict.txt")
    dictionary = Dictionary.load(str(tmp_path / "bin" / "dict.txt"))
    source = find_source(tmp_path)
    assert kind_of(source) == "gpt2"
    tokenizer = reloaded(build_tokenizer(source, len(dictionary)), tmp_path / "out")
    for _ in range(200):
        lines = [strange(rng) for _ in range(rng.randint(1, 4))]
        expected = as_fairseq(dictionary, gpt2.cut(lines), lines)
        assert tokenizer("\n".join(lines)).input_ids == expected, lines
    text = "the naïve — cat"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_a_dictionary_without_all_pieces_of_gpt2_is_refused(tmp_path):
    gpt2_files(tmp_path / "gpt2")
    (tmp_path / "dict.txt").write_text("0 1\n1 1\n")
    with pytest.raises(ChoiceError, match=r"lacks 257 of the 259 pieces .* --tokenizer none"):
        build_tokenizer(find_source(tmp_path), 6)


def test_texts_of_a_masked_model_have_both_ends_and_a_mask(tmp_path):
    dictionary = words_folder(tmp_path, ["the cat sat"])
    mask = dictionary.add_symbol("<mask>")
    tokenizer = build_tokenizer(find_source(tmp_path), len(dictionary), masked=True)
    the, sat = dictionary.index("the"), dictionary.index("sat")
    assert tokenizer("the <mask> sat").input_ids == [0, the, mask, sat, 2]
    assert tokenizer.mask_token_id == mask
    assert tokenizer.padding_side == "right"


def test_a_text_may_begin_with_bos(tmp_path):
    words_folder(tmp_path, ["the cat"])
    tokenizer = build_tokenizer(find_source(tmp_path), 8, begin="<s>")
    assert tokenizer("the").input_ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_id == 2


def test_a_dictionary_is_numbered_as_fairseq_numbers_it(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text("a 3\nb 2\n<unk> 1 #fairseq:overwrite\nc d 1\n")
    dictionary = Dictionary.load(str(path))
    found = read_dictionary(path)
    assert len(found) == len(dictionary)
    assert {s: found.index(s) for s in ("a", "b", "<unk>", "c d")} == {
        s: dictionary.index(s) for s in ("a", "b", "<unk>", "c d")
    }


def test_a_choice_that_does_not_fit_the_data_is_refused(tmp_path):
    words_folder(tmp_path, ["the cat"])
    source = find_source(tmp_path)
    size = len(source.symbols)
    for kind in ("sentencepiece", "gpt2"):
        with pytest.raises(ChoiceError, match="choose another --tokenizer"):
            build_tokenizer(source, size, kind=kind)
    with pytest.raises(ChoiceError, match=f"choose one of {', '.join(KINDS)}"):
        build_tokenizer(source, size, kind="bytes")
    with pytest.raises(ChoiceError, match="has 8 symbols, but the model 9: pass --data"):
        build_tokenizer(Source(source.symbols), 9)
    with pytest.raises(ValueError, match=r"has no dict\.txt: pass --data"):
        find_source(tmp_path / "nothing")
