"""One picture per encoding, all in one style: a curve against the distance, or a map.

The encoding is drawn as it starts, before training. Contents are random: q = k for curves and maps
of a grid, different ones for contextual methods.

    python -c "from lrpe_fairseq.experiments.report.portraits import draw; \\
        draw('alibi', 'alibi.png', head_dim=64, num_heads=8, length=1024)"
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrpe_fairseq.encodings import (
    Encoding,
    EncodingOptions,
    QueryKeyEncoding,
    ScoreEncoding,
    build_encoding,
    encoding_class,
)
from lrpe_fairseq.experiments.report import plots

CONTENTS = 64  # random contents over which a curve is averaged
NODES = 31  # of a map of scores where positions are not on a line
HEADS_SHOWN = 4  # curves per picture; maps show the first and the last of these heads


@torch.no_grad()
def draw(
    name: str,
    path: Path | str,
    head_dim: int = 32,
    num_heads: int = 4,
    length: int = 256,
    grid_width: int = 16,
) -> None:
    """Draw the encoding ``name`` and write a PNG to ``path``.

    Args:
        head_dim: D. num_heads: H; at most four are shown. length: the largest distance, and four
            times the tokens of a map. grid_width: W of the grid of a method with two axes.
    A decomposable encoding is drawn as the score of a token and a copy of it n tokens earlier,
    divided by their score without encoding, averaged over random contents; an additive one as its
    bias; a contextual one as attention weights over random tokens; one with two axes as the score
    of a cell with all cells of the grid; one of a tree as the scores of all pairs of nodes.
    Raises: ChoiceError for an unknown name. ImportError without matplotlib (extra [experiments]).
    """
    own = encoding_class(name)
    options = dict(own.card.drawn_with if own.card else {})
    if own.reads_grid:
        options["grid_width"] = grid_width
    options = EncodingOptions(**options)
    encoding = build_encoding(name, head_dim, num_heads, causal=True, options=options).eval()
    figure = plots.blank(4.6, 2.3)
    if encoding.reads_grid:
        label = f"score of the cell in the center, {grid_width} x {grid_width} cells"
        cells, center = torch.arange(grid_width**2), grid_width // 2 * (grid_width + 1)
        shown = scores(encoding, torch.tensor([center]), cells)
        _maps(figure, shown.unflatten(-1, (grid_width, grid_width)).squeeze(1), label)
    elif encoding.properties.contextual or not (own.serves_linear or encoding.additive):
        label = "square roots of attention weights: query down, key across"
        _maps(figure, weights(encoding, length // 4).sqrt(), label)
    elif encoding.properties.relative_by:
        label = f"score / plain score of the positions 0 to {NODES - 1}: query down, key across"
        _maps(figure, scores(encoding, torch.arange(NODES), torch.arange(NODES)), label)
    else:
        _curves(figure, encoding, curve(encoding, length))
    plots.save(figure, Path(path))


def scores(encoding: QueryKeyEncoding, q_at: Tensor, k_at: Tensor) -> Tensor:
    """Return the score of copies of a token at positions (T,) and (S,), (H, T, S).

    It is divided by the score without encoding, and averaged over random contents.
    """
    x = _contents(encoding, 1)
    q, k = x.expand(-1, -1, len(q_at), -1), x.expand(-1, -1, len(k_at), -1)
    q, k = encoding(q, k, q_at, k_at)
    return ((q @ k.mT) / x.square().sum(-1, keepdim=True)).mean(0)


def curve(encoding: Encoding, length: int) -> Tensor:
    """Return the score or the bias at the distances 0 .. length - 1, (H, length)."""
    q_at, k_at = torch.tensor([length - 1]), torch.arange(length).flip(0)
    if isinstance(encoding, ScoreEncoding):
        x = _contents(encoding, 1)
        q = x * encoding.spec.head_dim**-0.5 * encoding.content_scale
        bias = encoding.bias(q, x.expand(-1, -1, length, -1), q_at, k_at)
        return bias.expand(len(x), encoding.spec.num_heads, 1, length).mean(0)[:, 0]
    log_decay = encoding.log_decay()
    decay = 1.0 if log_decay is None else torch.exp(log_decay[:, None] * torch.arange(length))
    return scores(encoding, q_at, k_at)[:, 0] * decay


def weights(encoding: Encoding, length: int) -> Tensor:
    """Return causal attention weights over random tokens, (H, length, length)."""
    q, k = _contents(encoding, length)[:1], _contents(encoding, length, seed=1)[:1]
    at = torch.arange(length)
    seen = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    q = q * encoding.spec.head_dim**-0.5
    if isinstance(encoding, ScoreEncoding):
        q = q * encoding.content_scale
        scores = encoding(q @ k.mT, q, k, at, at, seen)
        return encoding.weigh(scores, seen, torch.float32)[0]
    q, k = encoding(q, k, at, at)
    width = encoding.spec.head_dim * encoding.spec.num_heads
    x = torch.randn(1, length, width, generator=torch.Generator().manual_seed(2))
    total = encoding.log_gates(x).cumsum(-1)
    scores = q @ k.mT + total.unsqueeze(-1) - total.unsqueeze(-2)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)[0]


def _contents(encoding: Encoding, length: int, seed: int = 0) -> Tensor:
    """Return random contents, (CONTENTS, H, length, D)."""
    shape = CONTENTS, encoding.spec.num_heads, length, encoding.spec.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _curves(figure: Any, encoding: Encoding, values: Tensor) -> None:
    """Draw a line for each head, or one line if all heads are equal."""
    axes = figure.subplots()
    same = torch.allclose(values, values[:1].expand_as(values), atol=1e-6)
    shared = same or _averages_equal(encoding)
    shown = values.mean(0, keepdim=True) if shared else values[:HEADS_SHOWN]
    for head, line in enumerate(shown):
        axes.plot(line.tolist(), linewidth=1.2, label=None if shared else f"head {head}")
    axes.axhline(0, color="grey", linewidth=0.6)
    bias = isinstance(encoding, ScoreEncoding)
    axes.set_ylabel("added to the score" if bias else "score / plain score", size=8)
    axes.set_xlabel("n = s - t", size=8)
    if not shared:
        axes.legend(fontsize=6, frameon=False, loc="upper right")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _averages_equal(encoding: Encoding) -> bool:
    """True if heads differ by their random contents only: no parameters and no decay per head."""
    heads = encoding.spec.num_heads
    own = [t for _, t in encoding.named_tensors() if heads in t.shape]
    return isinstance(encoding, QueryKeyEncoding) and not own and encoding.log_decay() is None


def _maps(figure: Any, values: Tensor, label: str) -> None:
    """Draw the maps (H, ., .) of the first and of the last shown head side by side."""
    heads = sorted({0, min(len(values), HEADS_SHOWN) - 1})
    for axes, head in zip(figure.subplots(1, len(heads), squeeze=False).flat, heads, strict=True):
        axes.imshow(values[head], cmap="viridis", interpolation="nearest", aspect="equal")
        axes.set_title(f"head {head}", size=8)
        axes.tick_params(labelsize=6)
    figure.supxlabel(label, size=8)
