#!/usr/bin/env bash
# Your own training under several schedules, side by side: Megatron's 1F1B, the strict control, the same with more memory, ZB-H1, RRFP with BF
# and BFW, RRFP as it comes. One table, one picture, one JSON file (docs/compare.md):
#   bash scripts/compare.sh gpt --cpu                                           the small GPT, on this machine's CPU
#   bash scripts/compare.sh gpt --cpu --rrfp-emulate images-tokens:20           with emulated stage times
#   bash scripts/compare.sh gpt --preset gpt3-large:1/8/1 --data-path ...       a model of the RRFP paper on 8 GPUs
#   bash scripts/compare.sh vlm --preset qwen3-1.7b+vit-h --vlm-data DIR
#   bash scripts/compare.sh stages --stages 8 --microbatches 32 --scenario images-tokens     without a training: stages that sleep, real engine
# Options of the comparison come before a --: bash scripts/compare.sh gpt --repeats 3 --iterations 20 -- --cpu. All other arguments, and
# settings by environment variable, are those of scripts/pretrain_gpt.sh and scripts/pretrain_vlm.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
kind=${1:-}
if [[ ! "$kind" =~ ^(gpt|vlm|stages)$ ]]; then
    echo "rrfp: ${kind:-nothing}: must be gpt, vlm or stages; for example bash scripts/compare.sh gpt --cpu" >&2
    exit 2
fi
shift
source "$root/scripts/env.sh" || exit 1

if [ "$kind" = stages ]; then
    exec python -m rrfp compare --explain --modes ready:bf:2p ready:bfw:2p ready:auto:1f1b "$@"
fi
options=()
for argument in "$@"; do
    if [ "$argument" = -- ]; then
        while [ "$1" != -- ]; do
            options+=("$1")
            shift
        done
        shift
        break
    fi
done
for argument in "$@"; do
    case ${argument%%=*} in
    --modes | --iterations | --warm-up | --repeats | --out | --timeout)
        echo "rrfp: $argument: is an option of the comparison; write those before a --, for example bash scripts/compare.sh $kind" \
            "--repeats 3 -- --cpu" >&2
        exit 2
        ;;
    esac
done
exec python -m rrfp compare-training "${options[@]}" -- bash "$root/scripts/pretrain_$kind.sh" "$@"
