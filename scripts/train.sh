#!/usr/bin/env bash
# Prints and runs one fairseq-train command with this plugin, in one process or in N processes.
#
#   [PROCS=N] scripts/train.sh <fairseq-train arguments>
#
#   scripts/train.sh data/pydoc/bin --task language_modeling --arch lrpe_lm_tiny …
#   PROCS=2 scripts/train.sh …     # one training on 2 GPUs, or in 2 CPU processes over gloo
# The options of this plugin: docs/fairseq.md and docs/encodings.md. fairseq's --help does not list them.
#
# N processes use N times --max-tokens per update: divide --update-freq by N to compensate.
# `torchrun fairseq-train ... --user-dir lrpe_fairseq` starts the same processes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$root/.venv/bin" ] && PATH="$root/.venv/bin:$PATH"
export THP_MEM_ALLOC_ENABLE=${THP_MEM_ALLOC_ENABLE:-1}  # large tensors in huge pages: faster on a CPU
procs=${PROCS:-1}
usage() { sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

[[ $procs =~ ^[1-9][0-9]*$ ]] || { echo "train.sh: PROCS must be a positive integer, not '$procs'" >&2; exit 2; }
command -v fairseq-train >/dev/null || {
  echo "train.sh: fairseq is not installed: run make install in $root" >&2
  exit 2
}
[ $# -gt 0 ] || { usage >&2; exit 2; }
[[ $* != -h && $* != --help ]] || { usage; exit; }
command=(fairseq-train "$@")
[[ " $* " == *" --user-dir"* ]] || command+=(--user-dir "$root/lrpe_fairseq")

gpus=0
if [ "$procs" -gt 1 ] && [[ " $* " != *" --cpu "* ]]; then
  gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
fi
if [ "$procs" -gt 1 ] && [ "$gpus" -ge "$procs" ]; then
  command+=(--distributed-world-size "$procs")  # fairseq starts one process per GPU
elif [ "$procs" -gt 1 ] && [ "$gpus" -gt 0 ]; then
  echo "train.sh: $procs processes need $procs GPUs, found $gpus (or pass --cpu)" >&2
  exit 2
elif [ "$procs" -eq 1 ]; then  # by default fairseq would use all GPUs
  [[ " $* " == *" --distributed-world-size"* ]] || command+=(--distributed-world-size 1)
else
  [[ " $* " == *" --cpu "* ]] || command+=(--cpu)
  command+=(--ddp-backend legacy_ddp --distributed-backend gloo --distributed-no-spawn
    --distributed-init-method env:// --distributed-world-size "$procs")
  ranked='exec "$@" --distributed-rank "$RANK"'  # RANK is set only inside torchrun
  command=(torchrun --standalone --no-python --nproc_per_node "$procs"
    bash -c "$ranked" rank "${command[@]}")
fi
printf '%q ' "${command[@]}"
echo
exec "${command[@]}"
