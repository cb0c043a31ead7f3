"""Parse fairseq's output: training logs, eval-lm and validate.

The lines of a training log are those of ``common.log_format`` ``json`` or ``simple`` (fairseq's
default when it writes to a file), in the format of fairseq's log or in that of hydra.

Validation losses are means per token in base 2, as fairseq prints them; perplexity is 2 to the
loss.
"""

import contextlib
import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = r"\b(train_inner|valid)\b[][A-Z :|-]+"  # the logger, and what stands before its message
JSON = re.compile(SOURCE + r"(\{.*\})\s*$")
SIMPLE = re.compile(SOURCE + r"epoch \d+(?:: +\d+ / \d+ | \| valid on '\w+' subset \| )(.*)\n$")
PAIR = re.compile(r"(\w+)[= ]([^\s,]+)")
TOKENS = re.compile(r"Evaluated ([\d,]+) tokens")
LOSS = re.compile(r"Loss \(base 2\): ([-\d.einfa]+), Perplexity")
INFINITE = "skipping tokens with inf scores"  # fairseq-eval-lm counts them, without their loss
DIVERGED = "diverged"  # a metric: 1 instead of a loss and a perplexity that are not finite
NOT_FINITE = re.compile(
    r"FloatingPointError: (gradients are Nan/Inf|Minimum loss scale reached)"
    r"|^rank +\d+ = -?(nan|inf)$",  # fairseq's message with several processes
    re.MULTILINE,
)
SERVED = re.compile(
    r"((?:linear attention|softmax attention|kernel of)\b.*) runs as (.+)$", re.MULTILINE
)
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
GPU_MEMORY = re.compile(r"total memory = ([\d.]+) GB")
TAIL_BYTES = 16384


@dataclass(frozen=True)
class TrainingLog:
    """The log of one training: update -> training statistics, and update -> validation metrics."""

    inner: dict[int, dict[str, str]]
    valid: dict[int, dict[str, str]]

    def curve(self, metric: str) -> list[dict[str, float]]:
        """Return a metric, such as ``valid_ppl``, by update, with the training tokens so far.

        Empty if fairseq did not print that metric. Points that are not finite are omitted.
        """
        return [
            {"updates": n, "tokens": self._tokens_until(n), metric: float(v[metric])}
            for n, v in sorted(self.valid.items())
            if math.isfinite(float(v.get(metric, "nan")))
        ]

    def tokens_per_second(self) -> float | None:
        """Return the median speed after the first tenth; None if every speed was logged as 0.

        Raises: ValueError for an empty log.
        """
        if not self.inner:
            raise ValueError("the training log has no train_inner line")
        last = max(self.inner)
        # Not the first tenth: it has compilation, caches and the first touch of memory.
        speeds = [float(v["wps"]) for n, v in self.inner.items() if n > last / 10]
        speeds = [speed for speed in speeds if speed > 0]
        return round(statistics.median(speeds), 1) if speeds else None

    def _tokens_until(self, update: int) -> int:
        tokens, before = 0.0, 0
        for n, values in sorted(self.inner.items()):
            if n <= update:
                tokens = tokens + (n - before) * float(values["wpb"])
                before = n
        # Updates after the last logged one have the usual batch.
        first = next(iter(self.inner.values()), {"wpb": 0})
        return round(tokens + (update - before) * float(first["wpb"]))


def read_training_log(path: Path) -> TrainingLog:
    """Read a log; a later line replaces one of the same update. Empty without a file or a line."""
    log = TrainingLog({}, {})
    for kind, values in _entries(_text(path)):
        if kind == "valid":
            log.valid[int(values["valid_num_updates"])] = values
        else:
            log.inner[int(values["num_updates"])] = values
    return log


def seconds_per_update(path: Path, warm: int) -> float | None:
    """Return the median time of an update after the first ``warm`` ones; None without a line.

    A line of the log has the updates per second since the one before it.
    """
    known = read_training_log(path).inner
    speeds = [float(values["ups"]) for n, values in known.items() if n > warm and "ups" in values]
    speeds = [speed for speed in speeds if speed > 0]
    return 1 / statistics.median(speeds) if speeds else None


def peak_of_gpu(path: Path) -> float | None:
    """Return the most memory of the first process's GPU in bytes; None without one.

    fairseq logs what was free at the peak, ``gb_free``, and the memory of every device.
    """
    free = [float(v["gb_free"]) for v in read_training_log(path).inner.values() if "gb_free" in v]
    total = GPU_MEMORY.search(_text(path))
    return (float(total[1]) - min(free)) * 2**30 if free and total else None


