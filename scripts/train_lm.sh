#!/usr/bin/env bash
# Trains one row of Table 2 on all GPUs, or on the CPU; prints the full command.
#
#   scripts/train_lm.sh <row> <attention> [key=value …] [--scale paper|small] [--seed N]
#
#   scripts/train_lm.sh Type2 linear
#   scripts/train_lm.sh Base softmax optimization.max_update=100 --scale small
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments train_row table2 "$@"
