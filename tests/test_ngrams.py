"""N-grams beside language models: Kneser-Ney, caches, mixtures, and their run files."""

import json
import math
import shutil
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from lrpe_fairseq.experiments.commands import ngrams as command
from lrpe_fairseq.experiments.commands import quickstart
from lrpe_fairseq.experiments.data import corpus, ngrams
from lrpe_fairseq.experiments.families import ngrams as measured
from lrpe_fairseq.experiments.records.protocols import Protocol
from lrpe_fairseq.experiments.records.runs import read_run, validate

SYMBOLS = 60


def text(length, seed=0, symbols=SYMBOLS):
    """Symbols of which few are frequent."""
    return np.minimum(np.random.default_rng(seed).zipf(1.4, length) - 1, symbols - 1)


def followed_by_every_symbol(context, symbols=SYMBOLS):
    """The context and each symbol after it, one text per row."""
    return [np.append(context, symbol) for symbol in range(symbols)]


@pytest.mark.parametrize(("tokens", "length"), [(40, 8), (43, 8), (0, 8), (7, 8), (1, 1)])
def test_random_blocks_are_whole_blocks_of_the_text_in_its_order(tokens, length):
    train = np.arange(203)
    found, starts = ngrams.random_blocks(train, tokens, length)
    assert len(found) == tokens
    assert (np.diff(found) > 0).all()
    assert (starts == 1 + np.flatnonzero(np.diff(found) > 1)).all()
    by_block = Counter((found // length).tolist())
    # the last block is cut, and so is the end of the text
    assert sum(n < length for n in by_block.values()) <= (tokens % length > 0) + 1
    assert (found == ngrams.random_blocks(train, tokens, length)[0]).all()
    if tokens > length:
        assert (found != train[:tokens]).any()


def test_all_tokens_of_a_text_are_the_text_in_one_piece():
    for tokens in (203, 1000):
        found, starts = ngrams.random_blocks(np.arange(203), tokens, 8)
        assert (found == np.arange(203)).all()
        assert not len(starts)


def test_no_n_gram_reads_from_one_piece_into_the_next():
    """Counts of pieces are those of texts apart, between symbols that occur nowhere else."""
    whole, starts, symbols = text(60), np.array([17, 18, 40]), SYMBOLS
    keys, ids = ngrams.count_keys(whole, symbols, 4, starts)
    pieces = np.split(whole, starts)
    for order in range(1, 5):
        wanted = Counter(
            tuple(piece[n : n + order]) for piece in pieces for n in range(len(piece) - order + 1)
        )
        known = ids[order - 1][ids[order - 1] != ngrams.UNSEEN]
        assert sorted(Counter(known.tolist()).values()) == sorted(wanted.values())
        assert keys.size(order) == (symbols if order == 1 else len(wanted))


@pytest.fixture(scope="module")
def model():
    return ngrams.KneserNey(text(1500), SYMBOLS, orders=4)


CONTEXTS = [
    *(text(1500)[50 * n : 50 * n + 5] for n in range(4)),
    *(text(5, seed) for seed in (1, 2, 3)),
    np.array([], np.int64),
]


@pytest.mark.parametrize("context", CONTEXTS, ids=range(len(CONTEXTS)))
def test_kneser_ney_sums_to_one_after_seen_and_unseen_contexts(model, context):
    rows = followed_by_every_symbol(context)
    total = sum(model.probabilities(row)[:, -1] for row in rows)
    assert total == pytest.approx(np.ones(4), abs=1e-12)


def plain_kneser_ney(train, test, symbols, orders):
    """Chen and Goodman's estimate, word by word, with dictionaries."""
    grams = {n: Counter(tuple(train[i : i + n]) for i in range(len(train) - n + 1))
             for n in range(1, orders + 1)}  # fmt: skip
    types = {n: Counter(gram[1:] for gram in grams[n + 1]) for n in range(1, orders)}

    def estimate(order, highest, context, word):
        if order == 0:
            return 1 / symbols
        counts = grams[order] if order == highest else types[order]
        of = Counter(counts.values())
        y = of[1] / (of[1] + 2 * of[2])
        taken = {i: i - (i + 1) * y * of[i + 1] / of[i] for i in (1, 2, 3)}
        after = {g[-1]: c for g, c in counts.items() if g[:-1] == context}
        below = estimate(order - 1, highest, context[1:], word)
        if not after:
            return below
        share = max(after.get(word, 0) - taken[min(after[word], 3)], 0) if word in after else 0
        lost = sum(taken[min(count, 3)] for count in after.values())
        return (share + lost * below) / sum(after.values())

    found = np.zeros((orders, len(test)))
    for n in range(1, orders + 1):
        for i, word in enumerate(test):
            known = min(n, i + 1)  # the first tokens have shorter contexts
            context = tuple(test[i - known + 1 : i])
            found[n - 1, i] = estimate(known, n, context, word)
    return found


def test_kneser_ney_equals_a_plain_loop():
    train, test = text(900, symbols=300), text(60, seed=1, symbols=350)
    found = ngrams.KneserNey(train, 350, orders=3).probabilities(test)
    expected = plain_kneser_ney(train.tolist(), test.tolist(), 350, 3)
    assert found == pytest.approx(expected, rel=1e-10)


def test_the_discounts_are_those_of_chen_and_goodman():
    counts = np.repeat([1, 2, 3, 4, 9], [40, 12, 6, 4, 3])
    y = 40 / (40 + 2 * 12)
    expected = [0, 1 - 2 * y * 12 / 40, 2 - 3 * y * 6 / 12, 3 - 4 * y * 4 / 6]
    assert ngrams.discounts(counts) == pytest.approx(expected)
    assert ngrams.discounts(np.array([5, 5])) == pytest.approx([0, 1, 2, 3])  # no n-gram is rare


def test_every_symbol_has_a_chance_in_a_text_of_a_few_tokens():
    model = ngrams.KneserNey(np.array([1, 2, 1, 2, 1]), 5, orders=3)
    for row in followed_by_every_symbol([1, 2], 5):
        assert (model.probabilities(row)[:, -1] > 0).all()


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 7, 500])
def test_a_cache_counts_what_followed_the_same_tokens_among_the_last_ones(order, window):
    words, context = text(200, symbols=6).tolist(), order - 1
    found, defined = ngrams.cached(np.array(words), 6, order, window)
    for i, word in enumerate(words):
        followers = [
            words[j]
            for j in range(max(i - window, context), i)
            if words[j - context : j] == words[i - context : i]
        ]
        assert defined[i] == bool(followers)
        share = followers.count(word) / len(followers) if followers else 0.0
        assert found[i] == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("context", [CONTEXTS[0], text(80), np.array([1]), CONTEXTS[-1]])
