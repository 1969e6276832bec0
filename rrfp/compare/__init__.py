"""`rrfp compare`: ways of running side by side, on real processes whose stages are emulated or compute for real."""
