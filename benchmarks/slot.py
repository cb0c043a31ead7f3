"""``python -m benchmarks.slot``: attention and training steps in minutes, most important first.

    python -m benchmarks.slot --minutes 9 --out results/bench
    python -m benchmarks.slot --parts attention --resume
    python -m benchmarks.slot --device cpu --tiny --minutes 2

Every part is a file <out>/<device>/<part>.json, written again after every row, from which ``make
docs`` renders docs/speed.md. Rows for which no time is left are missing; ``--resume`` measures
them, and those of kernels that have changed since. A row that fails is written with its error. An
error that leaves the GPU unusable restarts the program after that row.

- machine: bandwidth of a copy and rate of a matrix product.
- busy: the share of a training step in which the GPU computes.
- attention: forward and backward of the forms of :mod:`.rivals`, without their launches, relative
  to a baseline timed in turn, after a comparison with float64.
- steps: training steps of ``lrpe_lm``, relative to Base of the same attention; with peak memory.
- roberta: training steps of ``lrpe_roberta`` with padding and dropout.
- tiles: attention with other tiles of the kernels; only if it is named. See :mod:`.tiles`.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import rivals, tiles, training
from benchmarks.run import RESULTS
from benchmarks.timing import Timing, contest
from lrpe_fairseq.experiments.records import kernel_sources
from lrpe_fairseq.experiments.records.files import read_json, write_json
from lrpe_fairseq.experiments.records.machine import environment
from lrpe_fairseq.kernels import loader

USUAL = ("machine", "busy", "attention", "steps", "roberta")
PARTS = (*USUAL, "tiles")
SAME = ("hardware", "versions", "threads", "dtype")
"""What all rows of a file share."""
LONGEST_ROW = 90.0
"""Seconds after which a row is given up, compilation included."""
START = 20.0
"""Seconds that a new start of this program needs."""
Measure = Callable[..., dict[str, Any]]

FIRST = (
    *("none", training.STOCK, "rope", *(f"lrpe-type{n}" for n in range(1, 8))),
    *("alibi", "sandwich", "t5", "kerple-log", "fire", "fox", "gated:lrpe-type2"),
    *("permuteformer", "shaw", "stick-breaking", "path", "gated:path:lrpe-type2"),
    *("liere", "comrope-ap", "lrpe-type8", "transformer-xl", "deberta", "ape"),
)
"""Methods in the order of measurement; the others of :func:`training.names` follow."""
BUSY = (("softmax", "none"), ("linear", "none"), ("softmax", "lrpe-type2"),
        ("linear", "lrpe-type2"), ("softmax", training.STOCK))  # fmt: skip
ROBERTA = (("softmax", "none"), ("softmax", training.STOCK), ("softmax", "rope"), ("softmax", "t5"),
           ("softmax", "lrpe-type2"), ("linear", "none"), ("linear", "lrpe-type2"))  # fmt: skip
IN_MEMORY = (("softmax", "t5"), ("softmax", "alibi"))
"""Methods whose memory is measured at the longest length."""


class Overtime(Exception):
    """A row takes too long."""


@dataclass(frozen=True)
class Setting:
    """The device, and sizes that suit it.

    step_tokens: tokens of a training step. On a GPU as many as in an update of the table `books`;
        an H200 waits for kernel launches during half of a step of 16,384.
    shape, wide: options of the two models that differ.
    """

    device: str
    dtype: torch.dtype
    rounds: int
    tokens: int = 2**17
    lengths: tuple[int, ...] = (512, 2048, 1024, 8192)
    flat: tuple[int, int] = (512, 65536)
    step_tokens: int = 2**15
    step_lengths: tuple[int, int] = (512, 2048)
    memory_length: int = 4096
    matrix: int = 8192
    shape: dict[str, int] = field(default_factory=dict, hash=False)
    wide: dict[str, int] = field(default_factory=dict, hash=False)


SMALL = {"tokens": 2**12, "lengths": (512, 2048), "flat": (512, 4096), "step_tokens": 2**11,
         "memory_length": 2048, "matrix": 1024, "wide": {"encoder_layers": 2}}  # fmt: skip
"""Sizes for a CPU."""
WIDTHS = ("embed_dim", "input_dim", "output_dim", "ffn_embed_dim")
TINY = {"tokens": 256, "lengths": (64, 128), "flat": (64, 256), "step_tokens": 64, "matrix": 64,
        "step_lengths": (32, 64), "memory_length": 96}  # fmt: skip
TINY["shape"] = {"decoder_layers": 1, "decoder_attention_heads": 2}
TINY["shape"] |= {f"decoder_{name}": 32 for name in WIDTHS}
TINY["wide"] = {"encoder_layers": 1, "encoder_attention_heads": 2}
TINY["wide"] |= {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 32}
"""Sizes that test this program in a minute."""


class Row(NamedTuple):
    """A row to be measured; ``seconds``: what it takes at most, usually."""

    part: str
    key: dict[str, Any]
    measure: Callable[[], dict[str, Any]]
    seconds: float = 5.0


def main() -> None:
    """Measure the rows for which there is time."""
    options = parse()
    setting = settle(options)
    end = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGALRM, _give_up)
    files = Files(options.out / setting.device, setting, options.resume)
    missing = 0
    for row in rows(setting):
        left = end - time.monotonic()
        if row.part not in options.parts or files.has(row):
            continue
        found = measured(row, left) if row.seconds <= left else None
        missing += found is None
        if found is not None:
            files.add(row, found)
            print(row.part, *row.key.values(), _shown(found), flush=True)
        if not usable(setting):
            left = end - time.monotonic()
            if left < START:
                sys.exit("the GPU is unusable; --resume measures the other rows")
            again = [sys.executable, "-m", "benchmarks.slot", *sys.argv[1:]]
            os.execv(sys.executable, [*again, "--resume", "--minutes", str(left / 60)])
    print(f"{missing} rows are missing; --resume measures them" if missing else "all rows")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.slot", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: 9)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: results/bench")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=USUAL)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds per row")
    parser.add_argument("--tiny", action="store_true", help="sizes that test this program")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the files")
    return parser.parse_args()


def settle(options: argparse.Namespace) -> Setting:
    """Return the setting that the options choose."""
    on_gpu = options.device == "cuda"
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    sizes = TINY if options.tiny else {} if on_gpu else SMALL
    return Setting(options.device, dtype, options.rounds, **sizes)


def _give_up(*_: object) -> None:
    raise Overtime("it takes too long")


def measured(row: Row, left: float) -> dict[str, Any] | None:
    """Return the columns of a row, or its error; None if the time is over before it ends."""
    signal.setitimer(signal.ITIMER_REAL, min(LONGEST_ROW, left))
    try:
        return row.measure()
    except (Exception, Overtime) as error:  # a failed row must not end the others
        late = isinstance(error, Overtime) and left < LONGEST_ROW
        return None if late else {"failed": f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def usable(setting: Setting) -> bool:
    """True unless an error has left the GPU unusable for this process; frees its memory."""
    if setting.device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _shown(found: dict[str, Any]) -> str:
    kept = ("failed", "seconds", "relative_speed", "error", "busy")
    pairs = ((name, found[name]) for name in kept if found.get(name) is not None)
    return ", ".join(f"{n} {x:.4g}" if isinstance(x, float) else f"{n} {x}" for n, x in pairs)


class Files:
    """The files of all parts, with the rows measured so far."""

    def __init__(self, folder: Path, setting: Setting, resume: bool) -> None:
        """resume: keep the rows that the files have, measured on the same machine."""
        self._folder, self._device, self._known = folder, setting.device, {}
        threads, dtype = torch.get_num_threads(), str(setting.dtype)[6:]
        self._stated = {**environment(), "threads": threads, "dtype": dtype}
        self._stated["sources"] = kernel_sources.hashes()
        for part in PARTS if resume else ():
            before = read_json(folder / f"{part}.json")
            if before and alike(before, self._stated):
                own = {"commit": before["commit"], "sources": before.get("sources", {})}
                own = {name: x for name, x in own.items() if x != self._stated[name]}
                self._known[part] = [{**own, **row} for row in before["rows"]]

    def has(self, row: Row) -> bool:
        """True if the row was measured, on a GPU with the present kernels."""
        rows = self._known.get(row.part, [])
        if self._device != "cpu":
            rows = [x for x in rows if kernel_sources.is_current(row.part, x, self._stated)]
        return any(row.key.items() <= known.items() for known in rows)

    def add(self, row: Row, found: dict[str, Any]) -> None:
        """Write the part's file with one more row, in the place of one of earlier kernels."""
        rows = self._known.get(row.part, [])
        rows = [known for known in rows if not row.key.items() <= known.items()]
        self._known[row.part] = [*rows, {**row.key, **found}]
        kernels = {**self._stated["kernels"], "served": loader.SERVED}
        stated = {"part": row.part, **self._stated, "kernels": kernels}
        path = self._folder / f"{row.part}.json"
        write_json(path, {**stated, "rows": self._known[row.part]}, sort_keys=True)


