"""How a model's parts are laid over the stages, in Megatron's notation: one letter a part, `|` between stages, `*n` repeats.

`E` is the embedding, `t` a transformer layer of the language model, `L` the output layer with the loss. `Et*3|(tt|)*2t|L` has five stages.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from rrfp.errors import ConfigurationError


def parse_layout(text: str, *, ranks: int, counts: Mapping[str, int], option: str = "--pipeline-model-parallel-layout") -> list[str]:
    """The letters of every stage.

    Args:
        text: a layout in Megatron's notation.
        ranks: the number of stages must be a multiple of it.
        counts: how often each letter has to occur; others may not.

    Raises:
        ConfigurationError: naming what is wrong.
    """
    where, stages = f"{option} {text}", unroll(text)
    plain = "".join(stages)
    if odd := sorted(set(plain) - set(counts)):
        raise ConfigurationError(f"{where}: {odd[0]!r} is no part of this model; use {', '.join(counts)}")
    if len(stages) % ranks:
        raise ConfigurationError(f"{where}: has {len(stages)} stages, no multiple of --pipeline-model-parallel-size {ranks}")
    held = Counter(plain)
    for letter, count in counts.items():
        if held[letter] != count:
            raise ConfigurationError(f"{where}: holds {letter!r} {held[letter]} times; the model has {count}")
    return stages


def unroll(text: str) -> list[str]:
    """The stages of a layout, repeats written out; whatever letters it has."""
    plain = text.replace(",", "").replace(" ", "")
    # Innermost first: a group, or one letter or separator.
    repeat = re.compile(r"(?:\(([^()]*)\)|([^()*]))\*(\d+)")
    while found := repeat.search(plain):
        plain = plain[: found.start()] + (found[1] if found[1] is not None else found[2]) * int(found[3]) + plain[found.end() :]
    return plain.split("|")


def even_layout(
    layers: int, *, ranks: int, chunks: int = 1, first: int | None = None, last: int | None = None, embedding: bool = False, loss: bool = False
) -> list[str]:
    """What Megatron does without a layout: as many layers everywhere.

    Args:
        first, last: layers of the first and of the last rank, where they have others.
        embedding, loss: count as a layer.

    Raises:
        ConfigurationError: the layers can't be divided so.
    """
    if first is not None or last is not None:
        left, others = layers - (first or 0) - (last or 0), ranks - (first is not None) - (last is not None)
    else:
        left, others = layers + embedding + loss, ranks
    each = left // others if others else 0
    per_rank = [each if first is None else first, *[each] * (ranks - 2), each if last is None else last] if ranks > 1 else [layers + embedding + loss]
    if (others and left % others) or left < 0 or any(count % chunks for count in per_rank):
        raise ConfigurationError(
            f"--num-layers {layers}: can't be divided over --pipeline-model-parallel-size {ranks}"
            + (f" with {chunks} chunks each" if chunks > 1 else "")
            + "; give --pipeline-model-parallel-layout (`rrfp balance --suggest` finds one)")
    counts = [per_rank[rank] // chunks for _ in range(chunks) for rank in range(ranks)]
    counts[0] -= embedding
    counts[-1] -= loss
    stages = ["t" * count for count in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return stages


def write_layout(stages: Sequence[str]) -> str:
    """The shortest notation this knows: equal neighbours, letters and stages, as repeats."""
    def letters(stage: str) -> str:
        runs = [(letter, len(list(run))) for letter, run in groupby(stage)]
        return "".join(letter * count if count < 3 else f"{letter}*{count}" for letter, count in runs)

    runs = [(text, len(list(run))) for text, run in groupby(map(letters, stages))]
    pieces = []
    for index, (text, count) in enumerate(runs):
        last = index == len(runs) - 1
        # Megatron unrolls groups before letters, so that a group may hold `t*4`, and passes over commas.
        repeated, single = (count, 0) if not last else (count - 1, 1)
        if repeated > 2:
            pieces.append(f"({text}|)*{repeated},")
        else:
            pieces.append(f"{text}|" * repeated)
        pieces.append(text * single)
    return "".join(pieces)


def best_cuts(weights: Sequence[float], parts: int) -> list[int]:
    """How many consecutive weights go to each of `parts` stages, none empty, so that the heaviest is as light as can be.

    Of all such the one whose squares sum to the least: what is left over is spread. Raises ValueError with fewer weights than parts.
    """
    if parts > len(weights):
        raise ValueError(f"{len(weights)} weights can't fill {parts} parts")
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    count = len(weights)
    # best[end] after p parts: (heaviest, sum of squares, cuts) of the first `end` weights.
    best = [(total[end], total[end] ** 2, (end,)) if end else (math.inf, math.inf, ()) for end in range(count + 1)]
    for part in range(2, parts + 1):
        following = [(math.inf, math.inf, ())] * (count + 1)
        for end in range(part, count + 1):
            following[end] = min(
                (max(best[cut][0], load := total[end] - total[cut]), best[cut][1] + load**2, (*best[cut][2], end - cut))
                for cut in range(part - 1, end))
        best = following
    return list(best[count][2])
