"""Time and bytes of a text over two processes: ``python -m benchmarks.sequence_parallel``.

Forward and backward pass of one layer, for one process with the whole text and for N that share it.
Rounds of both alternate in the same processes, and the ratio is that of the shortest rounds: other
work on the machine slows both.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from lrpe_fairseq.attention.multihead import MultiheadAttention
from lrpe_fairseq.attention.parallel import bytes_sent, sequence_parallel

WIDTH, HEADS = 512, 8
ENCODINGS = ("none", "lrpe-type2", "lrpe-type8", "alibi", "fox", "path", "selective:rope")
TIMED = (("linear", "lrpe-type2"), ("linear", "fox"), ("linear", "path"), ("softmax", "rope"))
COUNTED = 1024
"""Tokens of the text whose bytes are printed."""
LENGTHS = (8192, 32768)
LONGEST_SOFTMAX = 8192
ROUNDS = 3


def layer_of(attention_type: str, name: str) -> MultiheadAttention:
    """Return the layer that is measured: LRPE, Table 7, column AML."""
    torch.manual_seed(0)
    options = {"attention_type": attention_type, "position_encoding": name, "causal": True}
    return MultiheadAttention(WIDTH, HEADS, normalizer="layernorm", **options)


def print_bytes(length: int, ranks: int) -> None:
    """Print the bytes that a rank sends for a layer and a token of the whole text, float32."""
    print(f"bytes per layer and token, T = {length:,}, {ranks} processes, width {WIDTH}")
    for name in ENCODINGS:
        sent = (bytes_sent(layer_of(kind, name), length, ranks) for kind in ("linear", "softmax"))
        linear, softmax = (n / length for n in sent)
        print(f"{name:16} linear {linear:10.1f}  softmax {softmax:10.1f}")


def shortest(step: Callable[[], None], alone: bool, rank: int) -> float:
    """Return the seconds of one round; ``alone``: the other ranks wait."""
    dist.barrier()
    begun = time.perf_counter()
    if not alone or rank == 0:
        step()
    dist.barrier()
    return time.perf_counter() - begun


def ratio(kind: str, name: str, length: int, rank: int) -> float:
    """Return the time of all processes together, divided by that of one alone."""
    layer = layer_of(kind, name)
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0))

    def whole() -> None:
        layer.attend(x)[0].sum().backward()

    def shared() -> None:
        with sequence_parallel(length=length) as sequence:
            layer.attend(sequence.part(x))[0].sum().backward()

    times: dict[bool, list[float]] = {True: [], False: []}
    for alone in (True, False):
        shortest(whole if alone else shared, alone, rank)  # the first calls compile and allocate
    for _ in range(ROUNDS):
        for alone in (True, False):
            times[alone].append(shortest(whole if alone else shared, alone, rank))
    return min(times[False]) / min(times[True])


def _process(rank: int, ranks: int, folder: str) -> None:
    """Measure in one of the processes; the first one prints."""
    torch.set_num_threads(1)
    where = f"file://{folder}/group"
    options = {"world_size": ranks, "timeout": timedelta(minutes=30)}
    dist.init_process_group("gloo", init_method=where, rank=rank, **options)
    for length, (kind, name) in itertools.product(LENGTHS, TIMED):
        if kind == "softmax" and length > LONGEST_SOFTMAX:
            continue
        found = ratio(kind, name, length, rank)
        if rank == 0:
            print(f"T = {length:6,}  {kind:8}{name:12} {found:.2f} of the time of one", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Print the bytes of every encoding, then the times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args()
    print_bytes(COUNTED, options.ranks)
    if not options.no_times:
        with tempfile.TemporaryDirectory() as folder:
            given = (options.ranks, str(Path(folder)))
            multiprocessing.spawn(_process, given, nprocs=options.ranks)


if __name__ == "__main__":
    main()
