"""How samples become batches: buckets of lengths, and the last batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
from fairseq.data import bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset

from lrpe_fairseq.compat.patching import replace_once


def bucket_by_percentile_method() -> None:
    """Make ``--num-batch-buckets N`` work.

    Break: ``data_utils.get_buckets`` calls ``np.percentile(..., interpolation="lower")``. numpy 2.4
    has only the new name ``method``, so it raises TypeError. Trap: two other modules import the
    function by name, so it is replaced there too.
    """
    try:
        data_utils.get_buckets(np.arange(3), 1)
    except TypeError:
        for module in (data_utils, bucket_pad_length_dataset, raw_audio_dataset):
            module.get_buckets = _get_buckets


def keep_the_last_batch() -> None:
    """Keep every sample when batching, which matters most in evaluation.

    Break: ``data_utils.batch_by_size`` drops the last batch if its size is not a multiple of
    ``--required-batch-size-multiple`` (default 8), although it documents "less than N or a
    multiple of N". A perplexity silently omits up to one batch of text, and five short sentences
    give no batch at all.
    """
    if len(_batches_of(np.arange(2))) == 0:
        replace_once(data_utils, "batch_by_size", _batch_every_sample)


def _get_buckets(sizes: np.ndarray, num_buckets: int) -> np.ndarray:
    quantiles = np.linspace(0, 100, num_buckets + 1)
    return np.unique(np.percentile(sizes, quantiles, method="lower")[1:])


def _batches_of(indices: np.ndarray) -> list:
    """Return fairseq's batches of at most 8 samples; the break loses fewer than 8."""
    return data_utils.batch_by_size(
        indices, None, num_tokens_vec=indices, max_sentences=8, required_batch_size_multiple=8
    )


def _batch_every_sample(original: Callable, indices: Any, *rest: Any, **keywords: Any) -> list:
    """Return ``original``'s batches, and one more of the samples at the end that it dropped."""
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    batches = list(original(indices, *rest, **keywords))
    # batches are consecutive pieces of the indices, so that the dropped samples are the last ones
    dropped = indices[sum(map(len, batches)) :]
    return [*batches, dropped] if len(dropped) else batches
