"""ViT + LLM over a pipeline, the ViT on as many early stages as a layout gives it: stage modules, data, and what a step costs.

Importing it imports neither torch nor megatron; `layout` and `costs` never do.
"""
