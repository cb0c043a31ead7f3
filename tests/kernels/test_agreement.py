"""Ranks of a distributed training agree on the kernels that serve, and never wait for ever."""

import hashlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from lrpe_fairseq.kernels import agreement


def ranks(work, count, folder, *given):
    """Run ``work(rank, *given)`` in processes of one gloo group; return their short results."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    store = str(folder / "store")
    multiprocessing.start_processes(
        _joined, (count, store, queue, work, given), nprocs=count, start_method="spawn"
    )
    return dict(queue.get() for _ in range(count))


def _joined(rank, count, store, queue, work, given):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    queue.put((rank, work(rank, *given)))
    dist.barrier()
    dist.destroy_process_group()


def _settled(rank):
    """What each of two ranks finds: both pass, one fails, one comes alone, one fails later."""
    found = [agreement.settle("both", True, 60.0), agreement.settle("one", rank == 0, 60.0)]
    start = time.monotonic()
    if rank == 0:
        found.append(agreement.settle("alone", True, 0.5))
    found.append(time.monotonic() - start < 30.0)
    dist.barrier()
    if rank == 1:
        agreement.settle("alone", False, 0.0)
    dist.barrier()
    agreement._board.next_look = 0.0
    failures = agreement.failures()
    return [*found, "alone" in failures, "both" in failures]


def test_a_failure_on_one_rank_holds_for_all_and_who_comes_alone_does_not_wait_for_ever(tmp_path):
    found = ranks(_settled, 2, tmp_path)
    assert found[0] == [True, False, True, True, True, False]
    assert found[1] == [True, False, True, True, False]


def test_without_other_ranks_a_result_stands():
    assert agreement.settle("alone", True, 60.0)
    assert not agreement.settle("failed", False, 60.0)
    agreement._board.next_look = 0.0
    assert agreement.failures() == set()


def _without_memory(kernel, grid, args, constants):
    if not kernel.fn.__module__.endswith("probe_triton"):
        raise RuntimeError("no shared memory")
    kernel[grid](*args, **constants)


def _trained(rank):
    """Two updates of a layer whose kernels fail on rank 1; what served, and the parameters."""
    from lrpe_fairseq.attention.multihead import MultiheadAttention
    from lrpe_fairseq.kernels import loader

    loader.interpret()
    if rank == 1:
        loader._launch = _without_memory
    torch.manual_seed(0)
    choices = {"attention_type": "linear", "position_encoding": "none", "causal": False}
    layer = MultiheadAttention(32, 2, **choices).half()
    model = DistributedDataParallel(Attends(layer))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(1, 9, 32, dtype=torch.float16)).float().square().mean().backward()
        optimizer.step()
    parameters = torch.cat([p.detach().flatten() for p in layer.parameters()])
    return dict(loader.SERVED), hashlib.sha256(parameters.numpy().tobytes()).hexdigest()


class Attends(torch.nn.Module):
    """A layer whose forward pass is that of batch-first tensors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.attend(x)[0]


def test_data_parallel_training_goes_on_where_one_rank_fails(tmp_path, monkeypatch):
    triton_probe = pytest.importorskip("tests.triton_probe", reason="the kernels need triton")
    if torch.cuda.is_available() or triton_probe.why_not():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = ranks(_trained, 2, tmp_path)
    (first, ours), (second, theirs) = found[0], found[1]
    assert ours == theirs
    what = "kernel of linear attention over all keys"
    assert first[what] == ["definition, because it failed on another rank on cpu"]
    assert "no shared memory" in second[what][0]
    assert first["linear attention"] == second["linear attention"]
    assert "triton" not in str(first["linear attention"])
