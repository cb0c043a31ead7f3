"""Hours, memory and disk of a training by arithmetic, from its configuration and a device's peak.

Nothing is measured here. A device reaches its peak in large products of matrices only, so that
trainings take longer. Axes: C width, F width of the feed-forward network, L layers, V words,
T tokens of a sample.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lrpe_fairseq import patterns
from lrpe_fairseq.experiments.records import precision as precisions

Options = Mapping[str, Any]
GB = 1e9
IN_BLOCKS = "lrpe_"
"""Beginning of the criterions that store one block of the logits and compute them again."""
BLOCK_LOGITS = 2**24
OF_SENTENCES = ("sentence_prediction", "lrpe_classification")
"""Tasks whose models predict a class of a whole sample, and no words."""
COPIES = 3
"""Tensors of logits that fairseq's criterions hold at once, in float32."""
SAVED = (14, 2)
"""Numbers that a layer keeps for the backward pass of a token, as multiples of C and of F."""
WORDS = {
    "wikitext-103-word": 267_744,
    "wikitext-103-gpt2": 50_264,
    "wmt14-en-de": 40_000,
}
"""Entries of the dictionaries of data that are not prepared."""


@dataclass(frozen=True)
class Card:
    """A device: peak operations per second by precision (data sheet), and memory in bytes."""

    peaks: Mapping[str, float]
    memory: float


CARDS = {
    "v100": Card({"fp32": 15.7e12, "fp16": 125e12, "bf16": 15.7e12}, 16 * GB),
    "v100-32gb": Card({"fp32": 15.7e12, "fp16": 125e12, "bf16": 15.7e12}, 32 * GB),
    "a100": Card({"fp32": 19.5e12, "fp16": 312e12, "bf16": 312e12}, 40 * GB),
    "h100": Card({"fp32": 67e12, "fp16": 989e12, "bf16": 989e12}, 80 * GB),
}
"""SXM forms, dense products. A V100 has no fast bfloat16."""


@dataclass(frozen=True)
class Need:
    """What a training needs: seconds of all devices together, bytes of one device, bytes kept."""

    seconds: float
    memory: float
    disk: float


def cards_of(text: str) -> tuple[str, int]:
    """Return the name and the number of ``v100x8``. Raises: ValueError for other devices."""
    found = re.fullmatch(r"(.+)x([1-9]\d*)", text)
    if not found or found[1] not in CARDS:
        raise ValueError(
            f"--on is a device of {', '.join(CARDS)} and their number, such as v100x8, not {text}"
        )
    return found[1], int(found[2])


@dataclass(frozen=True)
class Shape:
    """A model and its update: C, F and L of its stacks, V, T, and tokens of a batch and an update.

    predicted: share of the tokens whose words are predicted. matrices: matrices of V x C.
    """

    width: int
    inner: int
    layers: int
    cross: int
    words: int
    length: int
    batch: int
    update: int
    predicted: float
    matrices: int

    @property
    def weights(self) -> int:
        """Parameters of all layers."""
        each = 4 * self.width**2 + 2 * self.width * self.inner
        return self.layers * each + self.cross * 4 * self.width**2

    @property
    def parameters(self) -> int:
        """Parameters of the layers and of the matrices of words."""
        return self.weights + self.matrices * self.words * self.width


def shape_of(options: Options, words: int) -> Shape:
    """Return the shape of a model, from the resolved options of its training.

    Raises: ValueError for a model without one of these shapes, or batches of unknown length.
    """
    found = _stacks(options)
    if found is None:
        raise ValueError(f"there is no arithmetic for {options.get('model._name')}")
    length = options.get("task.tokens_per_sample") or options.get("model.max_positions")
    tokens, samples = options.get("dataset.max_tokens"), options.get("dataset.batch_size")
    if not tokens and not (samples and length):
        raise ValueError("there is no arithmetic for batches of samples of unknown length")
    batch = int(tokens) if tokens else int(samples) * int(length)
    frequency = int((options.get("optimization.update_freq") or [1])[0])
    # encoder and decoder have a matrix each, unless they share it
    separate = bool(found["cross"]) and not options.get("model.share_all_embeddings")
    return Shape(
        **found,
        words=words,
        length=int(length) if length else 0,
        batch=batch,
        update=batch * frequency,
        predicted=_predicted(options),
        matrices=1 + separate,
    )