def million_parameters(path: Path) -> float | None:
    """Return the number of the model's parameters, in millions; None if the log lacks it."""
    match = PARAMETERS.search(_text(path))
    return int(match[1].replace(",", "")) / 1e6 if match else None


def served(path: Path) -> dict[str, list[str]]:
    """Return the kernels by operation, as ``kernels.loader.log_served`` has logged them."""
    kernels_of: dict[str, set[str]] = {}
    for operation, kernel in SERVED.findall(_text(path)):
        kernels_of.setdefault(operation, set()).add(kernel)
    return {operation: sorted(kernels) for operation, kernels in kernels_of.items()}


def last_update(path: Path) -> int:
    """Return the last update in the log of a running training; 0 if there is none."""
    names = {"train_inner": "num_updates", "valid": "valid_num_updates"}
    seen = [int(values[names[kind]]) for kind, values in _entries(_tail(path))]
    return seen[-1] if seen else 0


def ended_not_finite(path: Path) -> bool:
    """True if the log ends with fairseq's error that gradients are not finite."""
    return bool(NOT_FINITE.search(_tail(path)))


def last_line(path: Path) -> str:
    """Return the last informative line of a log; after a crash, the exception."""
    lines = filter(None, map(str.strip, _tail(path).splitlines()))
    informative = [line for line in lines if not line.startswith(("Set the environment", "^"))]
    return informative[-1][:300] if informative else "it printed nothing"


def parse_evaluation(log: Path) -> dict[str, float]:
    """Return ``tokens`` and :func:`scored` from the log of fairseq-eval-lm.

    Raises: ValueError if nothing was evaluated; fairseq then prints perplexity 1.00 and exits with
        status 0.
    """
    output = log.read_text(encoding="utf-8")
    tokens = TOKENS.findall(output)
    loss = LOSS.findall(output)
    if not tokens or not loss:
        raise ValueError(f"fairseq-eval-lm printed no perplexity ({log})")
    count = int(tokens[-1].replace(",", ""))
    if count == 0:
        raise ValueError(
            "fairseq-eval-lm evaluated 0 tokens, so its perplexity means nothing: pass "
            "--tokens-per-sample no greater than the one of training"
        )
    # fairseq counts tokens with infinite scores and leaves their loss out of the mean.
    return {**scored(math.inf if INFINITE in output else float(loss[-1])), "tokens": count}


def perplexity(loss: float) -> float:
    """Return 2^loss, ``loss`` in bits; inf if it overflows."""
    try:
        return 2.0**loss
    except OverflowError:
        return math.inf


def scored(loss: float) -> dict[str, float]:
    """Return ``loss`` (bits) and ``ppl``, or ``diverged``: run files contain no inf or nan."""
    ppl = perplexity(loss)
    return {"loss": loss, "ppl": ppl} if math.isfinite(ppl) else {DIVERGED: 1}


def parse_validation(log: Path, split: str) -> dict[str, float]:
    """Return what fairseq-validate measured on ``split``. Raises: ValueError if it is missing."""
    output = log.read_text(encoding="utf-8")
    printed = re.findall(rf"\| {re.escape(split)} \| (\{{.*\}})", output)
    if not printed:
        raise ValueError(f"fairseq-validate printed no numbers for {split} ({log})")
    values = json.loads(printed[-1])
    return {n.removeprefix(f"{split}_"): float(v) for n, v in values.items() if n != "epoch"}


def _text(path: Path) -> str:
    """Return a log; empty without a log."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> str:
    """Return the end of a log; empty without a log."""
    try:
        with open(path, "rb") as log:
            # A log of a long training has hundreds of megabytes, and progress is read every
            # second.
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _entries(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the logger and the values of every whole line with statistics."""
    entries = map(statistics_of, text.splitlines(keepends=True))
    return [entry for entry in entries if entry is not None]


def statistics_of(line: str) -> tuple[str, dict[str, Any]] | None:
    """Return the logger and the values of a line, or None without statistics or if it was cut."""
    with contextlib.suppress(ValueError, KeyError):  # of a line that was truncated by a kill
        if match := JSON.search(line):
            return match[1], json.loads(match[2])
        if match := SIMPLE.search(line):
            return match[1], _simple(match[1], match[2])
    return None


def _simple(kind: str, text: str) -> dict[str, str]:
    """Return the values of a line in the format ``simple``, by their names in the format ``json``.

    Raises: ValueError or KeyError if the number of updates is missing or truncated.
    """
    values = dict(PAIR.findall(text))
    int(values["num_updates"])  # raises
    if kind == "valid":
        return {f"valid_{name}": value for name, value in values.items()}
    if "wall" not in values:  # the last one
        raise KeyError("wall")
    return values
