#!/usr/bin/env bash
# Trains and evaluates the cells of a table of the paper; safe to stop and to repeat.
#
#   scripts/run_table.sh <table> [--rows ROW …] [--attention linear|softmax] [--seeds N]
#                        [--scale small|paper] [--jobs J] [--dry-run] [--status]
#
#   scripts/run_table.sh table2 --rows Base Type2 --seeds 2 --jobs 2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments.run_table "$@"
