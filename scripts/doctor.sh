#!/usr/bin/env bash
# Checks this environment before a long run and reports how to fix each problem.
#
#   scripts/doctor.sh
#   scripts/doctor.sh --kernels     checks every Triton kernel on the GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
# run as a file, because importing the package as a module needs torch, which is to be checked
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
exec "$python" lrpe_fairseq/experiments/commands/doctor.py "$@"
