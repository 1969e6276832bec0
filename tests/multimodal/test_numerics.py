"""ViT + LLM over several stages: losses, every gradient and the weights.

Against Megatron's own schedule on the same stage modules, bitwise; against one process on the same data, within 1e-6.
"""

from pathlib import Path

import numpy
import pytest
from group import Group

SCRIPT = Path(__file__).parent / "vlm_jobs.py"
COUNTS = [0, 1, 5, 0, 8, 2]
"""Images of the microbatches."""
WHOLE = "vvvtttt"
FREEZES = {
    "vit": ["vit"],
    "llm": ["llm"],
    "vit-and-projector": ["vit", "projector"],
    "vit-partly": [r"^vision\.(patch|position)", r"^vision\.decoder\.layers\.0"],
    "matrices": ["linear_fc", "linear_qkv", "linear_proj"],
}
INTO_THE_SECOND = [r"^vision\.(patch|position)", r"^vision\.decoder\.layers\.[01]"]
"""The first stage, and of the second one of its two layers."""
SETTINGS = {
    "dropout": {},
    "recompute": {"recompute": True},
    "bf16": {"dtype": "bfloat16"},
    "overlap": {"overlap": True},
    "distributed-optimizer": {"distributed": True},
    "untied": {"tied": False},
    **{f"frozen-{name}": {"freeze": freeze} for name, freeze in FREEZES.items()},
    "all-but-norms-frozen": {"freeze": ["all"], "unfreeze": ["layernorm"]},
}
OPTIONS = [{}, {"hint": "alt", "limit": "2p"}, {"hint": "1f1b", "mode": "strict"}]


def vlm_group(layout: str, *, ranks: int | None = None, **options) -> Group:
    """Processes for a model with this layout; by default a rank for each of its stages."""
    return Group(ranks or layout.count("|") + 1, script=SCRIPT, vlm=layout, **options)


@pytest.fixture(scope="module")
def group():
    with vlm_group("v|vv|tt|tt") as group:
        yield group


@pytest.fixture(scope="module")
def alone():
    """One process with the whole model."""
    with vlm_group(WHOLE) as group:
        yield group


@pytest.fixture(scope="module")
def expected(alone):
    """expected(**settings): losses and gradients of the whole model in one process; once per setting."""
    found = {}

    def of(**settings):
        key = repr(sorted(settings.items()))
        if key not in found:
            (found[key],) = alone.run("gradients", **settings)
        return found[key]

    return of


def differences(expected: dict, results: list[dict]) -> dict[str, float]:
    """By loss and gradient, how far `results`, one per rank, are from those of one process: relative to the tensor's largest value."""
    losses = next((result["losses"] for result in results if result["losses"]), [])
    assert len(losses) == len(expected["losses"])
    found = {f"loss {k}": relative(a, b) for k, (a, b) in enumerate(zip(expected["losses"], losses, strict=True))}
    for result in results:
        for name, gradient in result["gradients"].items():
            of = name.replace("language.output_layer.weight", "language.embedding.word_embeddings.weight")
            found[name] = max(found.get(name, 0.0), relative(expected["gradients"][of], gradient))
    assert found.keys() >= expected["gradients"].keys()
    return found


def relative(a, b) -> float:
    return float(numpy.abs(a - b).max() / max(numpy.abs(a).max(), 1e-12))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_bitwise_equal_to_megatron(group, settings, full):
    """Microbatches of 0 to 8 images, under random delays."""
    for options in OPTIONS if full else OPTIONS[:1]:
        where = group.run(
            "same", counts=COUNTS, microbatches=6, seeds=list(range(10 if full else 1)), options=options, steps=3 if full else 2, deadline=500,
            **settings)
        assert where == [None] * group.ranks


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout, ranks, options, cases", [
    ("vvvt|tttL", 2, {}, [{"size": 2}]),
    ("vv|v|tt|tt", 2, {"virtual_pipeline_model_parallel_size": 2}, [{"tied": False, "dropout": 0.0}]),
    ("vvv|tttt", 4, {"pipeline": 2, "tensor_model_parallel_size": 2}, [{}, {"sp": True, "multiple": 2, "freeze": ["vit"]}]),
], ids=["shared-stage", "PP2xVPP2", "PP2xTP2"])
def test_bitwise_equal_in_other_layouts(layout, ranks, options, cases, full):
    with vlm_group(layout, ranks=ranks, **options) as group:
        for settings in cases:
            run = {"seeds": list(range(5)), "steps": 2} if full else {"seeds": [0], "steps": 1}
            where = group.run("same", counts=COUNTS, microbatches=6, options={}, deadline=250, **run, **settings)
            assert where == [None] * ranks, settings


