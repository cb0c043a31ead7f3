"""``make bench``: time attention, training and decoding; all results are ratios within a run.

``python -m benchmarks.run [PART …]`` measures all parts or the named ones, prints each as a table
and writes it to results/bench/<device>/<part>.json with its provenance; ``make docs`` renders
docs/speed.md from these files. Speed-ups are measured only after the contestants were compared and
agree.
"""

import argparse
import json
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from benchmarks import attention, decays, decoding, encoding, lengths, phases, profiles, training
from lrpe_fairseq.experiments.records.runs import environment

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench"
PARTS: dict[str, Callable[[argparse.Namespace], list[dict]]] = {
    "causal": lambda o: attention.measure(o.device, o.dtype, o.rounds),
    "decays": lambda o: decays.measure(o.device, o.dtype, o.rounds),
    "bidirectional": lambda o: attention.measure_bidirectional(o.device, o.dtype, o.rounds),
    "lengths": lambda o: lengths.measure(o.device, o.dtype, o.rounds),
    "encoding": lambda o: encoding.measure(o.device, o.dtype, o.rounds),
    "decoding": lambda o: decoding.measure(o.device, o.rounds),
    "table9": lambda o: training.measure(o.device, o.tokens, o.rounds, "lm", o.encodings, o.dtype),
    "table9-roberta": lambda o: training.measure(
        o.device, o.tokens, o.rounds, "roberta", o.encodings, o.dtype
    ),
    "tmlr-table6": lambda o: training.measure_table6(o.device, o.tokens, o.rounds, o.dtype),
    "stacks": lambda o: training.measure_stacks(o.device, o.tokens, o.rounds, o.dtype),
    "profiles": lambda o: profiles.measure(o.device, o.tokens, o.dtype),
    "phases": lambda o: phases.measure(o.device),
}
"""The parts, in the order of measurement."""
BY_ENCODING = ("table9", "table9-roberta")
"""Parts of which single rows can be measured again."""
IN_FLOAT32 = ("decoding", "phases")
"""Parts that do not follow ``--dtype``."""
SAME = ("hardware", "versions", "threads", "dtype")
"""What rows measured later must share with the other rows of a part."""


def main() -> None:
    """Measure, print and write the chosen parts."""
    options = parse()
    stated = environment()
    print(f"{stated['hardware']}\n{stated['versions']}\ncommit {stated['commit']}")
    attention.check(options.device)
    decays.check(options.device)
    decoding.check()
    print("the fast forms agree with their definitions\n", flush=True)
    threads = torch.get_num_threads()
    for part in options.parts:
        dtype = "float32" if part in IN_FLOAT32 else str(options.dtype)[6:]
        figures = {"part": part, **stated, "threads": threads, "dtype": dtype}
        before = earlier(options, figures) if options.encodings else {}
        rows = PARTS[part](options)
        show(part, rows)
        write(options.device, part, merged(before, {**figures, "rows": rows}))


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
        "--encodings",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"measure only these rows again, for {' and '.join(BY_ENCODING)}",
    )
    options = parser.parse_args()
    _known(parser, "part", options.parts, PARTS)
    _known(parser, "encoding", options.encodings, training.names())
    if options.encodings and not set(options.parts) <= set(BY_ENCODING):
        parser.error(f"--encodings is for {' and '.join(BY_ENCODING)} only; name these parts")
    dtype, tokens = ("float32", 1024) if options.device == "cpu" else ("bfloat16", 2**15)
    options.dtype = getattr(torch, options.dtype or dtype)
    options.tokens = options.tokens or tokens
    return options


def _known(
    parser: argparse.ArgumentParser, kind: str, given: list[str], names: Collection[str]
) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        parser.error(f"unknown {kind} {', '.join(unknown)}; choose from {', '.join(names)}")


def earlier(options: argparse.Namespace, figures: dict) -> dict:
    """Return the part's run file, beside whose rows new ones will stand; empty without a file.

    Raises:
        SystemExit: The file is from another machine, other versions or steps of another length.
    """
    path = RESULTS / options.device / f"{figures['part']}.json"
    if not path.exists():
        return {}
    before = json.loads(path.read_text(encoding="utf-8"))
    differing = [name for name in SAME if before[name] != figures[name]]
    steps = {round(row["seconds"] * row["tokens_per_second"]) for row in before["rows"]}
    if steps != {options.tokens}:
        differing.append(f"tokens ({', '.join(map(str, sorted(steps)))})")
    if differing:
        raise SystemExit(
            f"{path} differs in {', '.join(differing)}; measure the whole part without --encodings"
        )
    return before


def merged(before: dict, found: dict) -> dict:
    """Return ``before`` with the rows of ``found``, each with its commit, in place of its own."""
    if not before:
        return found
    new = {_row(row): {**row, "commit": found["commit"]} for row in found["rows"]}
    rows = {_row(row): row for row in before["rows"]}
    return {**before, "rows": list({**rows, **new}.values())}


def _row(row: dict) -> tuple[str, str]:
    return row["attention"], row["encoding"]


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