def alike(before: dict[str, Any], stated: dict[str, Any]) -> bool:
    """True if rows of both may stand in one file: of the same machine, versions and kernels."""
    kernels = (here["kernels"] | {"served": None} for here in (before, stated))
    return next(kernels) == next(kernels) and all(before[n] == stated[n] for n in SAME)


# --- the rows, most important first --------------------------------------------------------------


def rows(setting: Setting) -> list[Row]:
    """Return all rows."""
    short, long = setting.step_lengths
    others = [name for name in training.names() if name not in FIRST]
    model = partial(trained, setting, "lm")
    masked = partial(trained, setting, "roberta")
    return [
        Row("machine", {}, partial(machine, setting), 15),
        *step_rows("busy", partial(busy, setting), BUSY, short),
        *attention_rows(setting, setting.lengths[:2]),
        *method_rows(model, FIRST, short),
        *step_rows("roberta", masked, ROBERTA, short, 10),
        *step_rows("steps", model, IN_MEMORY, setting.memory_length),
        flat_row(setting),
        *attention_rows(setting, setting.lengths[2:]),
        *method_rows(model, others, short),
        *method_rows(model, (*FIRST, *others), long),
        *flex_rows(setting),
        *(tile_row(setting, candidate) for candidate in tiles.candidates()),
    ]


