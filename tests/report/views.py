"""Made-up views of the ranks of a pipeline, as `Engine.view` makes them."""

ACTIVATION = {"action": "1F5", "microbatch": 5, "after": [], "lacks": ["0>1"], "held": None}
GRADIENT = {"action": "0B2", "microbatch": 2, "after": [], "lacks": ["1>0"], "held": None}
HELD = {"action": "0F6", "microbatch": 6, "after": [], "lacks": [], "held": "the limit 4 (in flight 4)"}
LOST = {"rank": 1, "where": "heartbeat", "text": "no sign of life for 9 s: stopped, or its machine hangs", "traceback": "", "lost": True}


def edges(rank: int, *, sent=(6, 3), received=(6, 3), waiting=0, credits=4, granted=4, handed=()) -> dict:
    """Of rank 0 or 1 of a pair. sent, received: over 0>1 and over 1>0."""
    out = {"direction": "out", "peer": 1 - rank, "credits": credits, "sent": sent[rank], "waiting": waiting, "handed": list(handed)}
    into = {"direction": "in", "peer": 1 - rank, "credits": granted, "received": received[1 - rank], "waiting": 0, "here": []}
    return {"0>1": out, "1>0": into} if rank == 0 else {"0>1": into, "1>0": out}


def view(rank: int, *, pipeline=(0, 1), world=2, **changes) -> dict:
    """A rank in call 7 that waits for nothing."""
    return {
        "run": "20261130-011530-ab12cd", "world": world, "global_rank": pipeline[rank], "pipeline": list(pipeline),
        "names": [f"stage {stage} (rank {each})" for stage, each in enumerate(pipeline)], "host": f"node{rank}", "pid": 100 + rank,
        "failure": None, "stacks": f"stack of {rank}", "rank": rank, "call": 7, "in_call": True, "stuck": False, "idle": 9.0, "monotonic": 50.0,
        "wall": 1795991670.0 + rank, "patience": 10.0, "last_action": "0F5, 0.006 s", "running": None, "running_for": None, "next": [],
        "peers": {str(1 - rank): 0.5}, "calls": {}, "departed": [], "edges": edges(rank), "stages": [rank], "forward_only": False,
        "microbatches": 8, "ready": [], "in_flight": 4, "limit": 4, "explained": ["0B2 lacks 1>0 microbatch 2"], "agreed": None, "due": None,
    } | changes  # fmt: skip


def waiting(**changes) -> dict:
    """Rank 0 has waited long enough for gradient 2; 0F6 is held."""
    failure = {"rank": 0, "where": "call 7", "text": "PipelineError: rank 0: nothing has moved for 10.0 s in call 7", "traceback": "", "lost": False}
    return view(0, **{"stuck": True, "next": [GRADIENT, HELD], "failure": failure} | changes)
