"""Protocols of evaluating a language model: how a text is cut and which tokens are scored.

``blocks`` and ``sliding`` have the length T of training and are evaluated by fairseq-eval-lm. The
others have a length of their own, in their names:

- ``blocks-L``: non-overlapping blocks of L tokens.
- ``tail-L`` and ``tail-L-W``: windows of L tokens moved on by W (default 128), the last W scored.
- ``paired-L``: the last T tokens of every block of 16 T tokens, from a window of L tokens. The
  tokens are the same for every L, so only the context differs.
- ``truncated-L``: ``paired-L`` with attention limited to the last T tokens.
- ``positions-L``: ``blocks-L``, by position.
- ``documents-L``: ``blocks-L`` of each document, which begin at its first token.
- ``repeated-D``: what it gains to have read a span D tokens before. The last 48 tokens of every
  block of 16 T tokens but the first, from windows of D + 48 tokens, with and without a copy of the
  span in place of the first 48. The spans are the same for every D.

``+SCALING-F`` after any of them scales the rotations of the model for the evaluation only:
``blocks-512+yarn-4`` is ``--context-scaling yarn --context-factor 4``. The factors of ``longrope``
are those of the model, or those given to ``eval_lm``. ``+bounded`` at the end evaluates linear
attention that was trained with the normalizer ``rotated`` with ``bounded``.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

BLOCKS, SLIDING, TAIL, PAIRED = "blocks", "sliding", "tail", "paired"
TRUNCATED, POSITIONS, DOCUMENTS, REPEATED = "truncated", "positions", "documents", "repeated"
KINDS = (BLOCKS, SLIDING, TAIL, PAIRED, TRUNCATED, POSITIONS, DOCUMENTS, REPEATED)
SPAN = 48
"""Tokens of a repeated span."""
TAIL_STEP = 128
LONGEST = 16
"""Length of the blocks of paired protocols, in lengths of training."""
FIRST_BOUND = 16
"""The first bound of the bins of positions; each further bound is twice the one before."""
HOLDS, BEYOND = "holds-to", "beyond-window"
"""Metrics that are computed from several protocols: :func:`holds_to`, :func:`beyond_window`."""
BREAK = 0.1  # nats
Metrics = Mapping[str, float]
FORMS = (
    "blocks, sliding, blocks-L, tail-L, tail-L-W, paired-L, truncated-L, positions-L, documents-L, "
    "repeated-D, each also with context scaling by a factor F: +linear-F, +ntk-F, +yarn-F, "
    "+yarn-printed-F, +llama3-F, +dynamic-F, +longrope-F; and with +bounded for that normalizer"
)
BOUNDED = "bounded"
NAMES = "linear|ntk|yarn|yarn-printed|llama3|dynamic|longrope"
SCALED = re.compile(rf"({NAMES})-([1-9]\d*(?:\.\d*[1-9])?)")
"""What follows ``+`` in the name of a protocol with context scaling."""


class Window(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) of a text; those from ``first`` on are scored."""

    start: int
    end: int
    first: int


