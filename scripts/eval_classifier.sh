#!/usr/bin/env bash
# Evaluates a checkpoint of a classifier, also on other data with the same dictionary, and writes a run
# file. Default splits: valid and test, as far as the data have them. Inputs longer than in training are
# cut, unless --max-positions allows them.
#
#   scripts/eval_classifier.sh <checkpoint> <data> [--splits valid test] [--max-positions N]
#                              [--image-size HxW] [--out FILE.json]
#
#   scripts/eval_classifier.sh runs/listops/checkpoints/checkpoint_best.pt data/listops-100-400
set -euo pipefail
export LRPE_STARTED_IN="$PWD"  # relative paths count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments eval_classifier "$@"
