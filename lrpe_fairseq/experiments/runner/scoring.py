"""Score the tokens of a text with a language model, in windows of any length.

fairseq-eval-lm takes no windows that are longer than the model's maximum, and prints one number.
Here every window is computed, without padding, and every scored token has its own loss.

Axes: B windows, L tokens of a window, C width, N scored tokens.
"""

import contextlib
import itertools
import logging
import math
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lrpe_fairseq.attention.linear import EPS
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.experiments.records.fairseq_log import scored
from lrpe_fairseq.experiments.records.protocols import (
    DOCUMENTS,
    PAIRED,
    POSITIONS,
    REPEATED,
    TRUNCATED,
    Protocol,
    Window,
    bounds,
)

TOKENS = {"cpu": 4096, "cuda": 8192}
"""Tokens of a batch by kind of device; a longer window is a batch of one."""
LOGITS = 2**24
"""Logits computed at a time."""
DRAWS = 2000
"""Bootstrap samples."""
FEW = 10
"""Fewer blocks than this give a warning with a bootstrap interval."""
Metrics = dict[str, float]
Losses = dict[tuple[int, int], Tensor]
"""Losses of the last tokens of windows, by start and end."""

logger = logging.getLogger(__name__)


def evaluate(
    model: nn.Module,
    text: Tensor,
    eos: int,
    trained: int,
    names: Sequence[str],
    starts: Sequence[int] = (0,),
) -> dict[str, Metrics]:
    """Return the metrics of every protocol of ``names``.

    Paired protocols come last: most of their windows are blocks, which are computed once.

    Args:
        model: a language model of fairseq, in evaluation mode. text: (N,) int64.
        eos: the symbol before the text. trained: tokens of a block in training.
        starts: the first token of every document.
    Raises: ValueError if a protocol does not fit to the text.
    """
    scorer = _Scorer(model, text, eos, trained, starts)
    order = sorted(names, key=lambda name: Protocol.parse(name).is_paired)
    metrics = {name: scorer.metrics(Protocol.parse(name)) for name in order}
    return {name: metrics[name] for name in names}