@pytest.mark.timeout(600)
def test_seven_stages_equal_one_process(expected, full):
    """A stage per layer, only under --all."""
    if not full:
        pytest.skip("seven processes: --all")
    layout = "v|v|v|t|t|t|t"
    with vlm_group(layout) as group:
        run = {"counts": COUNTS, "microbatches": 6, "freeze": [], "dropout": 0.0}
        assert max(differences(expected(**run), group.run("gradients", **run, deadline=300)).values()) < 1e-6
        assert group.run("same", counts=COUNTS, microbatches=6, seeds=[0, 1], options={}, deadline=300) == [None] * group.ranks


@pytest.mark.parametrize("freeze", [[], *FREEZES.values()], ids=["nothing", *FREEZES])
def test_equal_to_one_process(group, expected, freeze):
    run = {"counts": COUNTS, "microbatches": 6, "freeze": freeze, "dropout": 0.0}
    found = differences(expected(**run), group.run("gradients", **run))
    assert max(found.values()) < 1e-6, found
    assert len(found) > 6 + 5


def test_two_samples_in_a_microbatch_equal_one_process(group, expected):
    run = {"counts": [3, 0, 0, 0, 8, 1], "microbatches": 3, "size": 2, "dropout": 0.0}
    assert max(differences(expected(**run), group.run("gradients", **run)).values()) < 1e-6


def test_images_at_wrong_places_are_seen(group, expected):
    """The negative control: images in reverse order, on the stage where tokens enter."""
    run = {"counts": COUNTS, "microbatches": 6, "dropout": 0.0}
    found = differences(expected(**run, freeze=[]), group.run("gradients", **run, freeze=[], reverse_images=True))
    assert max(found.values()) > 1e-3


@pytest.mark.timeout(300)
def test_a_replica_without_images(expected):
    """DP=2: one has images, one has none; encoder gradients are those of one process on the batches of both."""
    counts = [3, 0, 8, 0, 1, 0]
    with vlm_group("vvv|tttt", ranks=4, pipeline=2) as group:
        for overlap in (False, True):
            run = {"counts": counts, "dropout": 0.0, "overlap": overlap}
            results = group.run("gradients", microbatches=3, **run)
            for result in results:
                result["losses"] = []
            whole = expected(counts=counts, microbatches=6, dropout=0.0)
            found = differences({"losses": [], "gradients": whole["gradients"]}, results)
            assert max(found.values()) < 1e-6, found
            assert all(numpy.abs(gradient).max() > 0 for name, gradient in results[0]["gradients"].items() if name.startswith("vision."))


def test_overlapping_reduction_needs_gradients_of_zeros(alone):
    """The negative control: Megatron's reduction counts on a gradient per parameter, and refuses the step whose last microbatch is text."""
    (text,) = alone.run("without_zero_gradients", counts=[3, 0], microbatches=2)
    assert "param.grad being None" in text


# ------------------------------------------------------------------------------------------------- frozen prefixes
PREFIXES = {"nothing": ([], 0), "first-stage": (FREEZES["vit-partly"], 1), "into-the-second-stage": (INTO_THE_SECOND, 1),
            "whole-vit": (["vit", "projector"], 2), "all-but-the-last-norm": (["vit", "projector", "layers", "word"], 3)}
"""What is frozen, and the first stage that trains."""