def test_a_mixture_sums_to_one_whatever_its_caches_have_seen(model, context):
    mixture = ngrams.Mixture(model, 3, 50, text(400, seed=4))
    total = sum(mixture.probabilities(row)[-1] for row in followed_by_every_symbol(context))
    assert total == pytest.approx(1.0, abs=1e-12)


def test_caches_help_where_a_text_repeats_itself(model):
    held_out = np.tile(text(40, seed=5), 10)
    mixture = ngrams.Mixture(model, 3, 50, held_out)
    alone = ngrams.loss(model.probabilities(held_out)[2])
    assert ngrams.loss(mixture.probabilities(held_out)) < alone / 3


def test_the_weights_maximize_the_likelihood():
    parts = np.random.default_rng(0).uniform(0.01, 1, (2, 500)) * [[1.0], [0.7]]
    weights = ngrams.fitted(parts)
    likelihood = [np.log([w, 1 - w] @ parts).sum() for w in np.linspace(0, 1, 1001)]
    assert weights[0] == pytest.approx(np.argmax(likelihood) / 1000, abs=0.002)
    assert ngrams.fitted(np.stack([parts[0], 0 * parts[0]])) == pytest.approx([1, 0])


def test_symbols_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="symbols outside 0 to 4"):
        ngrams.KneserNey(np.array([1, 5]), 5)


# --- run files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared data folder of three splits, in lines of 50 tokens."""
    folder = tmp_path_factory.mktemp("ngrams") / "letters"
    (folder / "bin").mkdir(parents=True)
    sizes = {"train": 3000, "valid": 600, "test": 650}
    for seed, (split, size) in enumerate(sizes.items()):
        rows = text(size, seed, SYMBOLS - 4).reshape(-1, 50) + 4
        corpus.write_indexed(rows, folder / "bin" / split, np.uint16)
    symbols = [f"s{n} 1" for n in range(SYMBOLS - corpus.FAIRSEQ_SPECIALS)]
    (folder / "bin" / "dict.txt").write_text("\n".join(symbols) + "\n")
    counts = {split: {"tokens": size} for split, size in sizes.items()}
    known = {"corpus": "letters", "level": "char", "splits": counts}
    (folder / "manifest.json").write_text(json.dumps(known))
    return folder


def test_the_tokens_of_a_split_are_read_in_order(data):
    assert (corpus.read_tokens(data / "bin" / "valid") == text(600, 1, SYMBOLS - 4) + 4).all()
    assert len(corpus.read_tokens(data / "bin" / "valid", 70)) == 70


