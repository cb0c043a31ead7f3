"""fairseq tasks that stock fairseq does not have."""

from lrpe_fairseq.tasks import truncated_bptt  # noqa: F401  (registers the task)
