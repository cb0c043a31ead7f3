"""fairseq's cross-entropies of words, without storing the logits.

``lrpe_cross_entropy``, ``lrpe_label_smoothed_cross_entropy`` and ``lrpe_masked_lm`` compute the
loss, the gradients and the logged values of ``cross_entropy``, ``label_smoothed_cross_entropy`` and
``masked_lm`` in blocks of the vocabulary (``criterions.blocks``). They need memory for one block
instead of several copies of the N x V logits, and compute one product of four again.

A model with an adaptive softmax never stores all logits, so fairseq's own form is used. So it is
for an output layer that is more than a linear map, such as one with quantization noise.
"""

from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from torch import Tensor, nn

from lrpe_fairseq.attention.projected import is_plain_linear
from lrpe_fairseq.criterions.blocks import losses


def output_weight(model: nn.Module) -> Tensor | None:
    """Return the weight (V, D) of the output layer of a decoder, or None if it is no linear map."""
    decoder = getattr(_inner(model), "decoder", None)
    projection = getattr(decoder, "output_projection", None)
    if getattr(decoder, "adaptive_softmax", None) is not None:
        return None
    # hooks, such as those of quantization noise, act on calls of the module only
    plain = isinstance(projection, nn.Linear) and is_plain_linear(projection)
    return projection.weight if plain and projection.bias is None else None


def _inner(model: nn.Module) -> nn.Module:
    """Return the model inside fairseq's wrapper for several processes, or the model itself."""
    inner = getattr(model, "module", model)  # ModuleProxyWrapper
    return getattr(inner, "module", inner)  # DistributedDataParallel or fairseq's own


def word_losses(
    model: nn.Module, sample: dict, weight: Tensor, padding: int, skipped: int = 0
) -> tuple[Tensor, Tensor]:
    """Return nll and smoothing loss of every target (B T,), zero at padding; see ``blocks.losses``.

    skipped: number of targets at the start of each sentence that are left out.
    """
    features, _ = model(**sample["net_input"], features_only=True)
    target = model.get_targets(sample, None)
    features = features[:, skipped:]
    target = target[:, skipped:].reshape(-1)
    nll, smooth = losses(features.reshape(-1, features.shape[-1]), weight, target)
    pad = target.eq(padding)
    return nll.masked_fill(pad, 0.0), smooth.masked_fill(pad, 0.0)


@register_criterion("lrpe_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class LRPECrossEntropyCriterion(CrossEntropyCriterion):
    """``cross_entropy`` of language models and translation, without the logits."""

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the summed loss (base e), the number of targets and the values to log.

        reduce: False for one loss per target, (B T,).
        """
        weight = output_weight(model)
        if weight is None:
            return super().forward(model, sample, reduce)
        nll, _ = word_losses(model, sample, weight, self.padding_idx)
        loss = nll.sum() if reduce else nll
        size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        log = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": size,
        }
        return loss, size, log


@register_criterion(
    "lrpe_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LRPELabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """``label_smoothed_cross_entropy``, without the logits.

    The smoothed target has 1 - e for the right word and e / (V - 1) for each other word. With
    ``report_accuracy`` the logits are needed, so fairseq's own form is used.
    """

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the summed loss (base e), the number of targets and the values to log.

        reduce: False for one loss per target, (B T, 1), as fairseq returns it.
        """
        weight = None if self.report_accuracy else output_weight(model)
        if weight is None:
            return super().forward(model, sample, reduce)
        nll, smooth = word_losses(
            model, sample, weight, self.padding_idx, skipped=self.ignore_prefix_size
        )
        if reduce:
            nll = nll.sum()
            smooth = smooth.sum()
        else:
            nll = nll.unsqueeze(-1)
            smooth = smooth.unsqueeze(-1)
        # smooth counts the right word too, so that its share is taken off the first term
        each = self.eps / (len(weight) - 1)
        loss = (1.0 - self.eps - each) * nll + each * smooth
        size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        log = {
            "loss": loss.data,
            "nll_loss": nll.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": size,
        }
        return loss, size, log


@register_criterion("lrpe_masked_lm", dataclass=MaskedLmConfig)
class LRPEMaskedLMLoss(MaskedLmLoss):
    """``masked_lm`` of ``lrpe_roberta``, without the logits."""

    def forward(self, model: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Return the loss (base e) summed over masked tokens, their number, and the values to log.

        ``reduce`` is not used, as in fairseq.
        """
        head = getattr(getattr(_inner(model), "encoder", None), "lm_head", None)
        if head is None:
            return super().forward(model, sample, reduce)
        target = model.get_targets(sample, None)
        masked = target.ne(self.padding_idx)
        size = masked.int().sum()
        # the head of masked tokens only, as fairseq's model does in training
        features, _ = model(**sample["net_input"], features_only=True)
        x = head.layer_norm(head.activation_fn(head.dense(features[masked])))
        loss = losses(x, head.weight, target[masked], head.bias)[0].sum()
        log = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": size,
        }
        return loss, size, log
