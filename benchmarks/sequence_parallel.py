"""Bytes and time of a text over several processes: ``python -m benchmarks.sequence_parallel``.

The bytes that a process sends are counted (:func:`lrpe_fairseq.attention.parallel.bytes_sent`). The
times are of a forward and a backward pass of one layer, for one process with the whole text and for
two that share it, with one thread each. Rounds of both alternate in the same processes, and ratios
are medians over rounds. The result is results/bench/sequence-parallel.json, which docs/fairseq.md
shows.

``time`` is the time between barriers, on which other work on the machine counts;
``processor_time`` is that of the slower process, without waiting.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from benchmarks.timing import Timing
from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.parallel import bytes_sent, sequence_parallel
from lrpe_fairseq.experiments.records.files import ROOT, read_json, write_json
from lrpe_fairseq.experiments.records.machine import environment

TARGET = ROOT / "results" / "bench" / "sequence-parallel.json"
WIDTH, HEADS = 512, 8
ENCODINGS = ("none", "lrpe-type2", "lrpe-type8", "alibi", "fox", "path", "selective:rope")
TIMED = (("linear", "lrpe-type2"), ("linear", "fox"), ("linear", "path"), ("softmax", "rope"))
COUNTED = 1024
"""Tokens of the text whose bytes are counted."""
SIZES = (2, 4)
"""Numbers of processes for which bytes are counted."""
RANKS = 2
"""Processes that are timed."""
ROUNDS = {8192: 5, 32768: 3}
"""Tokens of a text -> rounds."""
LONGEST_SOFTMAX = 8192


KEYS = ("time", "processor_time")
"""The seconds of a round: between barriers, and the most processor time of a process."""


def layer_of(attention_type: str, name: str) -> MultiheadAttention:
    """Return the layer that is measured: LRPE, Table 7, column AML."""
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
    return MultiheadAttention(WIDTH, HEADS, normalizer="layernorm", **options)


def count_bytes() -> list[dict]:
    """Return the bytes that a process sends for a layer and a token of the whole text, float32."""
    rows = []
    for name, kind, ranks in itertools.product(ENCODINGS, ("linear", "softmax"), SIZES):
        sent = bytes_sent(layer_of(kind, name), COUNTED, ranks) / COUNTED
        rows.append({"encoding": name, "attention": kind, "processes": ranks, "bytes": sent})
        print(f"{name:16}{kind:8} {ranks} processes: {sent:8.1f} bytes per token", flush=True)
    return rows


def one_round(step: Callable[[], None], alone: bool, rank: int) -> tuple[float, float]:
    """Return the seconds of a round, as ``KEYS``; ``alone``: the other processes wait."""
    dist.barrier()
    begun = time.perf_counter()
    worked = time.process_time()
    if not alone or rank == 0:
        step()
    worked = time.process_time() - worked
    dist.barrier()
    most = torch.tensor(worked, dtype=torch.float64)
    ended = time.perf_counter()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return ended - begun, most.item()


def compare(kind: str, name: str, length: int, rank: int) -> dict:
    """Return the row of an encoding: times of all processes together relative to one alone."""
    layer = layer_of(kind, name)
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))

    def whole() -> None:
        layer.attend(x)[0].sum().backward()

    def shared() -> None:
        with sequence_parallel(length=length) as sequence:
            layer.attend(sequence.part(x))[0].sum().backward()

    steps = {True: whole, False: shared}
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(1 + ROUNDS[length]):
        for alone, step in steps.items():
            seconds = one_round(step, alone, rank)
            if number:  # the first calls compile and allocate
                found[alone].append(seconds)
    row = {"attention": kind, "encoding": name, "length": length, "rounds": ROUNDS[length]}
    for place, key in enumerate(KEYS):
        one = Timing(tuple(seconds[place] for seconds in found[True]))
        together = Timing(tuple(seconds[place] for seconds in found[False]))
        row |= {f"{key}_of_one": one.median, key: together.ratio(one)}
        row[f"{key}_quartiles"] = together.quartiles(one)
    return row


def _process(rank: int, ranks: int, folder: str) -> None:
    """Measure in one of the processes; the first one writes."""
    torch.set_num_threads(1)
    where = f"file://{folder}/group"
    options = {"world_size": ranks, "timeout": timedelta(minutes=30)}
    dist.init_process_group("gloo", init_method=where, rank=rank, **options)
    rows = []
    for length, (kind, name) in itertools.product(ROUNDS, TIMED):
        if kind == "softmax" and length > LONGEST_SOFTMAX:
            continue
        rows.append(compare(kind, name, length, rank))
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0:
        write_json(Path(folder) / "times.json", {"rows": rows})
    dist.destroy_process_group()


def measure_times() -> list[dict]:
    """Return the rows of :func:`compare` for every length and encoding."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_process, (RANKS, folder), nprocs=RANKS)
        return read_json(Path(folder) / "times.json")["rows"]


def main() -> None:
    """Count the bytes of every encoding, measure the times, and write both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-times", action="store_true", help="keep the times of the file")
    options = parser.parse_args()
    layer = {"width": WIDTH, "heads": HEADS, "dtype": "float32", "normalizer": "layernorm"}
    found = {**read_json(TARGET), **layer}
    found["bytes"] = {"length": COUNTED, "rows": count_bytes()}
    if not options.no_times:
        stated = environment()
        del stated["kernels"]  # those of this process, which computes no layer
        before = os.getloadavg()[0]
        rows = measure_times()
        load = {"load_before": before, "load_after": os.getloadavg()[0]}
        found["times"] = {"processes": RANKS, "threads": 1, **stated, **load, "rows": rows}
    write_json(TARGET, found, sort_keys=True)


if __name__ == "__main__":
    main()
