"""Samples, microbatches, digits, and the order in which they are fed."""

import itertools

import pytest
import torch

from rrfp.balance.shapes import Attention, Feedforward, Shape
from rrfp.errors import ConfigurationError
from rrfp.multimodal import hint
from rrfp.multimodal.batch import IMAGE, PARTS, Image, Sample, collate, parts_of
from rrfp.multimodal.costs import Model, Tower
from rrfp.multimodal.digits import NAMES, PHOTOGRAPHS, Digits
from rrfp.multimodal.layout import parse
from rrfp.multimodal.loader import fed, microbatches
from rrfp.placement import Placement
from rrfp.policy import HintContext, Policy, register_hint
from rrfp.simulate.costs import Costs

TOWER = Tower(2, Shape(hidden=8, attention=Attention(heads=2, groups=2, head=4), feedforward=Feedforward(width=32)))
MODEL = Model(vit=TOWER, llm=TOWER, vocabulary=64, patch=4)
COLLATING = {"patch": 2, "image_token": 99}


def image(height, width, start=0):
    return Image(1, height, width, lambda: torch.arange(start, start + height * width, dtype=torch.float).reshape(1, height, width))


SAMPLES = [Sample([1, IMAGE, 2, 3, IMAGE, 4], [image(2, 4), image(4, 4, 100)], [(2, 4)]), Sample([5, 6, 7], captions=())]


