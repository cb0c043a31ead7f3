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

    def size(self, index: int) -> int:
        """Return the tokens of an example, for fairseq's filter."""
        return int(self.sizes[index])
