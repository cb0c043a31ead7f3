"""``make bench``: attention and training speed, every figure a ratio within this run.

Prints tables and writes the same figures to results/bench/<device>.json. A speed-up is printed
only after the contestants have been found equal.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks import attention, decoding, training
from lrpe_fairseq.experiments.runs import environment

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench"


def main() -> None:
    """Measure, print, write."""
    options = parse()
    figures = {**environment(), "threads": torch.get_num_threads(), "dtype": options.dtype}
    print(f"{figures['hardware']}\n{figures['versions']}\ncommit {figures['commit']}")
    attention.check()
    print("chunked = naive in outputs and gradients (float64): speed-ups may be shown\n")
    dtype = getattr(torch, options.dtype)
    figures["attention"] = attention.measure(options.device, dtype, options.rounds)
    show(figures["attention"], "speed_up", "chunked is faster by")
    figures["flatness"] = attention.measure_flatness(options.device, dtype, options.rounds)
    show(figures["flatness"], "speed_up", "cost per token over that at 512")
    figures["bidirectional"] = attention.measure_bidirectional(
        options.device, dtype, options.rounds
    )
    show(figures["bidirectional"], "speed_up", "bidirectional linear is faster by")
    figures["decoding"] = decoding.measure(options.device, options.rounds)
    show(figures["decoding"], "speed_up", "the linear decoder is faster by")
    show_states(figures["decoding"])
    figures["training"] = []
    for kind in () if options.no_training else ("linear", "softmax"):
        rows = training.measure(kind, options.device, options.tokens, options.rounds)
        show(rows, "relative_speed", "training speed relative to Base")
        figures["training"] += rows
    write(options.device, figures)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each contest")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a training step")
    parser.add_argument("--no-training", action="store_true", help="attention alone")
    return parser.parse_args()


def show(rows: list[dict], ratio: str, meaning: str) -> None:
    """Print rows as aligned columns, the ratio last."""
    label = ("length", "contestant") if "length" in rows[0] else ("attention", "encoding")
    print(f"{label[0]:>9}  {label[1]:<18}{'ms':>10}{'spread':>9}{'tokens/s':>11}  {meaning}")
    for row in rows:
        print(
            f"{row[label[0]]:>9}  {row[label[1]]:<18}{row['seconds'] * 1e3:>10.1f}"
            f"{row['spread']:>9.0%}{row['tokens_per_second']:>11.0f}  {row[ratio]:.2f}"
        )
    print(flush=True)


def show_states(rows: list[dict]) -> None:
    """Print what the self-attention states of decoding weigh."""
    print(f"{'length':>9}  {'decoder':<18}{'state MB':>10}")
    for row in rows:
        print(f"{row['length']:>9}  {row['contestant']:<18}{row['state_mb']:>10.2f}")
    print(flush=True)


def write(device: str, figures: dict) -> None:
    """Keep the figures beside the other results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{device}.json"
    path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(RESULTS.parents[1])}")


if __name__ == "__main__":
    main()
