"""The schedulers that training uses, under a virtual clock."""

from rrfp.simulate.clock import Deadlock, Result, Span, drive, simulate

__all__ = ["Deadlock", "Result", "Span", "drive", "simulate"]
