#!/usr/bin/env bash
# Sets up .venv and runs the tests: bash scripts/test.sh [--all] [any arguments of pytest]
#   --all   full counts (every seed, size and version) instead of the reduced default
# Without paths it has two queues that run side by side, for jobs of several processes often wait; the second one's output comes at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh || exit 1
export OMP_NUM_THREADS=1

for argument in "$@"; do
    [[ "$argument" =~ ^--(all|deep|seed=.*|durations=.*)$ ]] || exec python -m pytest "$@"
done

# What only computes (model check, random schedules, simulation, fuzzer) and what mostly waits (agreement, reports). compare forks processes that
# use autograd, so it comes before anything that has used it in this one.
computes=(tests/compare tests/model_check tests/random_schedules tests/schedule tests/scheduler tests/simulate tests/program tests/fakes
    tests/comm/test_fuzz.py tests/tp_coord tests/report tests/trace tests/balance tests/scripts)
trains=(tests/megatron tests/multimodal)
output=$(mktemp) status=0 beside=
stop() { [ -z "$beside" ] || kill "$beside" $(pgrep -P "$beside") 2>/dev/null || true; rm -f "$output"; }
trap stop EXIT
second_queue() {
    local failed=0 queue
    for queue in computes trains; do
        local -n paths=$queue
        python -m pytest "$@" -p no:cacheprovider -o timeout=900 "${paths[@]}" || failed=$?
    done
    return "$failed"
}
second_queue "$@" >"$output" 2>&1 &
beside=$!
python -m pytest "$@" "${computes[@]/#/--ignore=}" "${trains[@]/#/--ignore=}" || status=$?
echo "--- beside it: ${computes[*]} ${trains[*]} ---"
wait "$beside" || status=$?
beside=
cat "$output"
exit "$status"
