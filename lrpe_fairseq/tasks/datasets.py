"""What the datasets of our tasks share."""

import numpy as np
from fairseq.data import FairseqDataset


class SizedDataset(FairseqDataset):
    """A dataset whose attribute ``sizes``, int64 (examples,), has the tokens of every example."""

    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        """Return the tokens of an example, for ``--max-tokens``."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of examples, for ``--max-tokens``."""
        return self.sizes[indices]

    size = num_tokens


class EpochDataset(SizedDataset):
    """A dataset whose order, and with it the batches, is another in every ``epoch``."""

    epoch: int

    def set_epoch(self, epoch: int) -> None:
        """Called by fairseq before the batches of an epoch are made."""
        super().set_epoch(epoch)
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """False: fairseq would keep the batches of the first epoch."""
        return False
