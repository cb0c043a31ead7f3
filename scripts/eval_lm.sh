#!/usr/bin/env bash
# Evaluates a checkpoint under several protocols and writes a run file: by default non-overlapping
# blocks and sliding context (at least half a block of context). docs/running.md lists the
# protocols, also those for longer texts. Fails if an evaluation did not score every token. A run
# file of the same checkpoint and data keeps its other results.
#
#   scripts/eval_lm.sh <checkpoint> <data> [--splits valid test] [--protocols blocks tail-2048 …]
#                      [--context-scaling yarn --context-factor 4] [--out FILE.json]
#
#   scripts/eval_lm.sh runs/wikitext2/checkpoints/checkpoint_best.pt data/wikitext-2-bpe
set -euo pipefail
export LRPE_STARTED_IN="$PWD"  # relative paths count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments eval_lm "$@"
