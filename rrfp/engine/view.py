"""A rank's view of its call as text. `Engine.view` makes it; `rrfp.report.hang` merges the views of a job."""


def text_of(view: dict) -> str:
    """What a person on call needs: last action, what is missing, credits, pending sends, each peer's last sign of life."""
    lines = [f"rank {view['rank']}: nothing has moved for {view['idle']:.1f} s in call {view['call']}{elsewhere(view)}",
             f"  last action: {view['last_action']}; running: {view['running'] or 'nothing'}"]
    if view["next"] is not None:
        lines.append(f"  ready: {' '.join(view['ready']) or 'none'}; in flight {view['in_flight']}")
        lines += [f"  {line}" for line in view["explained"]]
        if view["agreed"] is not None:
            lines.append(f"  agreed, but not ready here: {view['agreed']}")
    for edge, end in view["edges"].items():
        way, moved = ("to", "sent") if end["direction"] == "out" else ("from", "received")
        lines.append(f"  edge {edge} {way} rank {end['peer']}: {end[moved]} {moved}, {end['waiting']} waiting, {end['credits']} credits")
    for rank, ago in view["peers"].items():
        left = " (has left)" if int(rank) in view["departed"] else ""
        lines.append(f"  rank {rank}{left}: last sign of life {ago:.1f} s ago")
    return "\n".join(lines)


def elsewhere(view: dict) -> str:
    """`: rank 2 has not entered it, its last was call 4`, or nothing."""
    late = [f"rank {rank} has not entered it, its last was call {call}" for rank, call in view["calls"].items()
            if view["in_call"] and call < view["call"] and int(rank) not in view["departed"]]
    return f": {'; '.join(late)}" if late else ""
