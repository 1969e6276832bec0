#!/usr/bin/env bash
# Sets up .venv and runs the tests: bash scripts/test.sh [--all] [any arguments of pytest]
#   --all   full counts (every seed, size and version) instead of the reduced default
# Without paths, what only computes (model check, random schedules, simulation, fuzzer), and what mostly waits (agreement, reports),
# runs beside the rest on what processor time that leaves: jobs of several processes often wait.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh || exit 1
export OMP_NUM_THREADS=1

for argument in "$@"; do
    [[ "$argument" =~ ^--(all|deep|seed=.*)$ ]] || exec python -m pytest "$@"
done

# compare forks processes that use autograd, so it comes before anything that has used it in this one
beside_it=(tests/compare tests/model_check tests/random_schedules tests/schedule tests/scheduler tests/simulate tests/program tests/fakes
    tests/comm/test_fuzz.py tests/tp_coord tests/report tests/trace tests/balance tests/scripts)
output=$(mktemp) status=0 beside=
stop() { [ -z "$beside" ] || kill "$beside" 2>/dev/null || true; rm -f "$output"; }
trap stop EXIT
nice -n 5 python -m pytest "$@" -p no:cacheprovider -o timeout=900 "${beside_it[@]}" >"$output" 2>&1 &
beside=$!
python -m pytest "$@" "${beside_it[@]/#/--ignore=}" || status=$?
echo "--- beside it: ${beside_it[*]} ---"
wait "$beside" || status=$?
beside=
cat "$output"
exit "$status"
