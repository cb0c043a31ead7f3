#!/usr/bin/env bash
# Trains and evaluates the cells of a table; can be stopped and repeated safely.
#
#   scripts/run_table.sh <table> [--rows ROW …] [--columns TITLE …] [--attention linear|softmax]
#                        [--datasets DATA …] [--seeds N] [--scale small|paper] [--jobs J] [--gpus G] [--from DIR]
#                        [--precision fp32|fp16|bf16] [--minutes M] [--pack FILE.tar] [--dry-run] [--status]
#                        [--estimate [--on v100x8]]
#                        [--slurm [--partition P] [--time T] [--gpus-per-node G] [--nodes N]]
#
#   scripts/run_table.sh table2 --rows Base Type2 --seeds 2 --jobs 2
#   scripts/run_table.sh books --seeds 1 --jobs 4 --minutes 9 --pack books.tar
#   scripts/run_table.sh table2 --scale paper --slurm --partition gpu --gpus-per-node 4
set -euo pipefail
export LRPE_STARTED_IN="$PWD"  # relative paths count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" -m lrpe_fairseq.experiments run_table "$@"