@pytest.mark.parametrize("freeze, first", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_no_message_enters_a_frozen_prefix(group, freeze, first, split):
    """And it runs forwards only; behind it every stage runs an I and a W for each microbatch, where a weight waits for one."""
    results = group.run("messages", counts=COUNTS, microbatches=6, freeze=freeze, split=split)
    sent = {edge: count for seen, _, _ in results for edge, count in seen.items()}
    assert sent == {f"{s}>{s + 1}": 6 for s in range(3)} | {f"{s}>{s - 1}": 6 for s in range(first + 1, 4)}
    behind = "FB" if not split else "FI" if first == 3 else "FIW"
    assert [actions for _, actions, _ in results] == [{f"{s}{kind}": 6 for kind in ("F" if s < first else behind)} for s in range(4)]
    assert [held for _, _, held in results] == [0 if stage < first else 4 - stage for stage in range(4)]


@pytest.mark.parametrize("freeze, shares", [
    ([], [1, 1, 1, 1]), (["vit", "projector"], [None, None, 1, 1]), (["vit", "projector", "layers", "word"], [None, None, None, 0]),
    (FREEZES["matrices"], [0, 0, 0, 0]), (INTO_THE_SECOND, [None, "some", 1, 1]), (["llm"], [1, 1, None, None]),
    (["all"], [None] * 4),
])
def test_every_rank_knows_what_trains(group, freeze, shares):
    """The shares of the stages' weights whose gradients are computed."""
    found = group.run("trained", freeze=freeze)
    assert found[0] == found[1] == found[2] == found[3]
    assert ["some" if share not in (None, 0, 1) and 0 < share < 1 else share for share in found[0]] == shares


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_gradient_messages_into_a_prefix_are_seen(group, split):
    """The negative control: the same frozen model, were nobody to notice."""
    results = group.run("messages", counts=COUNTS, microbatches=6, freeze=["vit", "projector"], notice=False, split=split)
    assert {edge for seen, _, _ in results for edge in seen} >= {"1>0", "2>1"}
    assert results[0][1] == {"0F": 6, "0I" if split else "0B": 6}


SPLITS = {"bfw": {"hint": "bfw", "limit": "2p"}, "default": {}, "strict-zb-h1": {"hint": "zb-h1", "mode": "strict", "limit": "4"},
          "bounded": {"hint": "fill-r", "limit": "2p-1", "max_pending_w": 1}}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("freeze", [*(freeze for freeze, _ in PREFIXES.values()), ["matrices"], ["llm"]], ids=[*PREFIXES, "matrices", "llm"])
def test_split_backwards_behind_a_frozen_prefix_are_bitwise_whole_ones(group, freeze, full):
    freeze = FREEZES["matrices"] if freeze == ["matrices"] else freeze
    for options in list(SPLITS.values()) if full else list(SPLITS.values())[:1] + list(SPLITS.values())[2:3]:
        where = group.run("same", counts=COUNTS, microbatches=6, seeds=list(range(10 if full else 1)), options=options, split=True, freeze=freeze,
                          deadline=500)
        assert where == [None] * group.ranks, options


def test_a_lost_weight_gradient_behind_a_prefix_is_seen(group):
    """The negative control."""
    where = group.run("same", counts=COUNTS, microbatches=6, seeds=[0], options=SPLITS["bfw"], split=True, freeze=["vit", "projector"], lost=1)
    assert "gradients" in where[2] and "gradients" in where[3], where


def test_a_frozen_stage_holds_few_messages(group):
    """No limit holds its forwards: what a slow stage behind it has not taken is bounded all the same."""
    unsent = group.run("unsent_of_frozen", counts=[1], microbatches=24, freeze=["vit", "projector"])
    assert 1 <= max(unsent[:2]) <= 6, unsent
    unbounded = group.run("unsent_of_frozen", counts=[1], microbatches=24, freeze=["vit", "projector"], bounded=False)
    assert max(unbounded[:2]) > 6, unbounded


def test_what_is_unfrozen_later_is_refused(group):
    errors = group.run("unfreezes", freeze=["vit", "projector"])
    assert "stage 0 was frozen in the first training call and trains now" in errors[0] and "start again from it" in errors[0]


def test_evaluation_is_megatrons(group):
    assert group.run("evaluates", counts=COUNTS, microbatches=6) == [None] * group.ranks
