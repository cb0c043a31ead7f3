"""The interface of ``generate`` and ``forward``: caches, their names, and what is refused."""

import copy

import pytest

pytest.importorskip("transformers", reason="the extra [hf] is not installed")

import torch
from torch.nn import functional as F
from transformers import DynamicCache, GenerationConfig, StaticCache

from lrpe_fairseq.hf.cache import CACHE_NAME, StateLayer, state_layer
from tests.hf.models import GREEDY, exported, padded_left, random_words

MIXED = {
    "attention_type": "linear,softmax",
    "position_encoding": "fox,rope",
    "no_token_positional_embeddings": True,
}
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def model():
    return exported(**MIXED).model


def cache_of(out):
    return out[CACHE_NAME]


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache_continue_a_text(model, name):
    tokens = random_words(2, 10)
    first = model(tokens[:, :6], use_cache=True)
    second = model(tokens[:, 6:], **{name: cache_of(first)})
    found = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(found, model(tokens).logits, **CLOSE)


def test_an_unknown_argument_is_refused_and_not_dropped(model):
    cache = cache_of(model(random_words(1, 4), use_cache=True))
    for name in ("layer_past", "cache_params", "position_ids"):
        with pytest.raises(TypeError, match=f"does not support the argument {name}: leave it out"):
            model(random_words(1, 1), **{name: cache})
    with pytest.raises(ValueError, match="two names of one argument"):
        model(random_words(1, 1), cache=cache, past_key_values=cache)
    with pytest.raises(TypeError, match="output_attentions"):
        model(random_words(1, 1), output_attentions=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("penalty_alpha", 0.6),
        ("prompt_lookup_num_tokens", 3),
        ("assistant_model", "itself"),
    ],
)
def test_decoding_that_must_forget_tokens_is_refused_in_one_sentence(model, option, value):
    given = {option: model if value == "itself" else value, "top_k": 4}
    with pytest.raises(ValueError, match=rf"cannot forget the last tokens: leave out {option}$"):
        model.generate(random_words(1, 4), **given)
    if option != "assistant_model":
        config = GenerationConfig(max_new_tokens=2, **given)
        with pytest.raises(ValueError, match="cannot forget"):
            model.generate(random_words(1, 4), generation_config=config)


def test_a_cache_that_cannot_hold_states_is_refused(model):
    tokens = random_words(1, 4)
    static = StaticCache(config=model.config, max_cache_len=8)
    filled = DynamicCache()
    filled.update(torch.ones(1, 4, 2, 8), torch.ones(1, 4, 2, 8), 0)
    for cache in (static, filled, object()):
        with pytest.raises(ValueError, match="cannot hold the states of lrpe_fairseq's attention"):
            model(tokens, **{CACHE_NAME: cache})
    for implementation in ("static", "offloaded"):
        with pytest.raises(ValueError, match="leave out cache_implementation"):
            model.generate(tokens, cache_implementation=implementation, **GREEDY)
    with pytest.raises(NotImplementedError, match="cannot forget its last tokens"):
        cache_of(model(tokens, use_cache=True)).crop(-1)


def test_a_mask_must_have_two_axes_and_all_tokens(model):
    for mask in (torch.ones(1, 1, 4, 4), torch.ones(1, 3)):
        with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, S\)"):
            model(random_words(1, 4), attention_mask=mask)


def test_tokens_or_their_embeddings_are_needed(model):
    for given in ({}, {"input_ids": random_words(1, 2), "inputs_embeds": torch.ones(1, 2, 32)}):
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model(**given)


