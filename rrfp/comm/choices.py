"""The values of --rrfp-transport, for those who must not import what stands behind them (`paths` says what each is)."""

CHOICES = ("auto", "ipc", "nccl", "host")
