"""The RRFP paper's experiments (arXiv 2605.18750) as commands: `python -m benchmarks.paper EXPERIMENT`."""
