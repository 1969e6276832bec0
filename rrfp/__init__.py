"""RRFP: pipeline-parallel training by readiness, as a drop-in for Megatron-LM.

`import rrfp` imports neither torch nor megatron; `rrfp.install(...)` does.
"""

__version__ = "0.1.0"
__all__ = ["install", "register_hint", "uninstall"]


def __getattr__(name: str):
    # Lazily, so that the pure parts can be used without torch.
    if name in ("install", "uninstall"):
        from rrfp import megatron

        return getattr(megatron, name)
    if name == "register_hint":
        from rrfp.policy import register_hint

        return register_hint
    raise AttributeError(f"module 'rrfp' has no attribute {name!r}")
