"""Small tools of the scheduler's tests."""

from rrfp.action import Edge
from rrfp.placement import Placement
from rrfp.policy import Policy
from rrfp.scheduler import Scheduler

MIDDLE = 1  # the middle stage of three: its inputs are all messages


def middle(microbatches: int, **options) -> Scheduler:
    """The middle stage of three; limit 9 unless said."""
    policy = Policy(**{"limit": "9", **options})
    return policy.scheduler(Placement.looped(3), MIDDLE, microbatches)


def play(scheduler: Scheduler, script: str) -> str:
    """Feed news and let the scheduler run, one thing per word; returns what ran, `-` for nothing.

    `f2`: the input of 1F2 arrives; `b2`: the gradient for 1B2. `.`: ask once; what is chosen runs at once. `*`: ask until nothing
    is chosen.
    """
    ran, now = [], 0.0

    def ask() -> bool:
        action = scheduler.choose(now).action
        assert scheduler.choose(now).action == action, "asking twice must give the same answer"
        ran.append("-" if action is None else f"{action.kind}{action.microbatch}")
        if action is not None:
            scheduler.launched(action, now)
            scheduler.completed(action, now + 1.0)
        return action is not None

    for word in script.split():
        if word == ".":
            ask()
        elif word == "*":
            while ask():
                pass
            ran.pop()
        else:
            scheduler.arrived(Edge(0, 1) if word[0] == "f" else Edge(2, 1), int(word[1:]))
    return " ".join(ran)
