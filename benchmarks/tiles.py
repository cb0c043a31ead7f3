"""Times of attention with other tiles of the Triton kernels than the chosen ones, on a GPU.

    python -m benchmarks.slot --parts tiles --minutes 5

Use it on a GPU for which the tiles were not measured: ``tile_of`` of ``sweep_triton`` (linear
attention) and of ``flash_triton`` (softmax attention) chooses them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import rivals
from benchmarks.timing import contest

SWEEP, FLASH = "lrpe_fairseq.kernels.linear.sweep_triton", "lrpe_fairseq.kernels.flash.flash_triton"
SWEEPS = ((64, 8, 2), (32, 4, 3), (32, 4, 2), (32, 4, 1), (32, 8, 3), (16, 4, 3))
"""Tokens, warps and stages of a tile. 64 tokens with 4 warps fail: see ``sweep_triton.tile_of``."""
FLASH_TILES = ((128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2),
               (128, 32, 4, 2))  # fmt: skip
"""Queries, keys, warps and stages of a tile."""
SWEPT, FLASHES = ("forward", "query", "key"), ("output", "query_gradient", "key_gradient")
ALL_SWEPT = " ".join(SWEPT)
"""The kernels of a training step. In tiles (64, 8, 2): what LRPE_FAIRSEQ_LINEAR_TILE=64 chooses."""
FORMS = (
    ("linear", SWEEP, (ALL_SWEPT, *SWEPT)),
    ("linear, gates", SWEEP, ("forward", "query key")),  # both need equal tiles with gates
    ("flash, table", FLASH, FLASHES),
    ("flash, decay", FLASH, FLASHES),
    ("flash", FLASH, FLASHES),
    ("linear, sums", SWEEP, SWEPT),
    ("linear, decay", SWEEP, SWEPT),
    ("flash, gates", FLASH, FLASHES),
)
"""(form of :mod:`.rivals`, module of its kernels, names of the kernels), most important first."""


class Candidate(NamedTuple):
    """A tile of one kernel, or of several, for one form."""

    form: str
    module: str
    kernel: str
    tile: tuple[int, ...]


def candidates() -> Iterator[Candidate]:
    """Return all candidates, most important first."""
    for form, module, kernels in FORMS:
        for kernel, tile in product(kernels, SWEEPS if module == SWEEP else FLASH_TILES):
            rows = tile[kernel == "key_gradient"]
            if module == SWEEP or 16 * tile[2] <= rows:  # else warps compute the same rows
                yield Candidate(form, module, kernel, tile)


@contextmanager
def chosen(candidate: Candidate) -> Iterator[None]:
    """Context in which the kernels of a candidate have its tile."""
    module = import_module(candidate.module)
    default, tile = module.tile_of, module.Tile(*candidate.tile)

    def tile_of(name: str, call: Any) -> Any:
        return tile if name in candidate.kernel.split() else default(name, call)

    with mock.patch.object(module, "tile_of", tile_of):
        yield


def timed(
    candidate: Candidate, length: int, tokens: int, device: str, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    """Time a forward and backward pass with a candidate in turn with the chosen tiles.

    Returns: {error, seconds, relative_speed, relative_speed_quartiles}; without times if the error
        is too large.
    """
    form = rivals.forms(device)[candidate.form]
    with chosen(candidate):
        error = rivals.error(form, device, dtype)
    if not error <= rivals.TOLERANCE[dtype]:
        return {"failed": f"the error is {error:.2g}; not timed"}
    base = rivals.step(form, length, tokens, device, dtype)
    pair = {"base": base, "own": partial(_within, candidate, base)}
    timings = contest(pair, rounds, warmup=2, without_launches=True)
    return {
        "error": error,
        "seconds": timings["own"].median,
        "relative_speed": timings["base"].ratio(timings["own"]),
        "relative_speed_quartiles": timings["base"].quartiles(timings["own"]),
    }


def _within(candidate: Candidate, run: Callable[[], object]) -> None:
    with chosen(candidate):
        run()
