"""Causal attention from T = 128 to 65536: time per token, and peak memory of one sequence."""

import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.attention import fits, naive, ours, sdpa, step, tokens_of
from benchmarks.timing import Timing, contest

LENGTHS = tuple(2**n for n in range(7, 17))
FORMS = {"linear": ours, "sdpa": sdpa, "naive": naive}
LONGEST = {"linear": 2**16, "sdpa": 2**16, "naive": 2**12}  # the naive form needs O(T^2) memory
SETTLES = 2**14  # beyond, allocation time is negligible against the seconds of SDPA
TOKENS = 2**16  # per batch of the linear form


def measure(
    device: str,
    dtype: torch.dtype,
    rounds: int,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = TOKENS,
) -> list[dict]:
    """Return rows of {length, contestant, seconds_per_token, spread, speed_up, flatness, peak_mb}.

    ``speed_up``: speed of our linear attention over the contestant, in the same rounds.
    ``flatness``, ours only: time per token over that at T = 512 (or the shortest), with ``tokens``
    tokens per batch. ``peak_mb``: memory of a forward and backward pass on one sequence, without
    the inputs.
    """
    flat = flatness(device, dtype, rounds, lengths, tokens)
    rows = []
    for length in lengths:
        names = [name for name in FORMS if length <= LONGEST[name]]
        names = [name for name in names if name != "naive" or fits(device, length)]
        batch = tokens_of(device, length)
        steps = {n: step(FORMS[n], length, batch, device, dtype) for n in names}
        settle = steps if length <= SETTLES else ("linear",)
        timings = contest(steps, rounds=_rounds(rounds, length), settle=settle)
        for name in names:
            peak = peak_memory(name, length, device, dtype)
            rows.append(_row(length, name, timings, batch, flat[length], peak))
    return rows


def flatness(
    device: str, dtype: torch.dtype, rounds: int, lengths: Sequence[int], tokens: int
) -> dict[int, float]:
    """Return our time on ``tokens`` tokens at each length, over that at 512."""
    steps = {str(n): step(ours, n, tokens, device, dtype) for n in lengths}
    timings = contest(steps, rounds=rounds, settle=steps)
    base = timings["512"] if "512" in timings else timings[str(lengths[0])]
    return {int(name): timing.ratio(base) for name, timing in timings.items()}


def peak_memory(name: str, length: int, device: str, dtype: torch.dtype) -> float:
    """Return the peak memory in MB of a pass over one sequence; on CPU in a separate process."""
    if device != "cpu":
        run = step(FORMS[name], length, length, device, dtype)
        run()
        gc.collect()  # or tensors of earlier contests are freed between the two readings
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    command = [sys.executable, "-m", "benchmarks.lengths", name, str(length), str(dtype)[6:]]
    root = Path(__file__).resolve().parents[1]
    return float(subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout)


def _own_peak(name: str, length: int, dtype: torch.dtype) -> float:
    """Return the MB by which this process grows in one pass."""
    step(FORMS[name], 64, 64, "cpu", dtype)()
    run = step(FORMS[name], length, length, "cpu", dtype)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1e3


def _status(name: str) -> int:
    """Return a field of /proc/self/status in kilobytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {name}")


def _rounds(rounds: int, length: int) -> int:
    return rounds if length <= 4096 else max(1, rounds * 4096 // length)


def _row(
    length: int, name: str, timings: dict[str, Timing], tokens: int, flat: float, peak: float
) -> dict:
    timing = timings[name]
    return {
        "length": length,
        "contestant": name,
        "seconds_per_token": timing.median / tokens,
        "spread": timing.spread,
        "speed_up": timing.ratio(timings["linear"]),
        "flatness": flat if name == "linear" else None,
        "peak_mb": peak,
    }


if __name__ == "__main__":
    print(_own_peak(sys.argv[1], int(sys.argv[2]), getattr(torch, sys.argv[3])))
