#!/usr/bin/env bash
# Pretrain a ViT with an LLM over a pipeline, the ViT on as many early stages as a layout gives it:
#   bash scripts/pretrain_vlm.sh --cpu                             a small one on real images, 4 stages on this machine's CPU, Megatron's own 1F1B
#   bash scripts/pretrain_vlm.sh --cpu --pipeline-schedule rrfp    the same by readiness
#   bash scripts/pretrain_vlm.sh --preset qwen3-1.7b+vit-h:1/8/1 --pipeline-schedule rrfp --vlm-data DIR     a model of the RRFP paper
#   bash scripts/pretrain_vlm.sh --preset llama3-70b+vit-22b --dry-run     prints the whole command and the balance of its stages; --presets: a list
# Every other argument is Megatron's, RRFP's or the ViT's (docs/multimodal.md) and wins. Settings by environment variable: as in pretrain_gpt.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/env.sh" || exit 1
exec python "$root/scripts/recipe.py" vlm "$@"
