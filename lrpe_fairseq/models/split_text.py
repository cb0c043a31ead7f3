"""``--sequence-parallel N``: training of a decoder whose N processes share the tokens of a batch.

Groups of N consecutive ranks read the same batches. Each rank of a group computes the layers and
the loss of its part of every text. Its loss and its number of targets are sums over that part, so
that fairseq's sums over all processes are those of the whole batch, and every ``--ddp-backend``
sums the gradients as it does without groups.

Axes: B batch, T time, C width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from lrpe_fairseq.attention.parallel import SplitSequence, check_encoding
from lrpe_fairseq.encodings.core.options import check_number
from lrpe_fairseq.encodings.core.protocols import Encoding
from lrpe_fairseq.errors import ChoiceError, refuse


def check_split(options: Any) -> int:
    """Return N of the options of a model. Raises: ChoiceError for what cannot be split."""
    ranks = getattr(options, "sequence_parallel", 1)  # older checkpoints lack it
    check_number("--sequence-parallel", ranks, least=1, most=2**16)
    if ranks > 1 and options.memory_length:
        raise ChoiceError(
            "--sequence-parallel cannot split a text with a memory of earlier segments: choose one"
        )
    return ranks


def split_steps(task: Any, ranks: int) -> None:
    """Let the steps of a task split its batches over groups of ``ranks`` processes."""
    if ranks == 1 or isinstance(getattr(task, "split_text", None), SplitText):
        return
    task.split_text = own = SplitText(ranks, task.source_dictionary.pad())
    task.train_step = partial(own.train_step, task.train_step)
    task.valid_step = partial(own.valid_step, task.valid_step)
    task.get_batch_iterator = partial(own.get_batch_iterator, task.get_batch_iterator)


class SplitText:
    """Groups of N processes, and the steps of a task that they compute together.

    Args: ranks: N. padding: the index of the padding symbol.
    """

    def __init__(self, ranks: int, padding: int) -> None:
        self.ranks, self.padding = ranks, padding
        self._group: Any = None

    def can_split(self) -> bool:
        """True if this process is one of N or a multiple of N."""
        started = dist.is_available() and dist.is_initialized()
        return started and dist.get_world_size() % self.ranks == 0

    @property
    def group(self) -> Any:
        """The group of this process; all processes ask for it at the same time."""
        if self._group is None:
            first = dist.get_rank() // self.ranks * self.ranks
            for start in range(0, dist.get_world_size(), self.ranks):
                group = dist.new_group(list(range(start, start + self.ranks)))
                self._group = group if start == first else self._group
        return self._group

    def get_batch_iterator(self, build: Callable, *given: Any, **keywords: Any) -> Any:
        """Let the ranks of a group read the same batches; arguments are those of fairseq."""
        if keywords.get("num_shards", 1) % self.ranks == 0:
            keywords["num_shards"] //= self.ranks
            keywords["shard_id"] //= self.ranks
        return build(*given, **keywords)

    def train_step(
        self,
        step: Callable,
        sample: dict,
        model: nn.Module,
        criterion: Any,
        *rest: Any,
        **more: Any,
    ) -> tuple[Tensor, int, dict]:
        """Compute fairseq's ``train_step``, forward and backward, of this rank's part.

        Raises: Refusal without N processes, and for a loss that is divided by sentences.
        """
        if not self.can_split():
            refuse(
                f"--sequence-parallel {self.ranks} needs {self.ranks} processes or a multiple: "
                f"start the training with PROCS={self.ranks} scripts/train.sh"
            )
        with self._split(sample, model, criterion) as part:
            return self._counted_once(step(part, model, criterion, *rest, **more))

    def valid_step(
        self, step: Callable, sample: dict, model: nn.Module, criterion: Any, **more: Any
    ) -> tuple[Tensor, int, dict]:
        """Compute fairseq's ``valid_step`` of this rank's part, or of the whole without groups."""
        if not self.can_split():
            return step(sample, model, criterion, **more)
        with self._split(sample, model, criterion) as part:
            return self._counted_once(step(part, model, criterion, **more))

    @contextmanager
    def _split(self, sample: dict, model: nn.Module, criterion: Any) -> Iterator[dict]:
        """Yield this rank's part of a batch, and let the model's decoder know of it."""
        if getattr(criterion, "sentence_avg", False):
            refuse("--sequence-parallel cannot be used with --sentence-avg: a sentence is split")
        if "segment" in sample["net_input"]:
            refuse(
                "--sequence-parallel cannot be used with --task lrpe_truncated_bptt_lm: choose "
                "--task language_modeling"
            )
        tokens = self._padded(sample["net_input"]["src_tokens"])
        sequence = SplitSequence(self.group, tokens.shape[1])
        target = sequence.part(self._padded(sample["target"])).contiguous()
        net_input = {**sample["net_input"], "src_tokens": tokens}
        own = {"net_input": net_input, "target": target}
        own["ntokens"] = int(target.ne(self.padding).sum())
        given = _decoder(model).given
        given.sequence = sequence
        try:
            yield {**sample, **own}
        finally:
            given.sequence = None

    def _padded(self, tokens: Tensor) -> Tensor:
        """Return tokens (B, T), at least one for every rank."""
        return F.pad(tokens, (0, max(0, self.ranks - tokens.shape[1])), value=self.padding)

    def _counted_once(self, found: tuple[Tensor, int, dict]) -> tuple[Tensor, int, dict]:
        """Count the sentences of a group in the log of its first rank only."""
        loss, size, log = found
        if dist.get_rank(self.group) and "nsentences" in log:
            log["nsentences"] = 0
        return loss, size, log


def _decoder(model: nn.Module) -> nn.Module:
    """Return the decoder inside fairseq's wrappers for several processes."""
    while not hasattr(model, "decoder"):
        model = model.module
    return model.decoder


