#!/usr/bin/env bash
# Translates with a checkpoint, or with the mean of the last ones in its folder, scores the result
# and writes a run file: detokenized sacrebleu and chrF with their signature, and the decoding options.
#
#   scripts/eval_mt.sh <checkpoint> <data> [--splits valid test] [--average N] [--beam N]
#                      [--lenpen X] [--out FILE.json]
#
#   scripts/eval_mt.sh runs/multi30k/checkpoints/checkpoint_last.pt data/multi30k --average 5
set -euo pipefail
export LRPE_STARTED_IN="$PWD"  # relative paths count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments eval_mt "$@"
