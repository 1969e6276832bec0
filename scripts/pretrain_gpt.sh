#!/usr/bin/env bash
# Pretrain a small GPT on real text over a pipeline, on this machine:
#   bash scripts/pretrain_gpt.sh --cpu                             4 stages on the CPU, Megatron's own 1F1B
#   bash scripts/pretrain_gpt.sh --cpu --pipeline-schedule rrfp    the same by readiness
#   bash scripts/pretrain_gpt.sh --pipeline-schedule rrfp          on GPUs, one stage each
# Every other argument is Megatron's or RRFP's and wins over scripts/tiny_gpt.args. Settings by environment variable:
#   STAGES=4                         pipeline stages, one process each
#   SCRIPT=scripts/pretrain_gpt.py   the training script; a Megatron-LM checkout's pretrain_gpt.py works unmodified
#   DATA=runs/data                   where the dataset is, or is made
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/env.sh" || exit 1

stages=${STAGES:-4} script=${SCRIPT:-$root/scripts/pretrain_gpt.py} data=${DATA:-$root/runs/data} cpu=()
if [ "${1:-}" = --cpu ]; then
    cpu=(--cpu)
    shift
fi
[ -f "$data/text.args" ] || python "$root/scripts/prepare_data.py" "$data" >/dev/null
mapfile -t arguments < <(tr -s ' ' '\n' <"$root/scripts/tiny_gpt.args" && cat "$data/text.args")

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --standalone --nproc-per-node "$stages" -m rrfp "${cpu[@]}" "$script" \
    "${arguments[@]}" --pipeline-model-parallel-size "$stages" "$@"
