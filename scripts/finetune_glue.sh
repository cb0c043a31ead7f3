#!/usr/bin/env bash
# Fine-tunes a pre-trained checkpoint on one GLUE task or on all; can be stopped and repeated safely.
#
#   scripts/finetune_glue.sh <checkpoint> <task|all> [--lr LR …] [--seeds N] [--scale paper|small]
#                            [--jobs J] [--from DIR] [--slurm [--dry-run]]
#
#   scripts/finetune_glue.sh runs/table8/paper-Type5-linear-seed1/checkpoints/checkpoint_best.pt all
set -euo pipefail
export LRPE_STARTED_IN="$PWD"  # relative paths count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments finetune_glue "$@"
