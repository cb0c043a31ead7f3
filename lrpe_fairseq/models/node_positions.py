"""Positions of the nodes of binary trees from their tokens, for decoding.

A tree is written as a sequence of labels: an operator, whose label starts with "o", has two
children, and any other label is a leaf. The code of a node then follows from the tokens before it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.encodings.domains import ORDERS, Walk
from lrpe_fairseq.errors import ChoiceError

BRANCHES = 2
OPERATOR = "o"
STATE = "node_positions"
"""Key of an incremental state."""


class Prefixes(NamedTuple):
    """The trees of a batch of prefixes of ``length`` tokens, one walk for each row."""

    walks: list[Walk]
    length: int


class NodeRule:
    """The codes of the tokens of ``dictionary``, for trees that are written in ``order``.

    Padding, start and end of a sentence are no nodes and have code 0. So have the tokens after the
    end of a tree. An operator whose children have no int64 code ends its tree.
    """

    def __init__(self, dictionary: Any, order: str) -> None:
        self.order, self.unknown = order, dictionary.unk()
        self._arities = [BRANCHES * s.startswith(OPERATOR) for s in dictionary.symbols]
        self._others = {dictionary.pad(), dictionary.bos(), dictionary.eos()}

    def codes(self, tokens: Iterable[int]) -> list[int]:
        """Return the codes of the tokens of one sentence."""
        return self._place(Walk(BRANCHES, self.order), tokens)

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the codes of sentences (B, T), int64, with padding anywhere.

        Raises: ChoiceError for a sentence that is not one whole tree of known labels.
        """
        rows = tokens.tolist()
        for number, row in enumerate(rows, 1):
            nodes = [token for token in row if token not in self._others]
            if self.unknown in nodes or not self._is_tree(nodes):
                raise ChoiceError(
                    f"sentence {number} of the batch is not a tree of labels of the dictionary: an "
                    "operator (o...) has two children and a leaf none"
                )
        return torch.tensor([self.codes(row) for row in rows], device=tokens.device)

    def _is_tree(self, nodes: list[int]) -> bool:
        """True if the last node, and none before it, completes the tree, in either order."""
        missing = 1
        for token in nodes:
            if missing == 0:
                return False
            missing += self._arities[token] - 1
        return missing == 0

    def following(self, prefixes: Tensor, incremental_state: dict) -> Tensor:
        """Return the codes (B, 1) of the last tokens of ``prefixes`` (B, T), int64.

        ``incremental_state`` stores the trees of the prefixes; :func:`reorder` follows beams.
        """
        known = incremental_state.get(STATE)
        if known is None:
            known = Prefixes([Walk(BRANCHES, self.order) for _ in prefixes], 0)
        pairs = zip(known.walks, prefixes[:, known.length :].tolist(), strict=True)
        codes = [self._place(walk, tokens)[-1:] for walk, tokens in pairs]
        incremental_state[STATE] = Prefixes(known.walks, prefixes.shape[1])
        return torch.tensor(codes, device=prefixes.device)

    def _place(self, walk: Walk, tokens: Iterable[int]) -> list[int]:
        return [0 if token in self._others else self._next(walk, token) for token in tokens]

    def _next(self, walk: Walk, token: int) -> int:
        try:
            return walk.place(self._arities[token])
        except ValueError:  # too deep
            walk.end()
            return 0


def reorder(incremental_state: dict, new_order: Tensor) -> None:
    """Continue the trees of the rows ``new_order`` (B',), each on its own."""
    known = incremental_state.get(STATE)
    if known is not None:
        walks = [known.walks[row].copy() for row in new_order.tolist()]
        incremental_state[STATE] = known._replace(walks=walks)


def rule_of(dictionary: Any, sentences: Sequence[tuple[list[int], list[int]]]) -> NodeRule:
    """Return the rule that gives all ``sentences``, pairs of tokens and codes, their codes.

    Raises: ChoiceError if there is none.
    """
    for order in ORDERS:
        rule = NodeRule(dictionary, order)
        if all(rule.codes(tokens) == codes for tokens, codes in sentences):
            return rule
    raise ChoiceError(
        "decoding with --node-positions needs labels that tell operators (o...) from leaves and "
        "trees in one order; these trees are not (tree-ops has operators at leaves): use "
        "fairseq-validate"
    )
