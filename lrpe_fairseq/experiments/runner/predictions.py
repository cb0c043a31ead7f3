"""The outputs of a classifier for every example of a split."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from torch import Tensor

BATCH = 32


@torch.no_grad()
def predictions(
    checkpoint: Path,
    data: Path,
    split: str,
    call: Callable[[Any, Mapping[str, Any]], Tensor],
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (N, ...) of all examples of a split, and their targets (N,).

    Args:
        data: a folder of data-prep.
        call: (model, net_input of a batch) -> outputs (B, ...).
        overrides: options of the checkpoint that change, by flat names.
    Returns: on the CPU, in the order of the batches.
    """
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(data / "bin"), **(overrides or {})}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = models[0].eval().to(device)
    task.load_dataset(split)
    batches = task.get_batch_iterator(task.dataset(split), max_sentences=BATCH)
    outputs, targets = [], []
    for sample in batches.next_epoch_itr(shuffle=False):
        sample = utils.move_to_cuda(sample) if device == "cuda" else sample
        outputs.append(call(model, sample["net_input"]).cpu())
        targets.append(sample["target"].view(-1).cpu())
    return torch.cat(outputs), torch.cat(targets)
