"""Every encoding and attention type of a language model: export, loading, decoding, padding."""

import filecmp

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
from transformers import AutoModelForCausalLM

from lrpe_fairseq.encodings import FAMILIES
from tests.end_to_end.cases import computes, each_encoding_once, sampled, usable
from tests.hf.models import (
    GREEDY,
    WITH_LOGITS,
    aligned,
    exported,
    in_float64,
    logits_of_steps,
    padded_left,
    random_words,
)

CLOSE = {"rtol": 1e-8, "atol": 1e-9}
"""In float64: a block and single tokens sum in another order, which small denominators amplify."""
FREE = [
    (attention, name)
    for prefix, family in FAMILIES.items()
    if prefix != "lrpe"
    for name in family.names
    for attention in ("linear", "softmax")
    if computes(attention, name) and (prefix, attention) != ("gated-channel", "softmax")
]
EVERY = sampled([*usable(), *FREE], each_encoding_once())
pytestmark = pytest.mark.parametrize(("attention", "encoding"), EVERY)


@torch.no_grad()
def test_the_exported_model_has_the_logits_of_fairseq_bit_for_bit(attention, encoding):
    made = exported(attention_type=attention, position_encoding=encoding)
    tokens = random_words(2, 17)
    tokens[1, 12:] = 1  # <pad>
    expected, real = made.fairseq(tokens)[0], tokens != 1
    assert expected.isfinite().all()
    found = aligned(made.model)(tokens).logits
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=0)
    found = made.model(tokens).logits  # as transformers maps the weights into memory
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_decoding_with_a_cache_is_decoding_without(attention, encoding):
    model = exported(attention_type=attention, position_encoding=encoding).model
    tokens, exact = random_words(2, 9), in_float64(model)
    cached, plain = (exact.generate(tokens, use_cache=use, **WITH_LOGITS) for use in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(logits_of_steps(cached), logits_of_steps(plain), **CLOSE)
    beams = [model.generate(tokens, num_beams=3, use_cache=use, **GREEDY) for use in (True, False)]
    assert torch.equal(*beams)


@torch.no_grad()
def test_a_row_padded_on_the_left_continues_as_it_does_alone(attention, encoding):
    model = in_float64(exported(attention_type=attention, position_encoding=encoding).model)
    rows = [random_words(1, length, seed=length)[0] for length in (9, 4)]
    tokens, mask = padded_left(rows)
    together = model.generate(tokens, attention_mask=mask, **WITH_LOGITS)
    for row, words in enumerate(rows):
        alone = model.generate(words[None], **WITH_LOGITS)
        found = logits_of_steps(together)[row : row + 1]
        torch.testing.assert_close(found, logits_of_steps(alone), **CLOSE)
        assert torch.equal(together.sequences[row, 9:], alone.sequences[0, len(words) :])


def test_a_loaded_model_is_saved_to_the_same_files(attention, encoding, tmp_path):
    made = exported(attention_type=attention, position_encoding=encoding)
    loaded = AutoModelForCausalLM.from_pretrained(made.folder)  # kerple clamps when it is used
    loaded.save_pretrained(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    expected = sorted(path.name for path in made.folder.iterdir() if path.name != "README.md")
    assert names == expected
    for name in names:
        assert filecmp.cmp(tmp_path / name, made.folder / name, shallow=False), name
