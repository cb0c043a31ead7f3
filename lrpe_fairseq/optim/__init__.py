"""fairseq optimizers and schedules that stock fairseq does not have."""

from lrpe_fairseq.optim import adam, cosine, trapezoid  # noqa: F401  (registers them)