class _Scorer:
    """Scores one text with one model; remembers the losses of every window."""

    def __init__(
        self, model: nn.Module, text: Tensor, eos: int, trained: int, starts: Sequence[int]
    ) -> None:
        self.model = model
        self.text = text
        self.trained = trained
        self.starts = starts
        # The input is the text, shifted by one, as fairseq reads it.
        self.before = torch.cat([text.new_tensor([eos]), text[:-1]])
        self._known: Losses = {}
        self._limited: Losses = {}  # with attention to the last T tokens

    def metrics(self, protocol: Protocol) -> Metrics:
        """Return loss (bits), ppl and tokens, or ``diverged``; and what the protocol adds.

        Raises: ValueError if not every token of the protocol was scored.
        """
        windows = list(protocol.windows(len(self.text), self.trained, self.starts))
        if protocol.kind == REPEATED:
            return self._gain(windows)
        counted: Metrics = {}
        if protocol.kind == POSITIONS:  # it counts in every window
            with clamped(self.model, protocol.length) as counted:
                self._remember(windows, self._known)
        bits = self._bits_of(protocol, windows)
        # A window that was forgotten would make a better perplexity.
        if len(bits) != protocol.count(len(self.text), self.trained):
            raise ValueError(f"{len(bits)} tokens of {len(self.text)} were scored")
        measured = {**scored(_finite_mean(bits)), "tokens": len(bits)}
        if "loss" not in measured:
            return measured
        if protocol.is_paired and protocol.length > self.trained:
            baseline = Protocol(PAIRED, self.trained).windows(len(self.text), self.trained)
            measured |= differences(bits - self.losses(list(baseline)), len(windows))
        if protocol.kind == POSITIONS:
            measured |= by_position(bits, protocol.length) | counted
            state = (module.state_size(protocol.length) for module in _attentions(self.model))
            measured["state"] = sum(state)
        if protocol.kind == DOCUMENTS:
            measured |= by_document(bits, self.starts)
        return measured

    def _gain(self, windows: Sequence[Window]) -> Metrics:
        """Return ``gain`` of repeated spans in nats, its interval, and tokens, or ``diverged``."""
        plain = self.losses(windows)
        repeated = torch.cat(self._compute(windows, repeated=True))
        if not (plain - repeated).isfinite().all():
            return {**scored(math.inf), "tokens": len(plain)}
        measured = differences(plain - repeated, len(windows))
        named = {name.replace("delta", "gain"): value for name, value in measured.items()}
        return {**named, "tokens": len(plain)}

    def _bits_of(self, protocol: Protocol, windows: Sequence[Window]) -> Tensor:
        if protocol.kind == TRUNCATED:
            reach = reach_of(self.model, self.trained)
            # Tokens before the reach of all layers change nothing, so they need not be computed.
            cut = [w._replace(start=max(w.start, w.first - reach)) for w in windows]
            with limited(self.model, self.trained):
                return self.losses(cut, self._limited)
        return self.losses(windows)

    def losses(self, windows: Sequence[Window], known: Losses | None = None) -> Tensor:
        """Return the loss of every scored token in bits, (N,) float64, in the order of the text.

        A window is computed unless its scored tokens are in ``known``.
        """
        known = self._known if known is None else known
        new = [w for w in windows if len(known.get((w.start, w.end), ())) < w.end - w.first]
        self._remember(new, known)
        return torch.cat([known[w.start, w.end][w.first - w.end :] for w in windows])

    def _remember(self, windows: Sequence[Window], known: Losses) -> None:
        for window, bits in zip(windows, self._compute(windows), strict=True):
            known[window.start, window.end] = bits

    @torch.no_grad()
    def _compute(self, windows: Sequence[Window], repeated: bool = False) -> list[Tensor]:
        """Return the losses of the scored tokens of each window; see :meth:`_losses_of`."""
        losses = []
        tokens = TOKENS[next(self.model.parameters()).device.type]
        # Windows of one length need no padding, which some encodings would count.
        for length, group in itertools.groupby(windows, lambda w: w.end - w.start):
            equal = list(group)
            step = max(1, tokens // length)
            for first in range(0, len(equal), step):
                losses += self._losses_of(equal[first : first + step], repeated)
        return losses

    def _losses_of(self, batch: Sequence[Window], repeated: bool) -> list[Tensor]:
        """Return the losses of each of ``batch``, windows of one length.

        repeated: a copy of the scored tokens replaces the first tokens of the window.
        """
        device = next(self.model.parameters()).device
        tokens = torch.stack([self.before[w.start : w.end] for w in batch])
        if repeated:
            for row, window in zip(tokens, batch, strict=True):  # the input begins one token before
                row[1 : 1 + window.end - window.first] = self.text[window.first : window.end]
        features, _ = self.model(tokens.to(device), features_only=True)  # B L C
        return [
            _bits(self.model, x[w.first - w.start :], self.text[w.first : w.end].to(device))
            for x, w in zip(features, batch, strict=True)
        ]


def _bits(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    """Return -log2 p of the targets (N,) from the features (N, C) of the last layer, on the CPU."""
    parts = []
    step = max(1, LOGITS // len(model.decoder.dictionary))
    for x, y in zip(features.split(step), targets.split(step), strict=True):
        out = model.decoder.output_layer(x[None])
        log_probs = model.get_normalized_probs((out,), log_probs=True, sample={"target": y[None]})
        parts.append(-log_probs[0].gather(1, y[:, None]).squeeze(1).double().cpu() / math.log(2))
    return torch.cat(parts)


def _finite_mean(bits: Tensor) -> float:
    mean = bits.mean().item()
    # nan, too, is a model that diverged.
    return mean if math.isfinite(mean) else math.inf


# --- what a protocol adds ----------------------------------------------------------------------


def differences(bits: Tensor, blocks: int) -> Metrics:
    """Return ``delta``, the mean of (N,) differences in nats, and its 95 % bootstrap interval.

    The interval is over ``blocks`` blocks of equal size, drawn with replacement by a fixed
    generator. One block has no interval.
    """
    # Blocks are drawn, not tokens: tokens of one block are not independent.
    means = bits.unflatten(0, (blocks, -1)).mean(1) * math.log(2)
    if blocks == 1:
        logger.warning("delta has no interval, because the text is one block: use a longer text")
        return {"delta": means.item()}
    if blocks < FEW:
        logger.warning("the interval of delta is over %d blocks only: use a longer text", blocks)
    draws = torch.randint(blocks, (DRAWS, blocks), generator=torch.Generator().manual_seed(0))
    low, high = means[draws].mean(1).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return {"delta": means.mean().item(), "delta_low": low, "delta_high": high}


def by_position(bits: Tensor, length: int) -> Metrics:
    """Return the mean loss and the number of tokens of every bin of positions in blocks.

    ``loss-64`` is the mean over the positions after the bound before 64, up to 64.
    """
    bins = _bins(len(bits), length)
    sums = torch.zeros(len(bounds(length))).double().index_add_(0, bins, bits)
    counts = bins.bincount(minlength=len(sums))
    measured: Metrics = {}
    for bound, total, count in zip(bounds(length), sums.tolist(), counts.tolist(), strict=True):
        if count:
            measured |= {f"loss-{bound}": total / count, f"tokens-{bound}": count}
    return measured


def _bins(tokens: int, length: int) -> Tensor:
    """Return the bin of every token, (N,), of a text in blocks of ``length``."""
    places = torch.arange(tokens) % length + 1
    return torch.bucketize(places, torch.tensor(bounds(length)))


def by_document(bits: Tensor, starts: Sequence[int]) -> Metrics:
    """Return the number of documents and the geometric mean of their perplexities.

    bits: (N,) of a text whose documents begin at ``starts``.
    """
    sizes = torch.tensor([*starts, len(bits)]).diff()
    means = [part.mean() for part in bits.split(sizes.tolist())]
    return {"documents": len(means), "document_ppl": 2 ** torch.stack(means).mean().item()}


@contextlib.contextmanager
def clamped(model: nn.Module, length: int) -> Iterator[Metrics]:
    """Count the denominators of Eq. 39 that linear attention clamps, by bin of positions.

    Yields metrics that have ``clamped-<bound>`` at the end, for every bin with denominators. A
    model with softmax attention or another normalizer has none.
    """
    under, every = (torch.zeros(len(bounds(length))).double() for _ in range(2))

    def count(module: MultiheadAttention, inputs: tuple, keywords: dict) -> None:
        query = keywords["query"] if "query" in keywords else inputs[0]
        denominators = module.denominators(query.transpose(0, 1)).cpu()  # B H L
        bins = _bins(denominators.shape[-1], length)
        counts = (denominators <= EPS).sum((0, 1)).double()
        rows = denominators.shape[0] * denominators.shape[1]
        under.index_add_(0, bins, counts)
        every.index_add_(0, bins, torch.full_like(counts, rows))

    layers = [module for module in _attentions(model) if module.has_denominators]
    hooks = [layer.register_forward_pre_hook(count, with_kwargs=True) for layer in layers]
    fractions: Metrics = {}
    try:
        yield fractions
    finally:
        for hook in hooks:
            hook.remove()
    counts = zip(bounds(length), under.tolist(), every.tolist(), strict=True)
    fractions |= {f"clamped-{bound}": part / whole for bound, part, whole in counts if whole}


@contextlib.contextmanager
def limited(model: nn.Module, window: int | None) -> Iterator[None]:
    """Limit the attention of every layer to the last ``window`` tokens; None: no limit."""
    modules = _attentions(model)
    for module in modules:
        module.given.window = window
    try:
        yield
    finally:
        for module in modules:
            module.given.window = None


def reach_of(model: nn.Module, window: int) -> int:
    """Return the distance to the first token that a token depends on in a ``limited`` model.

    Every layer adds ``window`` - 1, or less with a smaller window of its own; a shift of keys and
    values adds one, and a filter of the tokens after a key its reach - 1. Where a score depends on
    more than the lag, as with absolute positions, FIRE's beyond its threshold or angles of the
    length of the text, all tokens before count.
    """
    modules = _attentions(model)
    promised = [module.encoding.properties for module in modules]
    relative = all(p.relative == "exact" and p.relative_up_to is None for p in promised)
    relative = relative and not any(module.encoding.whole_texts for module in modules)
    # Dropping tokens would shift their positions.
    if not relative or model.decoder.embed_positions is not None:
        return sys.maxsize
    more = sum(module.kv_shift is not None for module in modules)
    more += sum(max(0, p.reach - 1) for p in promised)
    return more + sum(min(window, module.window or window) - 1 for module in modules)


def _attentions(model: nn.Module) -> list[MultiheadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiheadAttention)]
