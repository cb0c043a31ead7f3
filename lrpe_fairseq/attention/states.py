"""What a state of attention belongs to: it continues a text of one layer only.

Axes: B batch.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.encodings.core.protocols import EncodingSpec


class Owner(NamedTuple):
    """A layer as far as its states depend on it. Layers of one model may be equal in all of it."""

    kind: str
    """"self-attention" or "cross-attention"."""
    attention_type: str
    normalizer: str
    encoding: str
    spec: EncodingSpec
    window: int | None
    parts: frozenset[str]
    kv_heads: int

    def __str__(self) -> str:
        """Name what a reader would compare."""
        with_normalizer = f" and {self.normalizer}" if self.attention_type == "linear" else ""
        said = (
            f"{self.attention_type} {self.kind} with {self.encoding}{with_normalizer}, "
            f"{self.spec.num_heads} heads of width {self.spec.head_dim}"
        )
        if self.kv_heads != self.spec.num_heads:
            said += f" and {self.kv_heads} of keys and values"
        said += "" if self.window is None else f" and a window of {self.window}"
        return said + "".join(f", {part}" for part in sorted(self.parts))


def check_owner(state: Any, kinds: type | tuple[type, ...], owner: Owner, x: Tensor) -> None:
    """Refuse what is no state of this layer and batch; x: (B, T, C). No value is read.

    The last field of a state is its owner. A state without one, which no layer made, is checked
    for its batch and device only.
    Raises: ValueError, in one sentence.
    """
    if not isinstance(state, kinds):
        _refuse(f"it is an object of type {type(state).__name__}", owner)
    if state.owner is not None and state.owner != owner:
        same = str(state.owner) == str(owner)
        its = "the same with other options of the encoding" if same else str(state.owner)
        _refuse(f"it is of {its}", owner)
    # beam search must have reordered a state before its rows are those of x
    rows = len(state.next_position)
    if rows != len(x):
        _refuse(f"it has {rows} texts, and x has {len(x)}", owner)
    for part in _tensors(state[:-1]):
        if part.device != x.device:
            _refuse(f"it is on {part.device}, and x is on {x.device}", owner)


def _refuse(why: str, owner: Owner) -> None:
    raise ValueError(
        f"the state belongs to another layer or batch than this {owner}: {why}; pass what attend "
        "returned for the block before, or None at the beginning of a text"
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a state, which is a tuple of tensors, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