def tile_row(setting: Setting, candidate: tiles.Candidate) -> Row:
    """Return the row of a tile."""
    short, *_ = setting.lengths
    sizes = short, setting.tokens, setting.device, setting.dtype, setting.rounds
    key = {**candidate._asdict(), "tile": str(candidate.tile), "length": short}
    return Row("tiles", key, partial(tiles.timed, candidate, *sizes), 8)


def attention_rows(setting: Setting, lengths: Collection[int]) -> list[Row]:
    """Return the rows of all forms at some lengths."""
    forms = rivals.forms(setting.device)
    return [attention_row(setting, *pair, n, 5) for n in lengths for pair in forms.items()]


def flex_rows(setting: Setting) -> list[Row]:
    """Return the rows of FlexAttention at two lengths."""
    forms = rivals.flex_forms(setting.device)
    return [
        attention_row(setting, *pair, n, 45) for n in setting.lengths[:2] for pair in forms.items()
    ]


def attention_row(
    setting: Setting, name: str, form: rivals.Form, length: int, seconds: float
) -> Row:
    """Return the row of a form at a length."""
    key = {"contestant": name, "length": length, "tokens": setting.tokens}
    return Row("attention", key, partial(compared, setting, name, form, length), seconds)


def flat_row(setting: Setting) -> Row:
    """Return the row of linear attention at a great length, relative to a usual one."""
    short, long = setting.flat
    key = {"contestant": "linear", "length": long, "tokens": setting.tokens, "base": f"at {short}"}
    return Row("attention", key, partial(flatness, setting))


def method_rows(measure: Measure, names: Collection[str], length: int) -> list[Row]:
    """Return the training steps of methods at a length, softmax attention before linear."""
    able = [("softmax", name) for name in names]
    linear = [name for name in names if name != training.STOCK]
    able += [("linear", name) for name in linear if training.serves("linear", name)]
    return step_rows("steps", measure, able, length)


def step_rows(
    part: str,
    measure: Measure,
    pairs: Collection[tuple[str, str]],
    length: int,
    seconds: float = 5,
) -> list[Row]:
    """Return the rows of training steps of (attention, encoding) pairs."""
    keys = ({"attention": a, "encoding": name, "length": length} for a, name in pairs)
    return [Row(part, key, partial(measure, **key), seconds) for key in keys]


# --- measurements --------------------------------------------------------------------------------


