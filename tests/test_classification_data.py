"""Data of classifiers: digits, MNIST, ListOps and the bytes of SST-2."""

import hashlib
import lzma
from dataclasses import replace

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lrpe_fairseq.experiments.data import corpus as prep
from lrpe_fairseq.experiments.data import examples
from lrpe_fairseq.experiments.data.examples import Examples
from lrpe_fairseq.experiments.records.console import UserError
from tests.test_data_prep import counted, load, unpacked

sst2, digits, listops, mnist = map(load, ("sst2-bytes", "digits", "listops", "mnist5k"))
LENGTHS, SYMBOLS = listops.LENGTHS, listops.SYMBOLS


def stored(bin_dir, split, end):
    """The examples that fairseq reads, as numbers of the dictionary."""
    lengths = prep.row_lengths(bin_dir / "input0" / split)
    ids = np.fromfile(bin_dir / "input0" / f"{split}.bin", dtype=np.uint16)
    rows = np.split(ids.astype(int), np.cumsum(lengths)[:-1])
    assert all((row[-1] == prep.FAIRSEQ_EOS) == end for row in rows)
    inputs = [(row[: -1 if end else None] - prep.FAIRSEQ_SPECIALS).tolist() for row in rows]
    return Examples(inputs, examples.labels_of(bin_dir / "label" / split).tolist())


def labeled(own):
    """Pairs of an input and its label."""
    return [(tuple(row), label) for row, label in zip(own.inputs, own.labels, strict=True)]


def test_the_digits_are_those_of_scikit_learn_in_disjoint_stratified_splits(tmp_path):
    assert digits.main(["--dest", str(tmp_path)]) == 0
    known, found = load_digits(), []
    whole = Examples((15 * known.data.astype(int)).tolist(), known.target.tolist())
    for split, size in examples.DIGITS.sizes.items():
        own = stored(tmp_path / "bin", split, end=False)
        assert len(own.labels) == size
        share = np.bincount(own.labels) / np.bincount(known.target)
        assert np.abs(share - size / len(known.target)).max() < 0.01
        found += labeled(own)
    assert sorted(found) == sorted(labeled(whole))
    manifest = prep.Steps(tmp_path, "digits", "8x8").old
    assert manifest["splits"]["test"]["tokens"] == 540 * 64
    assert manifest["classes"] == 10


def test_mnist_has_its_own_test_set_and_validation_is_part_of_training(tmp_path):
    rng, md5, known = np.random.RandomState(0), {}, []
    for count, (images, labels) in ((40, list(mnist.MD5)[:2]), (10, list(mnist.MD5)[2:])):
        pixels, classes = rng.randint(0, 256, (count, 28, 28)), np.arange(count) % 10
        for name, values in ((images, pixels), (labels, classes)):
            shape = np.array(values.shape, ">i4").tobytes()
            content = bytes([0, 0, 8, values.ndim]) + shape + values.astype(np.uint8).tobytes()
            (tmp_path / f"{name}.xz").write_bytes(lzma.compress(content))
            md5[name] = hashlib.md5(content).hexdigest()
        rows = pixels.reshape(count, -1).tolist()
        known.append(sorted(labeled(Examples(rows, classes.tolist()))))
    made = mnist.prepare_whole(tmp_path / "data", tmp_path, md5=md5, held_out=10)
    train, valid, test = (
        labeled(stored(tmp_path / "data" / "bin", split, end=False)) for split in prep.SPLITS
    )
    assert sorted(train + valid) == known[0]
    assert sorted(c for _, c in valid) == list(range(10))
    assert sorted(test) == known[1]
    assert (made["corpus"], made["level"]) == ("mnist", "28x28")
    (tmp_path / f"{images}.xz").write_bytes(lzma.compress(b"other"))
    with pytest.raises(UserError, match="is truncated or not the expected version"):
        mnist.prepare_whole(tmp_path / "no", tmp_path, md5=md5)


def value(tokens):
    """The value of an expression, by a stack of open operators; independent of the generator."""
    operators = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda *numbers: int(np.median(numbers)),
        "[SM": lambda *numbers: sum(numbers) % 10,
    }
    stack: list[list] = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([operators[token]])
        elif token == "]":
            operator, *given = stack.pop()
            stack[-1].append(operator(*given))
        else:
            stack[-1].append(int(token))
    ((found,),) = stack
    return found


def test_expressions_have_their_values_and_lengths_and_none_occurs_twice():
    sizes = {"train": 1_000, "valid": 300, "test": 300}
    short = listops.generate(replace(LENGTHS["20-100"], sizes=sizes), 1)
    long = listops.generate(replace(LENGTHS["100-400"], sizes={"train": 60}), 1)
    for own in [*short.values(), *long.values()]:
        for tokens, label in labeled(own):
            assert value([SYMBOLS[token] for token in tokens]) == label
    rows = [tuple(row) for split in short.values() for row in split.inputs]
    assert len(set(rows)) == len(rows) == 1_600
    assert min(map(len, rows)) == 21
    assert max(map(len, rows)) < 100


def test_expressions_are_stored_as_tokens_and_are_the_same_on_every_machine(tmp_path, monkeypatch):
    recipe = replace(LENGTHS["20-100"], sizes={"train": 30, "valid": 10, "test": 10})
    monkeypatch.setitem(LENGTHS, "tiny", recipe)
    manifest, made = listops.prepare(tmp_path, "tiny"), listops.generate(recipe, 1)
    rows = [(own.inputs, own.labels) for own in made.values()]
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == "572702d711276eef"
    words = [w.split()[0] for w in prep.read_lines(tmp_path / "bin/input0/dict.txt")]
    assert words == SYMBOLS
    own = stored(tmp_path / "bin", "train", end=False)
    assert (own.inputs, own.labels) == rows[0]
    assert manifest["splits"]["train"]["root"] >= manifest["splits"]["train"]["majority"]


def test_sst2_is_stored_byte_by_byte_and_valid_is_held_out_of_train(tmp_path):
    phrases = [f"phrase {n} is “{'good' if n % 2 else 'bad'}” " for n in range(40)]
    for name, chosen in (("train", phrases[:30]), ("dev", phrases[30:])):
        rows = "".join(f"{p}\t{phrases.index(p) % 2}\n" for p in chosen)
        content = f"sentence\tlabel\n{rows}".encode()
        unpacked(tmp_path / "from" / "SST-2", {f"{name}.tsv": content})
    manifest = sst2.prepare(tmp_path / "dest", tmp_path / "from")
    assert counted(manifest, "examples") == {"train": 27, "valid": 3, "test": 10}
    known = {}
    for split in prep.SPLITS:
        own = stored(tmp_path / "dest" / "bin", split, end=True)
        texts = [bytes(row).decode() for row in own.inputs]
        assert [phrases.index(f"{text} ") % 2 for text in texts] == own.labels
        known[split] = texts
    assert known["test"] == [phrase.strip() for phrase in phrases[30:]]
    assert sorted(known["train"] + known["valid"]) == sorted(p.strip() for p in phrases[:30])
