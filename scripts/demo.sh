#!/usr/bin/env bash
# From nothing to a GPT trained on real text over 4 pipeline stages on the CPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/env.sh" || exit 1
out=${OUT:-$root/runs/demo}

echo "[1/2] real text as a Megatron dataset in $out/data"
python "$root/scripts/prepare_data.py" "$out/data"
echo "[2/2] Megatron's own 1F1B, 4 pipeline stages"
DATA=$out/data bash "$root/scripts/pretrain_gpt.sh" --cpu "$@"
