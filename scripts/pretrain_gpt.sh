#!/usr/bin/env bash
# Pretrain a GPT over a pipeline:
#   bash scripts/pretrain_gpt.sh --cpu                             a small one on real text, 4 stages on this machine's CPU, Megatron's own 1F1B
#   bash scripts/pretrain_gpt.sh --cpu --pipeline-schedule rrfp    the same by readiness
#   bash scripts/pretrain_gpt.sh --pipeline-schedule rrfp          on GPUs, one stage each
#   bash scripts/pretrain_gpt.sh --preset gpt3-large:1/8/1 --pipeline-schedule rrfp --data-path ...     a model of the RRFP paper
#   bash scripts/pretrain_gpt.sh --preset gpt3-large --dry-run     prints the whole command and the balance of its stages; --presets: a list
# Every other argument is Megatron's or RRFP's and wins. Settings by environment variable (docs/presets.md):
#   STAGES=4                         pipeline stages of the small model, one process each
#   SCRIPT=scripts/pretrain_gpt.py   the training script; a Megatron-LM checkout's pretrain_gpt.py works unmodified
#   DATA=runs/data                   where the small model's dataset is, or is made
#   NNODES, NODE_RANK, MASTER_ADDR   several machines, as torchrun knows them; NPROC=8: processes on each
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/env.sh" || exit 1
exec python "$root/scripts/recipe.py" gpt "$@"
