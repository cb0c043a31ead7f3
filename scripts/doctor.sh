#!/usr/bin/env bash
# Checks this environment before a long run and says what to do about what it finds.
#
#   scripts/doctor.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
# as a file, not as a module: importing the package needs the torch that is to be checked
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
exec "$python" lrpe_fairseq/experiments/commands/doctor.py "$@"
