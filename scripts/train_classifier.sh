#!/usr/bin/env bash
# Trains one row of a table of classifiers on all GPUs, or on the CPU; prints the full command.
#
#   scripts/train_classifier.sh <table> <row> <attention> [key=value …] [--scale SCALE] [--seed N]
#                               [--dataset DATA]
#
#   scripts/train_classifier.sh images RoPE linear
#   scripts/train_classifier.sh images RoPE linear model.position_grid=axial
#   scripts/train_classifier.sh listops Base softmax model.encoder_layers=4
#   scripts/train_classifier.sh tmlr-table4 RoPE linear --dataset lra-text
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments train_row "$@"
