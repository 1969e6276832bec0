"""RRFP: pipeline-parallel training by readiness, as a drop-in for Megatron-LM.

`import rrfp` imports neither torch nor megatron; `rrfp.install(...)` does.
"""

__version__ = "0.1.0"
