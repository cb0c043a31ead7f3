#!/usr/bin/env bash
# Tests this package with other versions of Python and torch: unit tests, compat tests and one
# end-to-end training. Each pair has a separate environment.
#
#   scripts/test_versions.sh                       # the pairs of docs/installing.md
#   scripts/test_versions.sh 3.11:2.6.0 3.12:2.13.0
#
# Writes results/versions/py<PYTHON>-torch<TORCH>.json for each pair and the table in
# docs/installing.md. Environments (6 GB each with CUDA) and logs are in runs/versions or
# $VERSIONS_DIR; a second call reuses the environments. WORKERS: number of pytest processes.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${VERSIONS_DIR:-runs/versions}
record=scripts/record_versions.py
# both ends of each supported range, and the last torch with code for a V100
claimed=(3.11:2.6.0 3.11:2.10.0 3.11:2.13.0 3.12:2.6.0 3.12:2.10.0 3.12:2.13.0)
main=.venv/bin/python
[ -x "$main" ] || main=python3
export PYTHONPATH=$PWD PYTHONSAFEPATH=1
pairs=("$@")
[ $# -gt 0 ] || pairs=("${claimed[@]}")

suite() { # NAME FILE...: run pytest; its counts go to $work/NAME.xml, its output to $work/NAME.log
    local name=$1
    shift
    rm -f "$work/$name.xml"
    "$work/venv/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile -m "$mark" \
        --junitxml "$work/$name.xml" "$@" >"$work/$name.log" 2>&1 ||
        echo "  $name: see $work/$name.log"
}

test_pair() {
    local python=${1%%:*} torch=${1##*:} mark
    work=$folder/py$python-torch$torch
    mkdir -p "$work"
    echo "Python $python, torch $torch"
    if ! "python$python" -c "" 2>"$work/python.log"; then
        "$main" "$record" "$python" "$torch" --not-run "python$python is not installed"
        return
    fi
    if ! PYTHON=python$python TORCH=torch==$torch scripts/install.sh "$work/venv" test; then
        "$main" "$record" "$python" "$torch" --not-run "the installation failed"
        return
    fi
    mark="not end_to_end and not exhaustive"
    # without the slow tests of the command line and of the compiler's cache
    suite unit tests/attention tests/encodings tests/kernels tests/test_every_encoding.py \
        --ignore tests/encodings/test_options.py --ignore tests/kernels/test_loader.py
    mark="not exhaustive"
    suite compat tests/test_compat.py
    suite end-to-end tests/end_to_end/test_language_model.py::test_a_training_killed_in_the_middle_resumes_to_the_same_weights_bit_for_bit[linear]
    "$work/venv/bin/python" "$record" "$python" "$torch" "$work"/{unit,compat,end-to-end}.xml
}

for pair in "${pairs[@]}"; do
    test_pair "$pair"
done
"$main" -m lrpe_fairseq.experiments.report.docs marked