def test_n_grams_are_counted_in_all_shards(data, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(data, folder)
    for shard in ("shard0", "shard1"):
        shutil.copytree(data / "bin", folder / "bin" / shard)
    for path in [p for p in (folder / "bin").iterdir() if p.is_file()]:
        path.unlink()
    assert measured.by_hand(folder, None, 8, ()).tokens == 6000
    train = measured.Corpus(folder).split("train")
    assert (train[:3000] == train[3000:]).all()
    assert len(measured.Corpus(folder).split("valid")) == 600


def test_the_command_writes_the_perplexities_on_the_tokens_of_every_protocol(
    data, tmp_path, capsys
):
    out = tmp_path / "run.json"
    given = [str(data), "--tokens", "2000", "--length", "8", "--out", str(out)]
    assert command.main([*given, "--protocols", "blocks-8", "paired-64"]) == 0
    run = read_run(out)
    validate(run)
    assert (run["dataset"], run["config"]["ngrams.tokens"]) == ("letters-char", 2000)
    train, test = (corpus.read_tokens(data / "bin" / split) for split in ("train", "test"))
    blocks, starts = ngrams.random_blocks(train, 2000, 8)
    model = ngrams.KneserNey(blocks, SYMBOLS, starts=starts)
    every = model.probabilities(test)
    for name in ("blocks-8", "paired-64"):
        windows = Protocol.parse(name).windows(len(test), 8)
        places = [place for w in windows for place in range(w.first, w.end)]
        found = run["metrics"]["test"][name]
        assert found["tokens"] == len(places)
        for order in range(1, 7):
            mean = -np.log(every[order - 1, places]).mean()
            assert found[f"ppl-{order}"] == pytest.approx(math.exp(mean))
        assert found["ppl"] == found[f"ppl-{found['order']}"]
        mixture = ngrams.Mixture(
            model, found["order"], int(name[-2:].strip("-")), corpus.read_tokens(data / "bin/valid")
        )
        own = -np.log(mixture.probabilities(test)[places]).mean()
        assert found["cache-ppl"] == pytest.approx(math.exp(own))
        assert found["cache-window"] == {"blocks-8": 8, "paired-64": 64}[name]
    assert "with a cache of 64 tokens" in capsys.readouterr().out


def test_the_quickstart_shows_n_grams_of_the_text_that_its_models_have_read(data):
    run = replace(quickstart.planned(1)[0], data=data)
    wanted = measured.by_hand(data, 3000, 128, (("test", "blocks"),))
    [expected] = (own["metrics"]["test"]["blocks"] for own in measured.measure([wanted]))
    counts = quickstart.counted(run)
    *orders, cache = counts
    assert orders == [f"{n}-grams" for n in range(2, 7)]
    assert [counts[name] for name in orders] == [expected[f"ppl-{n}"] for n in range(2, 7)]
    assert cache.endswith("with a cache of 128 characters")
    assert counts[cache] == expected["cache-ppl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--tokens", "0"], "--tokens must be"), (["--length", "0"], "--length must be"),
     (["--protocols", "repeated-48"], "repeated spans"),
     (["--protocols", "paired-64+yarn-4"], "rotations to scale")],
)  # fmt: skip
def test_a_wrong_option_of_the_command_is_refused(data, words, said, capsys):
    with pytest.raises(SystemExit):
        command.main([str(data), *words])
    assert said in capsys.readouterr().err


def test_tables_without_a_language_model_on_the_data_are_refused_in_a_sentence(data, capsys):
    assert command.main([str(data), "--tables"]) != 0
    assert "no table trains a language model on data named letters" in capsys.readouterr().err


def test_the_tables_need_n_grams_of_the_tokens_that_each_training_reads(data, monkeypatch):
    renamed = data.parent / "wikitext-2-bpe"
    if not renamed.exists():
        renamed.symlink_to(data)
    monkeypatch.setattr(corpus, "row_lengths", lambda prefix: np.array([2_963_485]))
    wanted = measured.yardsticks(renamed)
    sizes = defaultdict(set)
    for one in wanted:
        sizes[one.length].add(one.tokens)
    # 1,800, 5,400 and 16,200 updates of 1,024 tokens; the last read the text more than once
    assert sizes[256] >= {1_843_200, 2_963_485}
    assert sizes[128] == {1_843_200, 2_963_485}
    short = next(one for one in wanted if (one.length, one.tokens) == (128, 1_843_200))
    assert ("test", "paired-2048") in short.evaluations
    assert not any("+" in name or "repeated" in name for _, name in short.evaluations)
    assert short.result.name == "letters-char-1843200-in-128.json"