def _predicted(options: Options) -> float:
    """Return the share of the tokens whose words are predicted."""
    task = options.get("task._name")
    if task in OF_SENTENCES:
        return 0.0
    return float(options.get("task.mask_prob", 1.0)) if task == "masked_lm" else 1.0


def _stacks(options: Options) -> dict[str, int] | None:
    """Return width, inner, layers and cross of a model, or None if it has no such options."""
    for side in ("decoder", "encoder"):
        if f"model.{side}_layers" in options:
            names = {"width": "embed_dim", "inner": "ffn_embed_dim", "layers": "layers"}
            own = {key: int(options[f"model.{side}_{name}"]) for key, name in names.items()}
            return {**own, "cross": 0}
    if "model.encoder.layers" not in options:
        return None
    encoder, decoder = (int(options[f"model.{side}.layers"]) for side in ("encoder", "decoder"))
    width, inner = (int(options[f"model.encoder.{n}"]) for n in ("embed_dim", "ffn_embed_dim"))
    return {"width": width, "inner": inner, "layers": encoder + decoder, "cross": decoder}


def operations(options: Options, shape: Shape) -> float:
    """Return the operations of one token, forward and backward: 2 per number of a product, thrice.

    Softmax attention reads T tokens, half of them if it is causal; linear attention C / H of them.
    A criterion in blocks computes the product with the words a fourth time.
    """
    kinds = str(options.get("model.attention_type", options.get("model.encoder.attention_type")))
    share = [kind == "softmax" for kind in patterns.values(kinds)]
    softmax = sum(share) / len(share)
    reads = softmax * shape.length / 2 + (1 - softmax) * 64
    attention = shape.layers * 2 * reads * shape.width
    in_blocks = str(options.get("criterion._name", "")).startswith(IN_BLOCKS)
    of_words = (4 if in_blocks else 3) * shape.predicted * shape.words * shape.width
    return 2 * (3 * (shape.weights + attention) + of_words)


def memory(options: Options, shape: Shape, precision: str, devices: int) -> float:
    """Return the bytes of one device: weights, gradients, Adam, activations and logits.

    In half precision the optimizer has copies in float32. A batch is divided only if an update has
    fewer batches than devices.
    """
    half = precision != precisions.FP32
    size = 2 if half else 4
    fixed = shape.parameters * (20 if half else 16)
    batch = min(shape.batch, shape.update / devices)
    per_token = SAVED[0] * shape.width + SAVED[1] * shape.inner
    activations = batch * shape.layers * per_token * size
    if str(options.get("criterion._name", "")).startswith(IN_BLOCKS):
        return fixed + activations + 3 * 4 * BLOCK_LOGITS
    return fixed + activations + COPIES * 4 * batch * shape.predicted * shape.words


def disk(options: Options, shape: Shape) -> float:
    """Return the bytes of the checkpoints at their most: weights and Adam's two moments each.

    They are the best, the last and the kept ones, and one that is being written.
    """
    if options.get("checkpoint.no_save"):
        return 0.0
    kept = int(options.get("checkpoint.keep_interval_updates") or 0)
    return 12 * shape.parameters * (3 + max(0, kept))


def need(options: Options, words: int, card: Card, devices: int) -> Need:
    """Return what a training needs on ``devices`` cards.

    options: its resolved options, by dotted key. words: V.
    Raises: ValueError, in one sentence, for a model or batches without arithmetic.
    """
    shape = shape_of(options, words)
    names = {name: options.get(f"common.{name}", False) for name in ("fp16", "bf16")}
    precision = precisions.of_config({"common": names})
    tokens = shape.update * int(options["optimization.max_update"])
    seconds = tokens * operations(options, shape) / (card.peaks[precision] * devices)
    return Need(seconds, memory(options, shape, precision, devices), disk(options, shape))
