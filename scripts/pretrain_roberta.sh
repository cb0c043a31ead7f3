#!/usr/bin/env bash
# Pre-trains one row of Table 8 on all GPUs, or on the CPU; prints the full command.
#
#   scripts/pretrain_roberta.sh <row> <attention> [key=value …] [--scale paper|small] [--seed N]
#
#   scripts/pretrain_roberta.sh Type5 linear
#   scripts/pretrain_roberta.sh Base softmax optimization.max_update=100 --scale small
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments train_row table8 "$@"