def machine(setting: Setting) -> dict[str, Any]:
    """Return {copy_gb_per_s, matmul_tflops}."""
    bytes_, side = 2 * setting.matrix**2, setting.matrix
    source = torch.empty(bytes_, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    matrix = torch.randn(side, side, device=setting.device, dtype=setting.dtype)
    contestants = {"copy": lambda: target.copy_(source), "product": lambda: matrix @ matrix}
    timings = contest(contestants, setting.rounds, without_launches=True)
    return {
        "copy_gb_per_s": 2 * bytes_ / timings["copy"].median / 1e9,
        "matmul_tflops": 2 * side**3 / timings["product"].median / 1e12,
    }


def compared(setting: Setting, name: str, form: rivals.Form, length: int) -> dict[str, Any]:
    """Compare a form with float64, then time it in turn with its baseline.

    Returns: {base, error, seconds, tokens_per_second, relative_speed, ...}; without times if the
        error is too large.
    """
    error = error_of(name, setting.device, setting.dtype)
    if not error <= rivals.TOLERANCE[setting.dtype]:
        return {"base": form.base, "failed": f"the error is {error:.2g}; not timed"}
    base = rivals.forms(setting.device)[form.base]
    sizes = length, setting.tokens, setting.device, setting.dtype
    pair = {"base": rivals.step(base, *sizes), "own": rivals.step(form, *sizes)}
    timings = contest(pair, setting.rounds, warmup=2, without_launches=True)
    own = figures(setting.tokens, timings["own"], timings["base"])
    return {"base": form.base, "error": error, **own}


@cache
def error_of(name: str, device: str, dtype: torch.dtype) -> float:
    """Return the error of a form, computed once for all lengths."""
    return rivals.error({**rivals.forms(device), **rivals.flex_forms(device)}[name], device, dtype)


def flatness(setting: Setting) -> dict[str, Any]:
    """Time linear attention at a great length in turn with a usual one, on as many tokens."""
    ours, sizes = rivals.forms(setting.device)["linear"], (setting.tokens, setting.device)
    runs = {n: rivals.step(ours, n, *sizes, setting.dtype) for n in setting.flat}
    timings = contest(runs, setting.rounds, warmup=2, without_launches=True)
    short, long = (timings[n] for n in setting.flat)
    return figures(setting.tokens, long, short)


def trained(
    setting: Setting, model: str, attention: str, encoding: str, length: int
) -> dict[str, Any]:
    """Time a training step in turn with Base's.

    Returns: the columns of :func:`training.measure`, and on a GPU ``peak_mb`` of a step and
        ``relative_memory``, over Base's.
    """
    base = step_of(setting, model, attention if model == "lm" else "softmax", "none", length)
    own = step_of(setting, model, attention, encoding, length)
    pair = {"base": base, "own": own}
    timings = contest(pair, setting.rounds, warmup=2)
    found = figures(setting.step_tokens, timings["own"], timings["base"])
    if setting.device == "cuda":
        peak, of_base = peak_mb(own), peak_mb(base)
        found |= {"peak_mb": peak, "relative_memory": peak / of_base}
    return found


def step_of(
    setting: Setting, model: str, attention: str, encoding: str, length: int
) -> Callable[[], None]:
    """Return a training step."""
    build = base_step if encoding == "none" else new_step
    return build(setting, model, attention, encoding, length)


def new_step(
    setting: Setting, model: str, attention: str, encoding: str, length: int
) -> Callable[[], None]:
    """Build a training step."""
    device, tokens, dtype = setting.device, setting.step_tokens, setting.dtype
    if model == "roberta":
        sizes = {**setting.wide, "length": length}
        return training.masked_step(encoding, attention, device, tokens, dtype, **sizes)
    sizes = {**setting.shape, "length": length}
    return training.step("lm", encoding, attention, device, tokens, dtype, **sizes)


base_step = lru_cache(maxsize=4)(new_step)
"""The step of Base, which the rows of two attentions and two lengths share."""


def figures(tokens: int, own: Timing, base: Timing) -> dict[str, Any]:
    """Return the speeds of a row, with the quartiles of its seconds."""
    return {**training.speeds(tokens, own, base), "seconds_quartiles": own.quartiles()}


def peak_mb(step: Callable[[], None]) -> float:
    """Return the memory of a step beyond parameters and moments, on a GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def busy(setting: Setting, attention: str, encoding: str, length: int) -> dict[str, Any]:
    """Profile three training steps.

    Returns: per step ``seconds`` without the profiler, ``operators`` and ``synchronizations``; on a
        GPU also ``kernels``, ``copies_from_host`` and ``busy``, the share of the seconds in which
        it computes.
    """
    step, times = new_step(setting, "lm", attention, encoding, length), 3
    seconds = contest({"": step}, setting.rounds, warmup=2)[""].median
    on_gpu = [ProfilerActivity.CUDA] if setting.device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as watched:
        for _ in range(times):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    events = watched.events()
    names = [event.name for event in events if event.device_type == DeviceType.CPU]
    found = {
        "seconds": seconds,
        "operators": sum(name.startswith("aten::") for name in names) / times,
        "synchronizations": sum(name.endswith("Synchronize") for name in names) / times,
    }
    work = [event for event in events if event.device_type == DeviceType.CUDA]
    work = [event for event in work if not event.name.startswith(("ProfilerStep", "Optimizer."))]
    if not work:
        return found
    covered = union([(e.time_range.start, e.time_range.end) for e in work])
    return found | {
        "kernels": len(work) / times,
        "copies_from_host": sum("Memcpy HtoD" in event.name for event in work) / times,
        "busy": covered / times / 1e6 / seconds,
    }


def union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


if __name__ == "__main__":
    main()
