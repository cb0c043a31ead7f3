#!/usr/bin/env bash
# Installs torch, fairseq and this package (editable) in a virtual environment.
#
#   PYTHON=python3.11 TORCH=torch==2.13.0 scripts/install.sh VENV [EXTRAS]
#
# `make install` calls this. PYTHON: an interpreter of version 3.11 or 3.12. TORCH: arguments of
# pip, such as "torch==2.10.0" or "torch --index-url URL". EXTRAS: extras of setup.py, such as
# "experiments,test". An environment of another Python version is recreated.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:?the folder of the virtual environment is missing} extras=${2:-}
: "${PYTHON:=python3}" "${TORCH:?set TORCH, for example TORCH=torch==2.13.0}"
read -ra torch <<<"$TORCH"
python=$venv/bin/python

wanted=$("$PYTHON" -c 'import sys; print(*sys.version_info[:2], sep=".")')
case $wanted in
3.11 | 3.12) ;;
*) echo "Python 3.11 or 3.12 is needed for fairseq, $PYTHON is $wanted: make PYTHON=python3.11 install" >&2 && exit 2 ;;
esac
found=$("$python" -c 'import pip, sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null || true)
# .venv may be a link to another disk, which venv does not accept
[ "$found" = "$wanted" ] || "$PYTHON" -m venv --clear "$(readlink -f "$venv")"

# pip's output goes to a log; a failing step prints the end of it.
log=$venv/install.log
: >"$log"
step() {
    echo "$1"
    shift
    "$@" >>"$log" 2>&1 || { tail -n 40 "$log" >&2 && echo "failed; all output is in $log" >&2 && exit 1; }
}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# --no-compile: the final import compiles only the modules in use, a small part of all.
install=("$python" -m pip install --progress-bar off --no-compile)
version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null; }
before=$(version || true)
step "installing $TORCH" "${install[@]}" "${torch[@]}" numpy cython setuptools wheel
# fairseq is built against one torch; pip would keep a build for another version.
[ "$before" = "$(version)" ] || "$python" -m pip uninstall --quiet --yes fairseq-fixed >>"$log" 2>&1

# fairseq's six extensions are compiled in parallel, each with up to 2 GB of memory. The ones that
# this package uses set -O3 themselves; for the others, -O1 without debug symbols takes half the
# time and gives the same results.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# With ninja, torch's builder gives all of them one build.ninja, which they overwrite: hide ninja.
printf '#!/bin/sh\nexit 1\n' >"$work/ninja"
chmod +x "$work/ninja"
jobs=$("$python" -c 'import os; print(min(4, len(os.sched_getaffinity(0))))' 2>/dev/null || echo 2)
printf '[build_ext]\nparallel = %s\n' "$jobs" >"$work/parallel.cfg"
# pip's cache does not record which torch a wheel was built against: use one cache per torch.
cache=(--no-cache-dir)
if folder=$("$python" -m pip cache dir 2>/dev/null); then
    cache=(--cache-dir "$folder/fairseq-torch-$(version)")
fi
# An isolated build of fairseq would install another torch; --no-build-isolation uses this one.
# With CUDA_HOME set it would build CUDA extensions, whose sources are not in its archive.
# fairseq-fixed requires torchaudio, which only its speech models use. PyPI's torchaudio is linked to
# CUDA, so that beside a torch for CPUs it does not import, and neither does what imports it if it is
# there, such as transformers. fairseq therefore comes without its requirements; the extra "plugin"
# has the others.
step "building fairseq" \
    env -u CUDA_HOME PATH="$work:$PATH" DIST_EXTRA_CONFIG="$work/parallel.cfg" \
    CFLAGS="${CFLAGS:-} -O1 -g0" CXXFLAGS="${CXXFLAGS:-} -O1 -g0" \
    "${install[@]}" "${cache[@]}" --no-build-isolation --no-deps fairseq-fixed==0.12.3.1
step "installing this package" \
    "${install[@]}" --no-build-isolation --editable ".[plugin${extras:+,$extras}]"
# One that an earlier version of this script has installed goes, unless TORCH names it.
if compgen -G "$venv/lib/python*/site-packages/torchaudio" >/dev/null && [[ $TORCH != *torchaudio* ]]; then
    "$python" -m pip uninstall --quiet --yes torchaudio >>"$log" 2>&1
fi
step "importing fairseq and this package" \
    "$python" -c 'import fairseq.data.data_utils_fast, lrpe_fairseq'
