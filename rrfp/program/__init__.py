"""Strategies as programs: a forward graph with tags, directives over its training DAG, plans and hint orders for the engine."""

__all__ = ["compile"]


def __getattr__(name: str):
    # Lazily: only running a program needs torch.
    if name == "compile":
        from rrfp.program.execute.compiled import compile

        return compile
    raise AttributeError(f"module 'rrfp.program' has no attribute {name!r}")
