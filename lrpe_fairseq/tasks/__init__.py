"""fairseq tasks that stock fairseq does not have."""

from lrpe_fairseq.tasks import transduction, truncated_bptt  # noqa: F401  (registers the tasks)