@dataclass(frozen=True)
class Protocol:
    """One protocol; see the module. ``length``: L, or 0 for the length of training. ``step``: W.

    scaling, factor: context scaling for the evaluation; "none" for that of the training. bounded:
    True for the normalizer ``bounded`` in place of ``rotated``.
    """

    kind: str
    length: int = 0
    step: int = 0
    scaling: str = "none"
    factor: float = 1.0
    bounded: bool = False

    @classmethod
    def parse(cls, name: str) -> "Protocol":
        """Return the protocol ``name``. Raises: ValueError, which lists the forms, for others.

        >>> Protocol.parse("tail-2048")
        Protocol(kind='tail', length=2048, step=128, scaling='none', factor=1.0, bounded=False)
        """
        if name.endswith(f"+{BOUNDED}"):
            return replace(cls.parse(name.removesuffix(f"+{BOUNDED}")), bounded=True)
        plain, _, scaled = name.partition("+")
        if match := SCALED.fullmatch(scaled):
            return replace(cls.parse(plain), scaling=match[1], factor=float(match[2]))
        kind, *numbers = name.split("-")
        allowed = {BLOCKS: (0, 1), SLIDING: (0,), TAIL: (1, 2)}.get(kind, (1,))
        if kind not in KINDS or len(numbers) not in allowed or not all(map(_is_length, numbers)):
            raise ValueError(f"there is no protocol {name!r}; the protocols are {FORMS}")
        length = int(numbers[0]) if numbers else 0
        step = TAIL_STEP if kind == TAIL else 0
        if len(numbers) > 1:
            step = int(numbers[1])
        # Tokens beyond the window would never be scored.
        if step > length:
            raise ValueError(f"protocol {name!r} scores {step} tokens of windows of {length}")
        return cls(kind, length, step)

    @property
    def by_fairseq(self) -> bool:
        """True if fairseq-eval-lm evaluates it, with the memory of models that have one."""
        return not self.length

    def overrides(self, trained: int, factors: str = "") -> dict[str, Any]:
        """Return the options of the model that the protocol changes, by flat names.

        trained: T, from which the context is scaled. factors: ``longrope_factors``.
        """
        found: dict[str, Any] = {"attention_normalizer": BOUNDED} if self.bounded else {}
        if self.scaling != "none":
            context = {"scaling": self.scaling, "factor": self.factor, "length": trained}
            found |= {f"context_{name}": value for name, value in context.items()}
        return found | ({"longrope_factors": factors} if self.scaling == "longrope" else {})

    @property
    def changes_model(self) -> bool:
        """True if the model is evaluated with other options than it was trained with."""
        return self.scaling != "none" or self.bounded

    @property
    def is_paired(self) -> bool:
        """True if it scores only the last tokens of the blocks."""
        return self.kind in (PAIRED, TRUNCATED)

    @property
    def is_partial(self) -> bool:
        """True if it scores some of the tokens only."""
        return self.is_paired or self.kind == REPEATED

    @property
    def longest(self) -> int:
        """Tokens of the longest window; 0 for the length of training."""
        return self.length + (SPAN if self.kind == REPEATED else 0)

    def context_window(self, trained: int) -> int:
        """Return fairseq's --context-window for the length T of training."""
        return trained // 2 if self.kind == SLIDING else 0

    def windows(self, tokens: int, trained: int, starts: Sequence[int] = (0,)) -> Iterator[Window]:
        """Return the windows of a text of ``tokens`` tokens, for the length T of training.

        starts: the first token of every document.
        Raises: ValueError if the protocol does not fit to T or to the text.
        """
        if self.is_paired:
            yield from self._paired_windows(tokens, trained)
            return
        if self.kind == REPEATED:
            yield from self._repeated_windows(tokens, trained)
            return
        if self.kind == DOCUMENTS:
            for start, end in itertools.pairwise([*starts, tokens]):
                for first in range(start, end, self.length):
                    yield Window(first, min(first + self.length, end), first)
            return
        length = self.length or trained
        # A window moves on by what it scores, so every token is scored once.
        context = length - self.step if self.kind == TAIL else self.context_window(trained)
        for first in range(0, tokens, length - context):
            yield Window(max(0, first - context), min(first + length - context, tokens), first)

    def count(self, tokens: int, trained: int) -> int:
        """Return the number of tokens that an evaluation must score."""
        if self.kind == REPEATED:
            return max(0, tokens // (LONGEST * trained) - 1) * SPAN
        return tokens // (LONGEST * trained) * trained if self.is_paired else tokens

    def sentence(self, trained: int) -> str:
        """Describe the protocol for a model trained on blocks of ``trained`` tokens."""
        if self.bounded:
            plain = replace(self, bounded=False).sentence(trained)
            return f"{plain} Linear attention has the normalizer bounded for the evaluation."
        if self.scaling != "none":
            plain = replace(self, scaling="none", factor=1.0).sentence(trained)
            return (
                f"{plain} The rotations of the model are scaled for the evaluation: {self.scaling} "
                f"by {self.factor:g}, from {trained} tokens."
            )
        length = self.length
        half = trained // 2
        if self.by_fairseq:
            return {
                BLOCKS: f"fairseq-eval-lm over non-overlapping blocks of {trained} tokens; a token "
                "sees the tokens before it in its block, the one token before the block, and a "
                "model's memory of earlier blocks.",
                SLIDING: f"fairseq-eval-lm --context-window {half}: windows of {trained} tokens "
                f"moved on by {trained - half}; a token sees at least the {half} before it.",
            }[self.kind]
        return {
            BLOCKS: f"Non-overlapping blocks of {length} tokens; a token sees the tokens before it "
            "in its block and the one token before the block.",
            TAIL: f"Windows of {length} tokens moved on by {self.step}, of which the last "
            f"{self.step} are scored; a token sees at least the {length - self.step} before it.",
            PAIRED: f"The last {trained} tokens of every block of {LONGEST * trained}, from a "
            f"window of {length}: the same tokens for every length. delta is the difference from a "
            f"window of {trained} in nats, with a 95 % bootstrap interval over blocks.",
            TRUNCATED: f"As paired-{length}, but a token of a layer attends to itself and the "
            f"{trained - 1} before it only.",
            POSITIONS: f"Non-overlapping blocks of {length} tokens, by position up to each bound; "
            "losses are in bits. clamped is the fraction of the denominators of linear attention "
            "that are raised to the clamp, over all layers and heads; state counts the numbers "
            "that decoding keeps after a block.",
            REPEATED: f"The last {SPAN} tokens of every block of {LONGEST * trained} but the "
            f"first, from a window that begins {length} before them: the same spans for every "
            "distance. gain is the loss of the text minus the loss with a copy of the span in "
            f"place of the first {SPAN} tokens, in nats per token, with a 95 % bootstrap interval "
            "over spans.",
            DOCUMENTS: f"Blocks of {length} tokens of each document, from its first token on; "
            "document_ppl is the geometric mean of the documents' perplexities.",
        }[self.kind]

    def _paired_windows(self, tokens: int, trained: int) -> Iterator[Window]:
        """Yield the windows of ``paired`` and ``truncated``.

        Raises: ValueError if the length or the text does not fit.
        """
        block = LONGEST * trained
        if not trained <= self.length <= block:
            raise ValueError(
                f"a paired protocol needs a length from {trained}, that of training, to {block}, "
                f"{LONGEST} times that, not {self.length}"
            )
        if tokens < block:
            raise ValueError(
                f"a paired protocol needs a block of {block} tokens, but the text has {tokens}"
            )
        for end in range(block, tokens + 1, block):
            # The ends of blocks are the same tokens for every length.
            yield Window(end - self.length, end, end - trained)

    def _repeated_windows(self, tokens: int, trained: int) -> Iterator[Window]:
        """Yield the windows of ``repeated``.

        Raises: ValueError if the distance or the text does not fit.
        """
        block = LONGEST * trained
        if not SPAN <= self.length <= block:
            raise ValueError(
                f"a repeated span needs a distance from {SPAN}, its length, to {block}, {LONGEST} "
                f"times the length of training, not {self.length}"
            )
        # The first block has no block before it that the span could be copied from.
        if tokens < 2 * block:
            raise ValueError(
                f"repeated spans need two blocks of {block} tokens, but the text has {tokens}"
            )
        for end in range(2 * block, tokens + 1, block):
            yield Window(end - SPAN - self.length, end, end - SPAN)


def derived(metric: str, measured: Mapping[str, Metrics], length: int) -> float | None:
    """Return ``HOLDS`` or ``BEYOND`` of one split, from its metrics by protocol; None without them.

    length: L of the longest paired protocol. Raises: KeyError for another metric.
    """
    return {HOLDS: holds_to, BEYOND: beyond_window}[metric](measured, length)


def holds_to(measured: Mapping[str, Metrics], length: int) -> int | None:
    """Return the longest context up to which the same tokens are predicted as well as at T.

    It is the last L of the measured ``paired-L`` before the first whose mean loss is more than
    :data:`BREAK` nats above that of the training length, and ``length`` if there is none.
    """
    known = map(Protocol.parse, measured)
    lengths = sorted(p.length for p in known if p.kind == PAIRED and not p.changes_model)
    if length not in lengths:
        return None
    trained, *longer = lengths
    # A length that diverged has no delta: the model does not hold there.
    rise = {n: measured[f"{PAIRED}-{n}"].get("delta", math.inf) for n in longer}
    return [trained, *itertools.takewhile(lambda n: rise[n] <= BREAK, longer)][-1]


def beyond_window(measured: Mapping[str, Metrics], length: int) -> float | None:
    """Return what the attention to distances beyond T gains, in nats per token; negative: it costs.

    It is the loss of ``truncated-L`` minus that of ``paired-L``: the same tokens and windows, with
    and without a limit of every layer to the last T tokens.
    """
    losses = [measured.get(f"{kind}-{length}", {}).get("loss") for kind in (TRUNCATED, PAIRED)]
    return None if None in losses else (losses[0] - losses[1]) * math.log(2)


def bounds(length: int) -> list[int]:
    """Return the upper bounds of the bins of positions up to ``length``.

    >>> bounds(100)
    [16, 32, 64, 100]
    """
    upper = [FIRST_BOUND]
    while upper[-1] < length:
        upper.append(2 * upper[-1])
    return [*upper[:-1], length]


def _is_length(text: str) -> bool:
    return text.isdigit() and int(text) > 0 and text == str(int(text))
