"""fairseq models: registration, presets and shared options."""

import fairseq  # noqa: F401  (first, so that the fixes are applied before a model uses it)

from lrpe_fairseq import compat
from lrpe_fairseq.compat import preemption

compat.apply()
preemption.apply()

from lrpe_fairseq.models import (  # noqa: E402, F401  (register the archs)
    classifier,
    language_model,
    masked_lm,
    translation,
    vit,
)
from lrpe_fairseq.models.bad_options import explain_bad_options  # noqa: E402
from lrpe_fairseq.models.overrides import apply_flat_overrides  # noqa: E402
from lrpe_fairseq.models.pruning import record_built_options  # noqa: E402

explain_bad_options()
apply_flat_overrides()
record_built_options()
