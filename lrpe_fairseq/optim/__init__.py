"""fairseq optimizers that stock fairseq does not have."""

from lrpe_fairseq.optim import adam  # noqa: F401  (registers the optimizer)
