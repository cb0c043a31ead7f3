"""data-prep/algebraic: the tasks, their statistics, their splits, and the files for fairseq."""

import hashlib
import itertools
import math

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from numpy.random import RandomState

from lrpe_fairseq.experiments.data import transduction
from lrpe_fairseq.experiments.data.corpus import write_indexed
from lrpe_fairseq.experiments.data.transduction import Recipe, Tree

SPLITS = ("train", "valid", "test")


def recipe(task, scale="tiny", order="depth", **options):
    return Recipe(task, scale, order if task.startswith("tree") else "", **options)


def drawn(task, scale="paper", count=1500):
    draw, rng = transduction.sampler(recipe(task, scale)), RandomState(7)
    return [draw(rng) for _ in range(count)]


def node(label, left, right):
    return Tree(label, tuple(Tree(c) if isinstance(c, str) else c for c in (left, right)))


def random_tree(seed, depth=6):
    rng = RandomState(seed)
    leaf, operator = (lambda: rng.choice(["l1", "l2", "l3"]), lambda: rng.choice(["o1", "o2"]))
    return transduction.labeled(transduction.random_shape(rng, depth), leaf, operator)


def term(tree):
    return f"{tree.label}({', '.join(map(term, tree.children))})" if tree.children else tree.label


def height(tree):
    return 1 + max(map(height, tree.children)) if tree.children else 0


def in_order(tree):
    if not tree.children:
        return [tree.label]
    left, right = map(in_order, tree.children)
    return [*left, tree.label, *right]


def depths(samples, side):
    """Depths from the codes: depth d has the codes 2^d - 1 .. 2^(d+1) - 2."""
    return [(max(getattr(s, side).codes) + 1).bit_length() - 1 for s in samples]


