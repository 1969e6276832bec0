"""Which action a rank runs next. Pure Python: no torch, no threads, no clock of its own."""

from rrfp.scheduler.arbiter import Decision, Scheduler
from rrfp.scheduler.dependencies import Dependencies, Task, chain

__all__ = ["Decision", "Dependencies", "Scheduler", "Task", "chain"]
