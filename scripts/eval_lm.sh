#!/usr/bin/env bash
# Evaluates a checkpoint under two protocols, non-overlapping blocks and sliding context (at least
# half a block of context), and writes a run file. Fails if an evaluation scored nothing.
#
#   scripts/eval_lm.sh <checkpoint> <data> [--splits valid test] [--out FILE.json]
#
#   scripts/eval_lm.sh runs/wikitext2/checkpoints/checkpoint_best.pt data/wikitext-2-bpe
set -euo pipefail
export LRPE_STARTED_IN="$PWD"  # relative paths count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments.commands.eval_lm "$@"