@pytest.mark.parametrize("seed", range(5))
def test_codes_follow_the_path_from_the_root_in_both_orders(seed):
    tree = random_tree(seed)

    def at(code):
        """The node of a code, found through its ancestors."""
        return at((code - 1) // 2).children[(code - 1) % 2] if code else tree

    breadth, depth = (list(transduction.ORDERS[order](tree)) for order in ("breadth", "depth"))
    for found in (breadth, depth):
        assert all(at(code) is node for node, code in found)
        assert len({code for _, code in found}) == len(in_order(tree))
        for place, (_, code) in enumerate(found[1:], start=1):  # readable from left to right
            assert (code - 1) // 2 in {earlier for _, earlier in found[:place]}
    codes = [code for _, code in breadth]
    assert codes == sorted(codes)
    places = [path(code) for _, code in depth]
    assert places == sorted(places)


def path(code):
    return [*path((code - 1) // 2), (code - 1) % 2] if code else []


def test_rotation_and_truncation_by_hand():
    """A truncated tree ends at the root of a subtree."""
    tree = node("r", node("p", node("a", "l1", "l2"), "l3"), node("b", node("c", "l4", "l5"), "l6"))
    assert term(transduction.rotate(tree)) == "p(a(l1, l2), r(l3, c(l4, b(l5, l6))))"
    left_is_a_leaf = node("r", "l1", node("p", node("a", "l2", "l3"), "l4"))
    assert transduction.rotate(left_is_a_leaf) == left_is_a_leaf
    assert term(transduction.truncate(tree, "p")) == "r(p, b(c(l4, l5), l6))"


def value(tree):
    return sum(int(label[1:]) - 1 for label in in_order(tree) if label[0] == "l") % 3


@pytest.mark.parametrize("seed", range(5))
def test_reduction_keeps_the_value_and_removes_one_level(seed):
    tree = random_tree(seed)
    reduced = transduction.reduce_c3(tree)
    assert value(reduced) == value(tree)
    assert height(reduced) == height(tree) - 1
    pairs = sum(bool(n.children) and not any(c.children for c in n.children) for n in nodes(tree))
    assert len(nodes(reduced)) == len(nodes(tree)) - 2 * pairs


def nodes(tree):
    return [node for node, _ in transduction.depth_first(tree)]


def test_tree_ops_samples_answer_their_command():
    seen = set()
    for sample in drawn("tree-ops", count=200):
        source, target = (dict(zip(s.codes, s.tokens, strict=True)) for s in sample)
        command, chosen = source[0], source[1]
        given, answer = subtree_at(source, 2), subtree_at(target, 0)
        labels = [n.label for n in nodes(given)]
        assert len(labels) == len(set(labels))
        subtree = next(n for n in nodes(given) if n.label == chosen)
        expected = {
            "o:extract": subtree,
            "o:flip": Tree(subtree.label, subtree.children[::-1]),
            "o:truncate": transduction.truncate(given, chosen),
            "o:keep": given,
        }
        assert answer == expected[command]
        seen.add(command)
    assert len(seen) == 4


def subtree_at(label, code):
    below = [subtree_at(label, c) for c in (2 * code + 1, 2 * code + 2) if c in label]
    return Tree(label[code], tuple(below))


def close(found, mean, digits=0.05):
    """True if the mean of ``found`` is ``mean`` within 4 standard errors and its rounding."""
    return abs(np.mean(found) - mean) <= 4 * np.std(found) / math.sqrt(len(found)) + digits


TREES = {  # nodes of source and target at the paper's sizes, measured on the published code
    "tree-copy": (33.1, 33.1),
    "tree-rotate": (33.1, 33.1),
    "tree-c3": (33.1, 20.6),
    "tree-ops": (26, 13.6),
}


@pytest.mark.parametrize("task", TREES)
def test_trees_have_the_sizes_of_the_published_data(task):
    samples = drawn(task)
    for side, mean in zip(transduction.SIDES, TREES[task], strict=True):
        assert close([len(getattr(s, side).tokens) for s in samples], mean, 0.5)
    assert close(depths(samples, "source"), 6.5)
    assert set(depths(samples, "source")) <= set(range(2, 13))


CHECKSUMS = {
    "copy": "641e5a9f44f9734c",
    "repeat": "3e627792b069291d",
    "reverse": "0358297b777f9dba",
    "tree-copy": "30c08704312e8b6f",
    "tree-rotate": "05657b59800e63ab",
    "tree-c3": "7ef7cf190a2e3318",
    "tree-ops": "0dc7fdd83ebf6c8b",
}


@pytest.mark.parametrize("task", transduction.TASKS)
def test_no_input_of_a_split_occurs_in_another_and_samples_are_the_same_on_every_machine(task):
    """A numpy whose streams differ would make other data under the same name."""
    splits = transduction.generate(recipe(task))
    assert [len(splits[split]) for split in SPLITS] == [256, 64, 64]
    inputs = [{sample.source.tokens for sample in splits[split]} for split in SPLITS]
    for one, other in itertools.combinations(inputs, 2):
        assert one.isdisjoint(other)
    rows = [[(*sample.source, *sample.target) for sample in own] for own in splits.values()]
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == CHECKSUMS[task]


def test_fairseq_reads_tokens_and_a_code_for_each(tmp_path):
    transduction.prepare(tmp_path, recipe("tree-rotate"))
    words = Dictionary.load(str(tmp_path / "bin" / "dict.source.txt"))
    assert len(words) == 4 + 6
    samples = transduction.generate(recipe("tree-rotate"))
    for split in SPLITS:
        for side in transduction.SIDES:
            prefix = str(tmp_path / "bin" / f"{split}.source-target.{side}")
            tokens = data_utils.load_indexed_dataset(prefix, words, "mmap")
            codes = data_utils.load_indexed_dataset(f"{prefix}-positions", None, "mmap")
            assert (tokens.sizes == codes.sizes).all()
            for number in range(0, len(tokens), 9):
                given = getattr(samples[split][number], side)
                assert words.string(tokens[number]) == " ".join(given.tokens)
                assert codes[number].tolist() == [*given.codes, 0]
                assert str(codes[number].dtype) == "torch.int64"


def test_codes_beyond_32_bits_are_stored_exactly(tmp_path):
    write_indexed([[0, 2**62 + 1], [3]], tmp_path / "codes", np.int64)
    found = data_utils.load_indexed_dataset(str(tmp_path / "codes"), None, "mmap")
    assert [row.tolist() for row in found] == [[0, 2**62 + 1], [3]]
