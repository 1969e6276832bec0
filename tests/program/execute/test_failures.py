"""A failure of one rank ends every rank, with its name, within seconds; and the processes are none the worse for it."""

import pytest

from rrfp.program.builders import BUILDERS
from rrfp.program.directives import Place, Replicate, Shard, Split
from tests.program.execute.compare import worst
from tests.program.execute.group import Group

pytestmark = pytest.mark.timeout(240)
WHICH = ("chain", 2, 8, "experts")
SOON = 30.0
"""Seconds; the pipeline's own deadline is 60."""


def directives(**options):
    return BUILDERS["1f1b"](2, 4, replicas=2, **options)


@pytest.mark.parametrize("how, culprit, words", [
    ("raise", 2, "ValueError: on purpose"), ("batch", 2, "4 pieces do not divide; give a multiple of 4"),
    ("width", 0, "step: batch: x is 8 x 5, and was captured as any x 6; give that"), ("list", 0, "step: batch: is a list; give tensors by name"),
])  # fmt: skip
def test_a_rank_that_raises_ends_every_rank(groups, how, culprit, words):
    found = groups(4).run("fail", which=WHICH, directives=directives(experts=True), replicas=2, rows=16, culprit=culprit, how=how)
    for rank, (kind, text, seconds) in enumerate(found):
        assert words in f"{kind}: {text}" and seconds < SOON, (rank, text, seconds)
        assert kind == "PipelineError" and text.startswith(f"rank {culprit} failed (") or rank == culprit, (rank, kind, text)
    # The same processes train on, with a program opened anew.
    assert worst(groups(4), WHICH, directives(experts=True), replicas=2, pieces=8, modes=["ready"])[0] < 1e-12


@pytest.mark.parametrize("culprit, name, ranks", [(1, "x", (0, 1)), (2, "target", (2, 3))])
@pytest.mark.parametrize("which", [WHICH, WHICH[:3]], ids=["experts", "dense"])
def test_replicas_with_unlike_rows_are_refused_on_every_rank(groups, which, culprit, name, ranks):
    found = groups(4).run("fail", which=which, directives=directives(experts=which == WHICH), replicas=2, rows=16, culprit=culprit, how="rows")
    counts = [4 if rank == culprit else 8 for rank in ranks]
    words = f"step: batch: {name} has {counts[0]} rows on rank {ranks[0]} and {counts[1]} on rank {ranks[1]}, which are replicas;"
    for rank, (kind, text, seconds) in enumerate(found):
        assert words in text and seconds < SOON, (rank, text, seconds)
        assert rank in ranks or kind == "PipelineError" and text.startswith(f"rank {ranks[0]} failed (") or text.startswith(f"rank {ranks[1]} failed (")


def test_only_unlike_rows_are_refused(groups):
    """Other rows than before are fine where all replicas have them. Negative control: a dense model's unlike ones nothing else would notice."""
    for how in ("alike", "unseen"):
        found = groups(4).run("fail", which=WHICH[:3], directives=directives(), replicas=2, rows=16, culprit=1, how=how)
        assert [kind for kind, _, _ in found] == ["nothing"] * 4, found


def test_a_collective_that_a_rank_does_not_come_to_ends_at_its_deadline(groups):
    found = groups(4).run("fail", which=("chain", 2, 8), directives=directives(), replicas=2, rows=16, culprit=2, how="absent", timeout=2.0)
    assert all(kind == "PipelineError" for kind, _, _ in found)
    assert any("ALL_REDUCE:bucket" in text for _, text, _ in found)
    assert worst(groups(4), ("chain", 2, 8), directives(), replicas=2, pieces=8, modes=["ready"])[0] < 1e-12


def test_a_rank_that_is_killed_is_named():
    with Group(4) as group:
        found = group.attempt("fail", which=WHICH, directives=directives(experts=True), replicas=2, rows=16, culprit=1, how="kill")
    assert found.pop(1) == (False, "ended with -9")
    for returned, (kind, text, seconds) in found:
        assert returned and kind == "PipelineError" and seconds < SOON and "rank 1" in text, text


def test_a_rank_that_is_killed_between_two_steps_is_named():
    """By its replica, which asks it for its losses; the replicas of another rank may have theirs before they hear of it."""
    with Group(4) as group:
        found = group.attempt("fail", which=WHICH, directives=directives(experts=True), replicas=2, rows=16, culprit=1, how="mean")
    assert found.pop(1) == (False, "ended with -9")
    assert found[0][1][0] == "PipelineError"
    for returned, (kind, text, seconds) in found:
        assert returned and (kind == "nothing" or kind == "PipelineError" and "rank 1" in text) and seconds < SOON, text


def test_what_a_device_cannot_hold_is_refused_on_every_rank(groups):
    tied = groups(4).run("refuse", which=("chain", 2, 8, "tied"), directives=[
        Split({}, "MB", 4), Place({"PP": "*"}, (0, 1, 2, 3)), Replicate({"PP": "*"}, (0, 1, 2, 3), shard_params=True)])
    assert set(tied) == {"ConfigurationError: replicate: shard_params: block1: shares block0.w with block0, and would not gather it; place them on"
                         " different devices, or leave shard_params out"}
    devices = (0, 1, 2, 3)
    uneven = groups(4).run("refuse", which=("chain", 2, 8), directives=[Place({}, devices), Shard({"PP": 0}, devices), Replicate({"PP": 1}, devices)])
    assert set(uneven) == {"ConfigurationError: shard: block0: block0.w is [6, 6], and 4 devices do not divide its first dimension; give other ways,"
                           " or other experts"}

    falling = groups(4).run("refuse", which=("chain", 2, 8), directives=[Place({}, devices[::-1]), Replicate({}, devices[::-1])])
    assert set(falling) == {"ConfigurationError: place: devices [3, 2, 1, 0]: must ascend, for so torch numbers the members of a group; sort them"}


@pytest.mark.parametrize("options, change, words", [
    ({}, 3, "the parameters must be the same on every rank of a pipeline: "), ({"replicas": 1}, None, "and this job has ranks 0 to 3: a device is a"),
], ids=["parameters", "devices"])  # fmt: skip
def test_what_cannot_run_is_refused_on_every_rank(groups, options, change, words):
    found = groups(4).run("refuse", which=WHICH, directives=BUILDERS["1f1b"](2, 4, **{"replicas": 2, **options}, experts=not options), change=change)
    assert all(text.startswith("ConfigurationError: ") and words in text for text in found), found


@pytest.mark.parametrize("optimizer, zero, directive", [("LBFGS", 1, "shard_optimizer"), ("Muon", 2, "shard_grads"), ("Adafactor", 3, "shard_params")])
def test_an_optimizer_of_whole_parameters_is_refused_with_shards(groups, optimizer, zero, directive):
    found = groups(4).run("refuse", which=WHICH[:3], directives=directives(zero=zero), optimizer=optimizer)
    assert set(found) == {f"ConfigurationError: optimizer: {optimizer}: looks at a parameter as a whole, and with replicate: {directive} it would get"
                          " flat shards; take one that treats each number for itself (SGD, Adam, AdamW), or leave the sharding out"}
    assert set(groups(4).run("refuse", which=WHICH[:3], directives=directives(), optimizer=optimizer)) == {"nothing"}
    assert set(groups(4).run("refuse", which=WHICH[:3], directives=directives(zero=zero), optimizer="AdamW")) == {"nothing"}
