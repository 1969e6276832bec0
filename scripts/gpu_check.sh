#!/usr/bin/env bash
# Checks on this machine's GPUs what could only be rehearsed without one; one verdict table at the end. Under 8 minutes.
#   --python PYTHON   use this interpreter, with its torch and megatron-core (default: python, if it has both and a GPU; else .venv)
#   --rehearse        the same on the CPU, with a fake GPU: what the check itself does, not what a GPU does
# Everything else goes to scripts/gpu_check.py (--ranks, --iterations, --out).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=python gpu="torch.cuda.is_available()" arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --python) python=$2; shift 2 ;;
        --rehearse) gpu=True; arguments+=("$1"); shift ;;
        *) arguments+=("$1"); shift ;;
    esac
done
if ! "$python" -c 'import megatron.core, torch, zmq; raise SystemExit(not '"$gpu"')' 2>/dev/null; then
    source "$root/scripts/env.sh" || exit 1
    python=python
fi
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 480 "$python" scripts/gpu_check.py "${arguments[@]}"
