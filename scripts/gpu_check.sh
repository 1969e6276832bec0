#!/usr/bin/env bash
# Checks on this machine's GPUs what could only be rehearsed without one; one verdict table at the end. Under 8 minutes.
#   --python PYTHON   use this interpreter, with its torch and megatron-core (default: python, if it has both; else .venv)
#   --rehearse        the same on the CPU, with a fake GPU: what the check itself does, not what a GPU does
# Everything else goes to scripts/gpu_check.py (--ranks, --iterations, --only, --out).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python= rehearse= arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --python) python=${2:?--python needs an interpreter}; shift 2 ;;
        --rehearse) rehearse=1; arguments+=("$1"); shift ;;
        *) arguments+=("$1"); shift ;;
    esac
done
refuse() { echo "gpu_check: $1" >&2; exit 2; }
# Before anything is installed for nothing.
if [ -z "$rehearse" ] && ! nvidia-smi -L 2>/dev/null | grep -q GPU && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
    refuse "this machine has no GPU (nvidia-smi lists none, there is no /dev/nvidia0): run it where there is one, or --rehearse"
fi
usable() { "$1" -c 'import megatron.core, torch, zmq' 2>/dev/null; }
if [ -n "$python" ]; then
    usable "$python" || refuse "--python $python: can't import torch, megatron-core and pyzmq; name one that can, or leave it out"
elif usable python; then
    python=python
else
    source "$root/scripts/env.sh" || exit 1
    python=python
fi
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after 5 475 "$python" scripts/gpu_check.py "${arguments[@]}"