def test_a_microbatch_by_hand():
    batch = collate(SAMPLES, **COLLATING)
    assert batch["load"].patches == (2, 4) and batch["load"].tokens == (9, 9)
    assert batch["grids"].tolist() == [[1, 2], [2, 2]]
    assert batch["patches"][0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [0] * 4, [0] * 4]
    assert batch["patches"][1].tolist() == [[100, 101, 104, 105], [102, 103, 106, 107], [108, 109, 112, 113], [110, 111, 114, 115]]
    assert batch["tokens"].tolist() == [[1, 99, 99, 2, 3, 99, 99, 99, 99], [5, 6, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[99, 99, 2, 3, 99, 99, 99, 99, 4], [6, 7, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["captions"].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0, 0], [0] * 9]
    assert "captions" not in collate([*SAMPLES, Sample([1, 2])], **COLLATING), "one doesn't know its captions"


def test_text_alone_has_no_patches():
    batch = collate(SAMPLES[1:], **COLLATING)
    assert batch["grids"].shape == (0, 2) and batch["patches"].shape[0] == 0 and batch["load"].patches == ()


def test_a_stage_gets_the_parts_it_reads():
    layout = parse("v|v|t|t|t")
    assert [parts_of(layout, stage) for stage in range(5)] == [("patches", "grids"), ("grids",), ("grids", "tokens"), (), ("labels",)]
    assert parts_of(parse("vt"), 0) == PARTS
    whole = collate(SAMPLES, **COLLATING)
    for stage in range(5):
        part = collate(SAMPLES, parts=parts_of(layout, stage), **COLLATING)
        assert part["load"] == whole["load"]
        assert all(torch.equal(part[name], whole[name]) for name in part.keys() - {"load"})
    assert collate(SAMPLES, parts=(), **COLLATING).keys() == {"load"}


def test_sequences_are_padded_to_a_multiple():
    assert collate(SAMPLES, multiple=4, **COLLATING)["tokens"].shape == (2, 12)


@pytest.mark.parametrize("sample, words", [
    (Sample([1, IMAGE, IMAGE], [image(2, 2)]), "2 places for images, but it has 1 images"),
    (Sample([1, IMAGE], [image(3, 2)]), "3 x 2 pixels can't be cut into patches of 2 x 2"),
    (Sample([1]), "nothing can be learned"),
])
def test_what_is_no_sample_is_refused(sample, words):
    with pytest.raises(ValueError, match=words):
        collate([sample], **COLLATING)


# ------------------------------------------------------------------------------------------------- digits
def test_digits_are_the_same_everywhere_and_have_0_to_8_images():
    one, other = Digits("train", seed=3), Digits("train", seed=3)
    counts = set()
    for index in range(60):
        a, b = one[index], other[index]
        assert (list(a.tokens), a.captions) == (list(b.tokens), b.captions)
        assert all(torch.equal(x.pixels(), y.pixels()) for x, y in zip(a.images, b.images, strict=True))
        assert all(image.pixels().shape == (1, image.height, image.width) for image in a.images)
        counts.add(len(a.images))
        words = [bytes(a.tokens[begin:end]).decode() for begin, end in a.captions]
        assert len(words) == len(a.images) and set(words) <= {*NAMES, *PHOTOGRAPHS}
    assert counts == set(range(9))
    assert any(list(one[index].tokens) != list(Digits("train", seed=4)[index].tokens) for index in range(5))


def test_held_out_digits_are_never_trained_on():
    def seen(split):
        return {image.pixels().numpy().tobytes() for index in range(300) for image in Digits(split)[index].images if image.height == image.width == 8}

    # Pieces of photographs are of other parts of them, and a digit is held out as such; two of the 1,797 may be alike.
    train, valid = seen("train"), seen("valid")
    assert len(train) > 500 and len(valid) > 200 and len(train & valid) <= 2


def test_blank_digits_differ_only_in_their_pixels():
    for index in range(20):
        sample, blank = Digits("train")[index], Digits("train", blank=True)[index]
        assert list(sample.tokens) == list(blank.tokens) and sample.captions == blank.captions
        assert all(image.pixels().abs().max() == 0 for image in blank.images)


def test_without_scikit_learn_the_way_out_is_named(monkeypatch):
    from rrfp.multimodal import digits

    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    digits._digits.cache_clear()
    with pytest.raises(ConfigurationError, match=r"pip install 'rrfp\[multimodal\]'"):
        Digits("train")
    digits._digits.cache_clear()


# ------------------------------------------------------------------------------------------------- loading and feeding
class Lengths:
    """Text whose length is its index, modulo 7."""

    def __getitem__(self, index):
        return Sample(list(range(2 + index % 7)))


def first_tokens(batches, count):
    return [batch["labels"].shape[1] for batch in itertools.islice(batches, count)]


def test_replicas_share_the_samples_and_a_later_start_goes_on():
    whole = [index % 7 + 1 for index in range(24)]
    two = [first_tokens(microbatches(Lengths(), size=1, replica=r, replicas=2, **COLLATING), 12) for r in range(2)]
    assert [length for pair in zip(*two, strict=True) for length in pair] == whole
    assert first_tokens(microbatches(Lengths(), size=1, replica=1, replicas=2, consumed=8, **COLLATING), 8) == two[1][4:]


def test_what_comes_is_known_before_it_is_taken():
    batches = fed(microbatches(Lengths(), size=1, replica=0, replicas=1, **COLLATING), by_size=False, model=MODEL, microbatches=4, ranks=2)
    ahead = batches.upcoming(4)
    assert [load.tokens[0] for load in ahead] == first_tokens(batches, 4) == [1, 2, 3, 4]
    assert [load.tokens[0] for load in batches.upcoming(2)] == [5, 6]


def test_microbatches_are_fed_by_size():
    batches = fed(microbatches(Lengths(), size=1, replica=0, replicas=1, **COLLATING), by_size=True, model=MODEL, microbatches=5, ranks=2)
    calls = [first_tokens(batches, 5) for _ in range(3)]
    assert calls[0] == [2, 4, 5, 3, 1]
    as_come = [index % 7 + 1 for index in range(15)]
    assert [sorted(call) for call in calls] == [sorted(as_come[k : k + 5]) for k in (0, 5, 10)]


def test_the_hint_of_known_costs_follows_the_data():
    context = HintContext(Placement.looped(4), 6, (6, 6, 6, 6), False)
    even, uneven = (hint.rows_for(context, [[1.0, 1.0, scale[m], scale[m]] for m in range(6)]) for scale in ([1.0] * 6, [9.0, 1, 1, 1, 1, 1]))
    for rows in (even, uneven):
        for rank, row in enumerate(rows):
            actions = [str(action) for group in row for action in group]
            assert sorted(actions) == sorted(f"{rank}{kind}{m}" for kind in "FB" for m in range(6))
    assert even != uneven, "the negative control: were costs not looked at, the rows would be equal"


def test_the_hint_of_known_costs_follows_what_is_frozen():
    """Stages 0 and 1 run forwards only; stage 3, frozen too, computes the gradient of its input; of stage 4 a quarter trains."""
    placement, trained = Placement.looped(5), [None, None, 1.0, None, 0.25]
    for split, limits in ((False, (5, 4, 3, 2, 1)), (True, (10,) * 5)):
        context = HintContext(placement, 12, limits, split)
        costs = [[1.0, 1.0, 2.0 + m % 3, 1.0, 3.0] for m in range(12)]
        everything, ours = hint.rows_for(context, costs), hint.rows_for(context, costs, trained)
        assert ours[2:] != everything[2:], "the negative control: were it not looked at, the order of what trains would be the same"
        # The order of a simulation with such costs, in which frozen actions don't exist.
        kinds = {"F": 1.0, "I": 1.0, "W": None} if split else {"F": 1.0, "B": None}
        durations = {}
        for (kind, share), stage, m in itertools.product(kinds.items(), range(5), range(12)):
            weight = {"B": 1 + (trained[stage] or 0), "W": trained[stage]}.get(kind, share)
            if kind == "F" or (stage >= 2 and weight):
                durations[kind, stage, m] = weight * costs[m][stage]
        simulated = Costs(5, 1, 12, durations, {}).simulate(Policy(hint="alt", limit="2p" if split else "1f1b", split=split))
        for rank, row in enumerate(ours):
            actions = [action for group in row for action in group]
            assert len(actions) == len(set(actions)) == 12 * (3 if split else 2), "a list holds every action"
            assert [action for action in actions if tuple(action) in durations] == simulated.rows[rank]
        # Whole lists run, within the limits: strict mode obeys them.
        register_hint("known-costs-of-test-data", lambda context: hint.rows_for(context, costs, trained))
        policy = Policy(hint="known-costs-of-test-data", mode="strict", limit="2p" if split else "1f1b", split=split)
        assert policy.list_for(placement, 12) == ours


def test_a_hint_of_known_costs_where_chunks_are_frozen_can_run():
    trained = [None, None, None, 1.0, 0.0, 1.0]
    for frozen in (trained, [None] * 6):
        register_hint("known-costs-of-test-data", lambda context: hint.rows_for(context, [[1.0] * 6] * 4, frozen))
        for split in (False, True):
            schedulers = [Policy(hint="known-costs-of-test-data", limit="9", split=split).scheduler(Placement.looped(2, 3), rank, 4)
                          for rank in range(2)]
            assert all(scheduler.digest for scheduler in schedulers)


def test_the_hint_without_data_is_refused(monkeypatch):
    context = HintContext(Placement.looped(2), 2, (2, 1), False)
    monkeypatch.setattr(hint, "_provided", None)
    assert len(hint.known_costs(context)) == 2, "before the job begins its list is checked"
    monkeypatch.setattr(hint.parallel_state, "model_parallel_is_initialized", lambda: True)
    with pytest.raises(ConfigurationError, match="pretrain_vlm.py"):
        hint.known_costs(context)
