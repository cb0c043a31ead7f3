"""BatchNorm over several processes, which import torch and fairseq only."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

NORMS = Path(__file__).parents[1] / "lrpe_fairseq" / "models" / "norms.py"
WIDTH, ROUNDS, PATIENCE = 4, 2, 240
ROWS = (7, 11)
"""Real tokens of each process."""


def norm_class():
    """SharedBatchNorm, without importing its package."""
    spec = importlib.util.spec_from_file_location("norms", NORMS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SharedBatchNorm


def example(rank):
    """Rows of a process, and the weights of its loss."""
    generator = torch.Generator().manual_seed(rank)
    return tuple(
        torch.randn(ROWS[rank], WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    )


def outcome(norm, rows, weight):
    """Apply a norm twice in training; output, gradients and statistics."""
    torch.manual_seed(0)
    norm.double().train()
    nn.init.normal_(norm.weight)
    x = rows.clone().requires_grad_()
    outs = [norm(x) for _ in range(ROUNDS)]
    sum((out * out * weight).sum() for out in outs).backward()
    grads = {f"grad of {name}": own.grad for name, own in norm.named_parameters()}
    return {"out": outs[-1].detach(), "grad of x": x.grad, **norm.state_dict(), **grads}


def main(rank, folder):
    """One process of the group."""
    torch.set_num_threads(1)
    dist = torch.distributed
    where = f"file://{folder}/group"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=len(ROWS))
    torch.save(outcome(norm_class()(WIDTH), *example(rank)), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_have_the_statistics_of_one_with_all_rows(tmp_path):
    command = [sys.executable, __file__]
    own = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(len(ROWS))]
    try:
        assert [process.wait(PATIENCE) for process in own] == [0, 0]
    finally:
        for process in own:
            process.kill()
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(ROWS))]
    rows, weight = (torch.cat(part) for part in zip(*map(example, range(len(ROWS))), strict=True))
    expected = outcome(nn.BatchNorm1d(WIDTH), rows, weight)
    for name in expected:
        parts = [part[name] for part in found]
        if name in ("out", "grad of x"):
            torch.testing.assert_close(torch.cat(parts), expected[name])
        elif name.startswith("grad of"):
            torch.testing.assert_close(sum(parts), expected[name])
        else:
            for part in parts:
                torch.testing.assert_close(part, expected[name])


def test_alone_it_is_torchs_batch_norm():
    rows = torch.randn(6, WIDTH)
    ours, theirs = norm_class()(WIDTH), nn.BatchNorm1d(WIDTH)
    torch.testing.assert_close(ours(rows), theirs(rows), rtol=0, atol=0)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=0, atol=0)
    found = ours(rows[:1])  # a single row has no variance
    torch.testing.assert_close(found, ours.eval()(rows[:1]), rtol=0, atol=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
