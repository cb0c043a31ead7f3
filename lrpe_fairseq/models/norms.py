"""BatchNorm whose statistics are those of all processes, on GPUs and on CPUs."""

import torch
import torch.distributed as dist
from fairseq.distributed.utils import get_global_world_size
from torch import Tensor, nn
from torch.nn import functional as F


class SharedBatchNorm(nn.BatchNorm1d):
    """BatchNorm over rows (N, C); in training over those of all processes, whose N may differ.

    torch's SyncBatchNorm has no form for CPUs. The result is that of one process with all rows.
    Trap: every process must call it equally often, and fairseq's dummy batch of a process that has
    run out of data counts too. A single row has no variance: it is normalized by the running
    statistics.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize rows (N, C), float32 or wider."""
        alone = get_global_world_size() == 1
        # a single row has no variance
        if not self.training or (alone and len(rows) == 1):
            return F.batch_norm(
                rows, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        if alone:
            return super().forward(rows)
        # sums and the number of rows in one message
        count = rows.new_tensor([len(rows)])
        total = Sum.apply(torch.cat([rows.sum(0), count]))
        mean = total[:-1] / total[-1]
        count = total[-1].detach()
        # around the mean of all processes, so that nothing cancels; a second message
        variance = Sum.apply((rows - mean).square().sum(0)) / count
        self._remember(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        return (rows - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics; ``variance`` is unbiased, as in torch."""
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)


class Sum(torch.autograd.Function):
    """The sum of a tensor over all processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        """Sum x, of one shape in all processes."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        """Sum the gradients of all processes."""
        return Sum.apply(grad)
