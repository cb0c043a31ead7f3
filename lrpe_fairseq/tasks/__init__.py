"""fairseq tasks that stock fairseq does not have."""

from lrpe_fairseq.tasks import synthetic, transduction, truncated_bptt  # noqa: F401  (registers the tasks)
