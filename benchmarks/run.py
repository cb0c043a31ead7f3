"""``make bench``: time attention, training and decoding; all results are ratios within a run.

``python -m benchmarks.run [PART …]`` measures all parts or the named ones, prints each as a table
and writes it to results/bench/<device>/<part>.json with its provenance; ``make docs`` renders
docs/speed.md from these files. Speed-ups are measured only after the contestants were compared and
agree.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import attention, decays, decoding, lengths, phases, training
from lrpe_fairseq.experiments.records import kernel_sources
from lrpe_fairseq.experiments.records.machine import environment

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench"
PARTS: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "causal": lambda o: attention.measure(o.device, o.dtype, o.rounds),
    "decays": lambda o: decays.measure(o.device, o.dtype, o.rounds),
    "bidirectional": lambda o: attention.measure_bidirectional(o.device, o.dtype, o.rounds),
    "lengths": lambda o: lengths.measure(o.device, o.dtype, o.rounds),
    "decoding": lambda o: decoding.measure(o.device, o.rounds),
    "table9": lambda o: training.measure(o.device, o.tokens, o.rounds, o.dtype, o.names),
    "tmlr-table6": lambda o: training.measure_table6(o.device, o.tokens, o.rounds, o.dtype),
    "stacks": lambda o: training.measure_stacks(o.device, o.tokens, o.rounds, o.dtype),
    "normalizers": lambda o: training.measure_normalizers(o.device, o.tokens, o.rounds, o.dtype),
    "compiled-steps": lambda o: training.measure_compiled(o.device, o.tokens, o.rounds, o.dtype),
    "phases": lambda o: phases.measure(o.device),
}
"""The parts, in the order of measurement."""
IN_FLOAT32 = ("decoding", "phases")
"""Parts that do not follow ``--dtype``."""


def main() -> None:
    """Measure, print and write the chosen parts."""
    options = parse()
    stated = {**environment(), "sources": kernel_sources.hashes()}
    print(f"{stated['hardware']}\n{stated['versions']}\ncommit {stated['commit']}")
    attention.check(options.device)
    decays.check(options.device)
    decoding.check()
    print("the fast forms agree with their definitions\n", flush=True)
    threads = torch.get_num_threads()
    for part in options.parts:
        dtype = "float32" if part in IN_FLOAT32 else str(options.dtype)[6:]
        figures = {"part": part, **stated, "threads": threads, "dtype": dtype}
        rows = PARTS[part](options)
        show(part, rows)
        if options.names:
            own = {"threads": threads, **{name: stated[name] for name in ("commit", "sources")}}
            figures = with_earlier(options.device, part, rows, own)
        else:
            figures["rows"] = rows
        write(options.device, part, figures)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=f"{[*PARTS]}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: float32 on a CPU, bfloat16 on a GPU",
    )
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds per contest")
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens per training step; default: 1,024 on a CPU, 32,768 on a GPU",
    )
    parser.add_argument(
        "--names",
        nargs="+",
        choices=training.names(),
        metavar="NAME",
        help="with table9: measure these encodings only; other rows stay",
    )
    options = parser.parse_args()
    if options.names and options.parts != ["table9"]:
        parser.error("--names is for the part table9: name this part only")
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")
    dtype, tokens = ("float32", 1024) if options.device == "cpu" else ("bfloat16", 2**15)
    options.dtype = getattr(torch, options.dtype or dtype)
    options.tokens = options.tokens or tokens
    return options


def with_earlier(device: str, part: str, rows: list[dict], stated: dict) -> dict:
    """Return the figures of a part with rows in the place of earlier ones.

    stated: what the rows state themselves, because it may differ from that of the file.
    """
    figures = json.loads((RESULTS / device / f"{part}.json").read_text(encoding="utf-8"))
    made = {(row["attention"], row["encoding"]) for row in rows}
    kept = [r for r in figures["rows"] if (r["attention"], r["encoding"]) not in made]
    return {**figures, "rows": [*kept, *({**row, **stated} for row in rows)]}


def show(part: str, rows: list[dict]) -> None:
    """Print rows as aligned columns with their common keys as the head."""
    keys = list(rows[0])
    cells = [[_shown(row.get(key)) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(keys, *cells, strict=True)]
    print(part)
    for line in [keys, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(flush=True)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "–".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(device: str, part: str, figures: dict) -> None:
    """Write the measurements to results/bench."""
    path = RESULTS / device / f"{part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"written to {path.relative_to(RESULTS.parents[1])}\n", flush=True)


if __name__ == "__main__":
    main()
