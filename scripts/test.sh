#!/usr/bin/env bash
# Sets up .venv and runs the tests: bash scripts/test.sh [--all] [any arguments of pytest]
#   --all   full counts (every seed, size and version) instead of the reduced default
# Without paths, two workers share the tests by folders, for jobs of several processes often wait; the second one's output comes at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh || exit 1
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # with it each of thousands of processes would compile all modules anew

for argument in "$@"; do
    [[ "$argument" =~ ^--(all|deep|seed=.*|durations=.*)$ ]] || exec python -m pytest "$@"
done

# Longest first. compare forks processes that use autograd, so it comes before anything that has used it in its process.
groups=(
    "tests/end_to_end"
    "tests/compare tests/model_check tests/random_schedules tests/scheduler tests/simulate"
    "tests/megatron"
    "tests/program tests/fakes"
    "tests/soak tests/engine tests/tp_coord"
    "tests/multimodal"
)
folders() { # of group $1; the last group is all that no other names
    local group
    [ "$1" -lt ${#groups[@]} ] && echo "${groups[$1]}" && return
    echo tests
    for group in ${groups[*]}; do echo "--ignore=$group"; done
}
work=$(mktemp -d) beside=
stop() { [ -z "$beside" ] || kill "$beside" $(pgrep -P "$beside") 2>/dev/null || true; rm -rf "$work"; }
trap stop EXIT
worker() { # takes group after group, as long as there are any
    local group failed=0
    for group in $(seq 0 ${#groups[@]}); do
        mkdir "$work/$group" 2>/dev/null || continue # the other one has it
        # shellcheck disable=SC2046 # words
        python -m pytest "$@" -p no:cacheprovider -o timeout=900 $(folders "$group") || failed=$?
    done
    return "$failed"
}
worker "$@" >"$work/output" 2>&1 &
beside=$!
status=0
worker "$@" || status=$?
wait "$beside" || status=$?
beside=
echo "--- the second worker ---"
cat "$work/output"
exit "$status"
