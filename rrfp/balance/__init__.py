"""`rrfp balance`: parameters and floating-point operations of every pipeline stage, from Megatron's arguments alone."""
