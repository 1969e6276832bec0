"""What `rrfp balance` says of a model: a row per stage, as text and as JSON. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rrfp.balance.arguments import Model
from rrfp.balance.shapes import Parameters
from rrfp.columns import columns


@dataclass(frozen=True)
class Row:
    """A stage. operations: of one microbatch's forward, by sample, over all its ranks. share: those of `Balance.main` over the stages' mean."""

    stage: int
    rank: int
    parts: str
    parameters: Parameters
    per_rank: int
    operations: dict[str, float]
    share: float


@dataclass(frozen=True)
class Balance:
    """A model's stages, and how even they are.

    main: the sample that shares are of. total: parameters of the model, each once. operations: of an iteration, forward and backward, all
    replicas; None without a global batch.
    """

    rows: tuple[Row, ...]
    main: str
    total: int
    operations: float | None

    @property
    def busiest(self) -> Row:
        return max(self.rows, key=lambda row: row.share)


def balance(model: Model) -> Balance:
    """Counts. The main sample is the first."""
    main = next(iter(model.samples))
    operations = [
        {name: model.micro_batch * sum(part.operations(sample) for part in stage) for name, sample in model.samples.items()}
        for stage in model.stages]
    mean = sum(each[main] for each in operations) / len(operations)
    rows, total = [], Parameters()
    for index, (stage, each) in enumerate(zip(model.stages, operations, strict=True)):
        held = sum((part.parameters for part in stage), Parameters())
        total += held
        rows.append(Row(
            index, index % model.ranks, "".join(part.name for part in stage), held,
            held.per_rank(tensor=model.tensor, expert=model.expert, expert_tensor=model.expert_tensor), each, each[main] / mean))
    batch = None if model.global_batch is None else 3 * model.global_batch * mean * len(rows) / model.micro_batch
    return Balance(tuple(rows), main, total.total - total.copy, batch)


def lines(found: Balance, model: Model) -> list[str]:
    """Plain text: a row per stage, then the sums."""
    several = model.chunks > 1
    many, few = _unit(max(row.parameters.total for row in found.rows)), _unit(max(row.operations[found.main] for row in found.rows))
    flop = f"{few[1]}FLOP"
    labels = [f"{flop} {name}".rstrip() for name in model.samples]
    head = ["stage", *(["rank"] if several else []), f"parameters {many[1]}".rstrip(), f"per GPU {many[1]}".rstrip(), *labels, "x mean", "holds"]
    body = [[
        str(row.stage), *([str(row.rank)] if several else []), f"{row.parameters.total / many[0]:.1f}", f"{row.per_rank / many[0]:.1f}",
        *(f"{value / few[0]:.3g}" for value in row.operations.values()), f"{row.share:.2f}", short(row.parts)] for row in found.rows]
    copies = sum(row.parameters.copy for row in found.rows)
    copied = f" (and {written(copies)} in the last stage's copy of the tied embedding)" if copies else ""
    whole = f"{found.total / 1e9:.3f} billion" if found.total >= 1e8 else written(found.total)
    per = f"{model.micro_batch} sample{'s' * (model.micro_batch > 1)}"
    end = [f"{whole} parameters{copied}; {flop}: one forward of a microbatch, {per}"]
    if found.main:
        end.append(f"x mean: of a sample with {found.main}")
    if found.operations is not None:
        like = " like it" if found.main else ""
        end.append(f"an iteration of {model.global_batch} samples{like}: {written(found.operations)}FLOP, forward and backward")
    busiest = found.busiest
    end.append(f"busiest: stage {busiest.stage} with {busiest.share:.2f} x the mean, so at best {1 / busiest.share:.0%} of the stages' time is work")
    return [*columns([head, *body]), "", *end]


def as_json(found: Balance, model: Model) -> dict:
    """What `--json` writes: parameters as numbers, operations in FLOP per microbatch's forward."""
    return {
        "parameters": found.total,
        "flop_per_iteration": found.operations,
        "micro_batch_size": model.micro_batch,
        "global_batch_size": model.global_batch,
        "stages": [
            {"stage": row.stage, "rank": row.rank, "parts": row.parts, "parameters": row.parameters.total, "parameters_per_gpu": row.per_rank,
             "forward_flop": row.operations if len(row.operations) > 1 else next(iter(row.operations.values())), "share": row.share}
            for row in found.rows
        ],
    }


def written(number: float) -> str:
    """`760000000` as `760 M`."""
    size, prefix = _unit(number)
    return f"{number / size:.4g} {prefix}"


def _unit(number: float) -> tuple[float, str]:
    """The largest unit that is not above it, and its letter."""
    return next(((size, prefix) for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= size), (1.0, ""))


def short(parts: Sequence[str]) -> str:
    """`Ettt` as `E t*3`."""
    runs = [(letter, len(list(run))) for letter, run in groupby(parts)]
    return " ".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs) or "-"