# --- the decoder -------------------------------------------------------------------------------


def split_modules(decoder: nn.Module) -> None:
    """Let dropout and absolute positions of a decoder be those of the whole text.

    They do nothing else unless ``decoder.given.sequence`` is set.

    Raises: ChoiceError for an encoding of a layer that cannot be split.
    """
    for module in decoder.modules():
        if isinstance(module, Encoding):
            check_encoding(module)
        if isinstance(module, FairseqDropout):
            axis = 1 if module is decoder.dropout_module else 0  # later it is (T, B, C)
            module.forward = partial(_dropped, module.forward, module, decoder.given, axis)
    if decoder.embed_positions is not None:
        embed = decoder.embed_positions
        embed.forward = partial(_embedded, embed.forward, decoder)


def _dropped(
    forward: Callable, module: nn.Module, given: Any, axis: int, x: Tensor, inplace: bool = False
) -> Tensor:
    """Drop the numbers of x that one process drops of the whole text: draw for all tokens.

    The generators of all ranks stay alike. Numbers are drawn in the order of memory.
    """
    drops = module.p > 0 and (module.training or module.apply_during_inference)
    if given.sequence is None or not drops:
        return forward(x, inplace=inplace)
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    shape = list(x.shape)
    shape[axis] = given.sequence.length
    ones = torch.ones([shape[i] for i in order], dtype=x.dtype, device=x.device)
    factors = F.dropout(ones, module.p).permute(*(order.index(i) for i in range(x.dim())))
    return x * given.sequence.part(factors, axis)


def _embedded(
    forward: Callable, decoder: nn.Module, tokens: Tensor, incremental_state: Any = None
) -> Tensor:
    """Return fairseq's absolute embeddings of tokens (B, T), in their places of the whole text."""
    if decoder.whole is None:
        return forward(tokens, incremental_state=incremental_state)
    return decoder.given.sequence.part(forward(decoder.whole))


@contextmanager
def whole_text(decoder: nn.Module, tokens: Tensor) -> Iterator[Tensor]:
    """Yield this rank's part of the tokens (B, T) of a text; all of it without a sequence.

    Within, the decoder computes a mask of padding if the text has padding anywhere, because either
    all ranks pass a mask or none does.
    """
    sequence = decoder.given.sequence
    if sequence is None:
        yield tokens
        return
    decoder.whole, masks = tokens, decoder.cross_self_attention
    decoder.cross_self_attention = bool(tokens.eq(decoder.padding_idx).any())
    try:
        yield sequence.part(tokens)
    finally:
        decoder.whole, decoder.cross_self_attention = None, masks
