"""Lists as users meet them: PyTorch's published ones, and `rrfp schedule`."""
