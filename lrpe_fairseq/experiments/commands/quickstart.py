"""LRPE beside its baselines on real text, in minutes on two CPU cores: ``make quickstart``.

Prepares the English text that CPython carries, trains ``lrpe_lm_tiny`` six times through fairseq,
evaluates each model on held-out documents and writes ``results/quickstart/``: one table
(README.md), the validation curves (validation.png) and the run files (runs/). Checkpoints, logs
and TensorBoard logs lie in ``results/quickstart/work/``; a second call reuses them.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from lrpe_fairseq.experiments.families.lm import BLOCKS, LMRun
from lrpe_fairseq.experiments.records.checkout import require_checkout
from lrpe_fairseq.experiments.records.runs import Run, read_run, write_run
from lrpe_fairseq.experiments.report.curves import validation_curves
from lrpe_fairseq.experiments.runner.schedule import Events, Schedule, shares
from lrpe_fairseq.experiments.runner.training import ROOT, RunFailed

DATA = ROOT / "data" / "pydoc"
RESULTS = ROOT / "results" / "quickstart"
METHODS = (  # slowest first, so that the last ones to end end together
    ("linear", "lrpe-type3"),
    ("linear", "lrpe-type2"),
    ("linear", "rope"),
    ("linear", "none"),
    ("softmax", "lrpe-type2"),
    ("softmax", "none"),
)
ORDER = ("none", "rope", "lrpe-type2", "lrpe-type3")
PARALLEL = 2
HEAD = ("attention", "encoding", "test perplexity", "vs Base", "tokens/s", "vs Base", "TensorBoard")
TEXT = """# Quickstart

Written by `make quickstart`: `lrpe_lm_tiny` ({parameters}) on the English text that CPython
{python} carries, {updates} updates of {tokens} tokens, seed {seed}. Perplexity is per sentencepiece
piece on held-out documents ({evaluated} pieces), {protocol} Base is the encoding `none`:
sinusoidal positions only. Speed is training tokens per second of one process with
{threads}; it varies with what else the machine does.

{table}
`tensorboard --logdir results/quickstart/work` shows the training logs; the run files are in
[runs/](runs/).

![Validation curves](validation.png)

{machine}.
"""


def main() -> int:
    """Do it all, or what is still missing of it; returns the exit status."""
    begun = time.monotonic()
    events = Events(RESULTS / "work" / "events.log")
    try:
        require_checkout()
        prepare_corpus()
        if Schedule(methods(), shares(min(PARALLEL, _cores())), events).run():
            raise RunFailed("some runs failed; their logs are in results/quickstart/work")
        publish(methods())
    except (RunFailed, OSError, ValueError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    print(f"done in {minutes} min {seconds} s; results/quickstart/README.md has this table")
    return 0


def methods() -> list[LMRun]:
    """The six trainings."""
    return [_method(attention, encoding) for attention, encoding in METHODS]


def prepare_corpus() -> None:
    """Fill data/pydoc, or find it filled. Raises: RunFailed."""
    command = [sys.executable, "data-prep/pydoc/prepare.py", "--dest", str(DATA)]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if status.returncode:
        raise RunFailed("the corpus could not be prepared")


def publish(finished: Sequence[LMRun]) -> None:
    """Copy the run files, draw the curves, write the README and print the table."""
    runs = sorted((read_run(run.result) for run in finished), key=_order)
    for run in runs:
        name = f"{run['attention_type']}-{run['position_encoding']}.json"
        write_run(RESULTS / "runs" / name, run)
    text = readme(runs)
    (RESULTS / "README.md").write_text(text, encoding="utf-8")
    print("\n" + table(runs, aligned=True))
    try:
        validation_curves(RESULTS / "validation.png", _curves(runs))
    except ImportError:
        print("no validation.png: matplotlib is not installed (pip install matplotlib)")


def readme(runs: Sequence[Run]) -> str:
    """The text of results/quickstart/README.md; every number in it is from ``runs``."""
    first = runs[0]
    machine = first["hardware"]
    measured = first["metrics"]["test"][BLOCKS]
    config = first["config"]
    return TEXT.format(
        parameters=f"{config['decoder-layers']} x {config['decoder-embed-dim']}",
        python=first["versions"]["python"],
        updates=config["max-update"],
        tokens=f"{config['max-tokens'] * config['update-freq'][0]:,}",
        seed=first["seed"],
        evaluated=f"{measured['tokens']:,}",
        protocol=f"in non-overlapping blocks of {config['tokens-per-sample']}.",
        threads="one thread" if first["threads"] == 1 else f"{first['threads']} threads",
        table=table(runs),
        machine=f"{machine['cpu']}, {machine['cores']} cores; torch {first['versions']['torch']}",
    )


def table(runs: Sequence[Run], aligned: bool = False) -> str:
    """The runs as a Markdown table, each beside Base of its attention type."""
    lines = [list(HEAD), *(_cells(run, _base(run, runs)) for run in runs)]
    widths = [max(map(len, column)) if aligned else 3 for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in padded)


def _method(attention: str, encoding: str) -> LMRun:
    folder = RESULTS / "work" / f"{attention}-{encoding}"
    return LMRun(
        experiment="quickstart",
        label=encoding,
        config="quickstart",
        data=DATA,
        attention_type=attention,
        position_encoding=encoding,
        seed=1,
        scale="quickstart",
        folder=folder,
        result=folder / "run.json",  # published when all are done
        evaluations=(("test", BLOCKS),),
    )


def _cells(run: Run, base: Run) -> list[str]:
    ppl, base_ppl = (r["metrics"]["test"][BLOCKS]["ppl"] for r in (run, base))
    speed, base_speed = (r["tokens_per_second"] for r in (run, base))
    name = f"{run['attention_type']}-{run['position_encoding']}"
    same = run is base
    return [
        run["attention_type"],
        "none (Base)" if same else run["position_encoding"],
        f"{ppl:.2f}",
        "—" if same else f"{100 * (ppl / base_ppl - 1):+.1f} %",
        f"{speed:,.0f}",
        "—" if same else f"{speed / base_speed:.2f}",
        f"work/{name}/tensorboard",
    ]


def _base(run: Run, runs: Sequence[Run]) -> Run:
    wanted = (run["attention_type"], "none")
    return next(r for r in runs if (r["attention_type"], r["position_encoding"]) == wanted)


def _order(run: Run) -> tuple[str, int]:
    return run["attention_type"], ORDER.index(run["position_encoding"])


def _curves(runs: Sequence[Run]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in runs:
        curve = [(point["updates"], point["valid_ppl"]) for point in run["curve"]]
        title = f"{run['attention_type']} attention"
        found.setdefault(title, {})[run["position_encoding"]] = curve
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    sys.exit(main())
