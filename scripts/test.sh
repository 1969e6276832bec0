#!/usr/bin/env bash
# Sets up .venv and runs the tests: bash scripts/test.sh [--all] [any arguments of pytest]
#   --all   full counts (every seed, size and version) instead of the reduced default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh || exit 1
export OMP_NUM_THREADS=1
exec python -m pytest "$@"
