"""One way of running, as text: `ready:fill-r:2p-1`, `strict:1f1b:1f1b`. Commands that compare policies all read this notation."""

from pathlib import Path

from rrfp.errors import ConfigurationError
from rrfp.policy import BUILT_IN, SPLIT_ONLY, Policy, read_hint
from rrfp.scheduler import lists
from rrfp.scheduler.limits import is_measured

_ORDERS = ("free", "megatron")


def parse_mode(text: str) -> Policy:
    """The policy that `MODE:HINT[:LIMIT][:split][:free|:megatron][:lanes=N]` names.

    MODE is `ready` or `strict`, LIMIT as in --rrfp-limit (default 1f1b). A hint with W actions (zb-h1, zb-h2, bfw, fill-r, or a
    file that holds a W) splits the backward by itself; `split` asks a hint that works either way for it.

    Raises:
        ConfigurationError: naming the mode and what is wrong with it.
    """
    mode, _, rest = text.partition(":")
    hint, _, rest = rest.partition(":")
    if mode not in ("ready", "strict") or not hint:
        raise ConfigurationError(
            f"--modes {text}: must begin with ready:HINT or strict:HINT; for example ready:alt:2p or strict:1f1b:1f1b")
    split, order, lanes, limit = hint in SPLIT_ONLY, "microbatch", 1, []
    for word in rest.split(":") if rest else ():
        if word == "split":
            split = True
        elif word in _ORDERS:
            order = word
        elif word.startswith("lanes="):
            number = word.removeprefix("lanes=")
            if not number.isdecimal():
                raise ConfigurationError(f"--modes {text}: {word}: must be a whole number of at least 1; for example lanes=4")
            lanes = int(number)
        else:
            limit.append(word)
    if hint not in (*BUILT_IN, *lists.PUBLISHED) and Path(hint).is_file():
        split = split or read_hint(hint).splits
    if limit and is_measured(":".join(limit)):
        raise ConfigurationError(f"--modes {text}: limit {':'.join(limit)} is measured in training; name the limit itself, for example eager or 7,5,3,1")
    try:
        return Policy(hint=hint, mode=mode, limit=":".join(limit) or "1f1b", order=order, lanes=lanes, split=split)
    except ConfigurationError as error:
        raise ConfigurationError(f"--modes {text}: {error}") from None


def mode_name(policy: Policy) -> str:
    """The shortest text that `parse_mode` turns into `policy` (its bound on pending W apart)."""
    words = [policy.mode, policy.hint, policy.limit]
    if policy.split and policy.hint not in SPLIT_ONLY:
        words.append("split")
    if policy.order != "microbatch":
        words.append(policy.order)
    if policy.lanes != 1:
        words.append(f"lanes={policy.lanes}")
    return ":".join(words)
