"""Read how far the angles of a language model move during training.

    python -m lrpe_fairseq.experiments drift runs/mine/checkpoints data/mine \
        --label "lrpe-type2" --out results/bench/drift/lrpe-type2.json

The folder is that of a training with ``checkpoint.save_interval_updates``: every checkpoint that
was saved within an epoch is read. ``make docs`` shows all files of results/bench/drift on the page
of the table ``angles``.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks
from torch import Tensor, nn

import lrpe_fairseq  # noqa: F401  registers the models
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.encodings.rotations.lrpe import LRPE
from lrpe_fairseq.experiments.records import checkpoints
from lrpe_fairseq.experiments.records.console import UserError, command
from lrpe_fairseq.experiments.records.files import first_shard, relative, write_json
from lrpe_fairseq.experiments.records.machine import environment

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


@command("drift")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print quantiles of the angles at every checkpoint, and write them as JSON."""
    parser = argparse.ArgumentParser(prog="drift", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="the checkpoints of a training")
    parser.add_argument("data", type=Path, help="a folder of data-prep")
    parser.add_argument("--label", required=True, help="the name of the row on the page")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    paths = saved_within_epochs(options.folder)
    trained = checkpoints.options(checkpoints.require_model(paths[0], "lrpe_lm"))
    length = int(trained["task.tokens_per_sample"])
    rows = list(measure(paths, options.data, length))
    about = {"label": options.label, "trained": length, "quantiles": QUANTILES}
    write_json(options.out, {"part": "drift", **about, **environment(), "rows": rows})
    for row in rows:
        print(row["updates"], *(f"{value:.3g}" for value in row["turns"]))
    print(f"written to {relative(options.out)}")


def saved_within_epochs(folder: Path) -> list[Path]:
    """Return the checkpoints that were saved by number of updates, the earliest first.

    Raises: UserError if there is none.
    """
    found = {
        int(match[1]): path
        for path in folder.glob("checkpoint_*.pt")
        if (match := checkpoints.PERIODIC.fullmatch(path.name))
    }
    if not found:
        raise UserError(
            f"{folder} has no checkpoint_EPOCH_UPDATE.pt: train with "
            "checkpoint.save_interval_updates=100 checkpoint.keep_interval_updates=-1"
        )
    return [found[updates] for updates in sorted(found)]


def measure(paths: Sequence[Path], data: Path, trained: int) -> Iterator[dict[str, Any]]:
    """Yield a row per checkpoint, that of the start of training first.

    A row has ``updates``, ``turns`` (:data:`QUANTILES` of the turns of all pairs in T = ``trained``
    tokens, |theta| T / 2 pi) and ``still``, the fraction of the pairs whose angle is 0.

    Raises: UserError for a model without angles.
    """
    home = {"data": str(first_shard(data))}
    for path in paths:
        (model,), config, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], home)
        if path == paths[0]:
            yield _row(0, angles_of(_untrained(config, task)), trained)
        state = checkpoints.require_model(path, "lrpe_lm")
        yield _row(checkpoints.updates(state), angles_of(model), trained)


def angles_of(model: nn.Module) -> Tensor:
    """Return the angles of all pairs of all layers, float64 (E,). Raises: UserError if none."""
    encodings = [m.encoding for m in model.modules() if isinstance(m, MultiheadAttention)]
    angles = [e.core.angles for e in encodings if isinstance(e, LRPE) and e.angles]
    if not angles:
        raise UserError("the model has no angles: choose rope or an LRPE type with rotations")
    return torch.cat([a.detach().double().flatten() for a in angles])


def _untrained(config: Any, task: tasks.FairseqTask) -> nn.Module:
    """Return the model before its first update."""
    torch.manual_seed(config.common.seed)
    return task.build_model(config.model)


def _row(updates: int, angles: Tensor, trained: int) -> dict[str, Any]:
    turns = angles.abs() * trained / (2 * math.pi)
    at = torch.tensor(QUANTILES, dtype=torch.float64)
    return {
        "updates": updates,
        "turns": torch.quantile(turns, at).tolist(),
        "still": (turns == 0).double().mean().item(),
    }
