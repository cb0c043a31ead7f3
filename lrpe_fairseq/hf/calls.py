"""One call of a model: what its arguments say of the tokens, and attention on them.

Axes: B batch, T time, C width.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.tokens import restarted
from lrpe_fairseq.hf.cache import StateLayer


class Call(NamedTuple):
    """The tokens of one forward pass, shared by all layers.

    padding: (B, T), true at padding; None without. one_sided: the padding of a row is all before
    or all after its tokens. starts: bool (B, T), true at tokens that begin a document; None for
    one document.
    """

    padding: Tensor | None = None
    one_sided: bool = False
    starts: Tensor | None = None


def padding_of(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Return the padding (B, T) of the last ``length`` tokens of a mask, or None without padding.

    attention_mask: (B, S), 0 at padding, of the tokens and of those before them.
    Raises: ValueError for a mask of other axes or of fewer tokens.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask must have shape (B, S), 1 at tokens and 0 at padding, for at least "
            f"{length} tokens, got {tuple(attention_mask.shape)}"
        )
    padding = attention_mask[:, -length:] == 0
    # a compiler cannot trace what depends on a value
    return padding if torch.compiler.is_compiling() or padding.any() else None


def is_one_sided(padding: Tensor | None) -> bool:
    """True if the padding of every row is all before or all after its tokens."""
    if padding is None:
        return True
    if torch.compiler.is_compiling():
        return False  # not known
    changes = (padding[:, 1:] != padding[:, :-1]).sum(1)
    return bool((changes <= 1).all())


def positions_of(like: Tensor, call: Call, before: Tensor | None) -> Tensor:
    """Return the number of real tokens before each token of its document, int64 (B, T).

    like: (B, T, ...). before: int64 (B,), of the document that the block continues; None: 0.
    At padding it has no meaning, and is at least 0.
    """
    starts = call.starts
    if starts is None:
        starts = torch.zeros(like.shape[:2], dtype=torch.bool, device=like.device)
    positions, _ = restarted(starts, call.padding, before)
    return positions


def attended(
    attention: MultiheadAttention, x: Tensor, call: Call, past: StateLayer | None
) -> Tensor:
    """Compute self-attention of x (B, T, C) after the tokens of ``past``, (B, T, C).

    past: holds the state after these tokens afterwards; None to keep none.
    """
    if past is None:
        return attention.attend(x, call.padding, one_sided=call.one_sided, starts=call.starts)[0]
    out, state = attention.attend(
        x,
        call.padding,
        past.state,
        keep_state=True,
        one_sided=call.one_sided,
        starts=call.starts,
    )
    past.keep(state, x.shape[1])
    return out


def refuse_unknown(model: str, given: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Raise TypeError for arguments of a forward pass that would be without effect.

    ignored: names that may be passed. Arguments that are None or False are ignored as well.
    transformers drops unknown arguments, so a cache by a wrong name would decode without a past.
    """
    unknown = [name for name, value in given.items() if name not in ignored]
    unknown = [name for name in unknown if given[name] is not None and given[name] is not False]
    if unknown:
        raise TypeError(
            f"{model} does not support the argument {', '.join(sorted(unknown))}: leave it out"
        )