@torch.no_grad()
def test_a_layer_of_the_cache_selects_repeats_and_forgets_rows(model):
    tokens = random_words(2, 5)
    cache = cache_of(model(tokens, use_cache=True))
    assert cache.get_seq_length() == 5
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    found = model(random_words(2, 1), **{CACHE_NAME: cache}).logits
    whole = torch.cat([tokens[[1, 0]], random_words(2, 1)], 1)
    torch.testing.assert_close(found[:, -1], model(whole).logits[:, -1], **CLOSE)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model(tokens, **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(again, model(tokens).logits, **CLOSE)


@torch.no_grad()
def test_a_copied_cache_of_a_prompt_serves_several_continuations(model):
    prompt, rest = random_words(1, 6), random_words(2, 3, seed=5)
    cache = cache_of(model(prompt, use_cache=True))
    for words in rest:
        whole = torch.cat([prompt, words[None]], 1)
        found = model.generate(whole, **{CACHE_NAME: copy.deepcopy(cache)}, **GREEDY)
        assert torch.equal(found, model.generate(whole, use_cache=False, **GREEDY))


@torch.no_grad()
def test_beams_of_a_padded_batch_are_those_of_each_row_alone(model):
    rows = [random_words(1, n, seed=n)[0] for n in (7, 2)]
    tokens, mask = padded_left(rows)
    given = {"num_beams": 3, "num_return_sequences": 2, **GREEDY}
    together = model.generate(tokens, attention_mask=mask, **given)
    for row, words in enumerate(rows):
        alone = model.generate(words[None], **given)[:, len(words) :]
        assert torch.equal(together[2 * row : 2 * row + 2, 7:], alone)


@torch.no_grad()
def test_sampling_with_one_seed_is_the_same_with_and_without_a_cache(model):
    found = []
    for use in (True, False):
        torch.manual_seed(3)
        tokens = random_words(2, 5)
        found.append(model.generate(tokens, do_sample=True, max_new_tokens=9, use_cache=use))
    assert torch.equal(*found)


@torch.no_grad()
def test_the_symbol_pad_is_padding_without_a_mask(model):
    tokens, mask = padded_left([random_words(1, n, seed=n)[0] for n in (7, 2)])
    expected = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=0)


@torch.no_grad()
def test_embeddings_may_replace_tokens_and_few_logits_may_be_kept(model):
    tokens = random_words(2, 7)
    expected = model(tokens).logits
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    torch.testing.assert_close(embedded, expected, rtol=0, atol=0)
    kept = model(tokens, logits_to_keep=2).logits
    torch.testing.assert_close(kept, expected[:, -2:], **CLOSE)
    some = torch.tensor([0, 4])
    torch.testing.assert_close(
        model(tokens, logits_to_keep=some).logits, expected[:, some], **CLOSE
    )


@torch.no_grad()
def test_hidden_states_are_the_inputs_of_all_layers_and_the_features(model):
    tokens = random_words(2, 7)
    out = model(tokens, output_hidden_states=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 7, 32)] * 3
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits, rtol=0, atol=0)
    assert isinstance(model(tokens, return_dict=False), tuple)


@torch.no_grad()
def test_the_loss_is_that_of_the_next_token(model):
    tokens = random_words(2, 7)
    labels = tokens.clone()
    labels[0, :3] = -100
    out = model(tokens, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


def test_an_empty_layer_of_transformers_is_replaced_at_its_first_use():
    cache = DynamicCache()
    assert isinstance(state_layer(cache, 2), StateLayer)
    assert len(cache.layers) == 3


@torch.no_grad()
def test_a_text_beyond_the_learned_positions_is_refused():
    model = exported(decoder_learned_pos=True).model
    with pytest.raises(ValueError, match="learned positions for 32 tokens: cut longer texts"):
        model(random_words(1, 33))


@pytest.mark.parametrize("encoding", ["spe", "tape", "lrpe-type2"])
def test_gradients_are_those_of_fairseq(encoding):
    made = exported(attention_type="softmax", position_encoding=encoding)
    tokens = random_words(2, 8)
    found = []
    for module in (made.fairseq, made.model):
        module = copy.deepcopy(module).train()
        torch.manual_seed(0)  # of SPE's noise
        out = module(tokens)
        logits = out[0] if isinstance(out, tuple) else out.logits
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        found.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    ours = {name.replace("model.", "decoder."): grad for name, grad in found[1].items()}
    assert ours.keys() == found[0].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-6)
