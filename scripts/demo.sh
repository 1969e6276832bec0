#!/usr/bin/env bash
# From nothing to a GPT trained on real text over 4 pipeline stages on the CPU: Megatron's own 1F1B, then RRFP, one table and one picture.
# Options go to scripts/demo.py (--stages, --microbatches, --iterations, --scenario, --out).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/env.sh" || exit 1
cd "$root"
export OMP_NUM_THREADS=1
exec python scripts/demo.py "$@"
