"""fairseq tasks: only what stock fairseq lacks."""

from lrpe_fairseq.tasks import truncated_bptt  # noqa: F401  (registers the task)
