"""Fixes for the pinned fairseq (fairseq-fixed 0.12.3.1) under current torch and numpy.

``apply()`` runs every fix in ``FIXES``. The docstring of each fix describes the break. A fix first
tests whether the break exists and changes nothing otherwise, so a repaired fairseq needs no change
here. The package imports this one first, and ``--user-dir`` imports the package before fairseq
parses an option or opens a checkpoint. A command without ``--user-dir`` (or without
``import lrpe_fairseq``) runs without the fixes.

=====================  ============================================================================
module                 what it mends
=====================  ============================================================================
``adaptive_softmax``   checkpoints of decoders with an adaptive softmax load
``archives``           archives that could write elsewhere are refused
``averages``           ``--store-ema`` copies buffers
``batch_order``        a resumed training reads the batches of an uninterrupted one
``batching``           ``--num-batch-buckets`` works; the last batch is kept
``bf16``               ``--bf16`` is not taken for a TPU
``byte_pieces``        text that bytes of a SentencePiece model spell
``clock``              training time survives a change of the clock
``dictionary_check``   a checkpoint records its words, and is not read with others
``few_launches``       ``adam`` on a GPU updates all parameters at once
``half_precision``     ``--fp16`` resumes with the float32 weights
``hydra_warnings``     hydra's deprecations are hidden
``missing_path``       a missing ``--path``, or weights that do not fit, are one sentence
``nested_options``     models with sections train from the command line
``numpy_names``        names that numpy removed
``option_text``        the text of an option is not run as code
``partial_scores``     no score of a part of the samples
``paths``              a path with a colon in it is one path
``processes``          GLUE metrics, checkpoints and the end of several processes
``resumed_place``      the place in the data with other batches; another model is refused
``run_state``          trainings of a sweep do not share state
``safe_checkpoints``   torch's safe loading, in several processes too
``short_log``          the log of a training begins with what a reader needs
``time_left``          a training says how long it takes
=====================  ============================================================================

Two modules have an ``apply()`` of their own, because they act later: after the models are
registered, and after ``fairseq_cli.train`` is imported.

=====================  ============================================================================
``configuration_log``  options are logged after they are checked
``preemption``         a training that gets a signal saves before it ends
=====================  ============================================================================

``patching`` has the two functions that replace functions and methods of fairseq.
"""

import functools
from collections.abc import Callable

from lrpe_fairseq.compat.adaptive_softmax import load_adaptive_softmax
from lrpe_fairseq.compat.archives import refuse_unsafe_archives
from lrpe_fairseq.compat.averages import copy_buffers_to_the_average
from lrpe_fairseq.compat.batch_order import resume_in_the_same_order
from lrpe_fairseq.compat.batching import bucket_by_percentile_method, keep_the_last_batch
from lrpe_fairseq.compat.bf16 import keep_bf16_off_the_tpu
from lrpe_fairseq.compat.byte_pieces import join_byte_pieces
from lrpe_fairseq.compat.clock import measure_training_time_monotonically
from lrpe_fairseq.compat.dictionary_check import refuse_other_dictionaries
from lrpe_fairseq.compat.few_launches import update_in_few_launches
from lrpe_fairseq.compat.half_precision import save_what_half_precision_rounds
from lrpe_fairseq.compat.hydra_warnings import silence_deprecations_of_hydra
from lrpe_fairseq.compat.missing_path import refuse_a_missing_path
from lrpe_fairseq.compat.nested_options import flatten_nested_options
from lrpe_fairseq.compat.numpy_names import restore_numpy_names
from lrpe_fairseq.compat.option_text import evaluate_options_as_literals
from lrpe_fairseq.compat.partial_scores import refuse_partial_scores
from lrpe_fairseq.compat.paths import keep_existing_paths_whole
from lrpe_fairseq.compat.processes import (
    gather_predictions,
    join_the_processes_of_torchrun,
    leave_the_process_group,
    save_the_state_of_every_process,
)
from lrpe_fairseq.compat.resumed_place import resume_where_the_data_were_left
from lrpe_fairseq.compat.run_state import give_every_run_a_state_of_its_own
from lrpe_fairseq.compat.safe_checkpoints import (
    allow_checkpoint_globals,
    share_checkpoint_between_processes,
)
from lrpe_fairseq.compat.short_log import shorten_the_log
from lrpe_fairseq.compat.time_left import say_how_long_a_training_takes

FIXES: tuple[Callable[[], None], ...] = (
    restore_numpy_names,
    allow_checkpoint_globals,
    share_checkpoint_between_processes,
    evaluate_options_as_literals,
    keep_bf16_off_the_tpu,
    bucket_by_percentile_method,
    keep_the_last_batch,
    flatten_nested_options,
    load_adaptive_softmax,
    copy_buffers_to_the_average,
    refuse_unsafe_archives,
    measure_training_time_monotonically,
    join_byte_pieces,
    gather_predictions,
    join_the_processes_of_torchrun,
    resume_where_the_data_were_left,
    resume_in_the_same_order,
    save_the_state_of_every_process,
    save_what_half_precision_rounds,
    leave_the_process_group,
    silence_deprecations_of_hydra,
    refuse_partial_scores,
    refuse_a_missing_path,
    keep_existing_paths_whole,
    give_every_run_a_state_of_its_own,
    refuse_other_dictionaries,
    say_how_long_a_training_takes,
    shorten_the_log,
    update_in_few_launches,
)


@functools.cache
def apply() -> None:
    """Apply every fix that is needed. A second call does nothing."""
    for fix in FIXES:
        fix()
