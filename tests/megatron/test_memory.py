"""Limits measured in training: what is chosen, that it is the same everywhere and changes no number, and that memory stays within bounds.

The bounds are checked against the kernel's count of what the processes have resident, not against what the product measures.
"""

from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from group import Group  # noqa: E402

from rrfp import heap  # noqa: E402
from rrfp.megatron import memory  # noqa: E402
from rrfp.scheduler.limits import descending  # noqa: E402

BALLAST = 4 << 20
SLACK = 1 << 20
"""Bytes that a process may differ by from one call to the next for other reasons."""
M = 8
OWN = [4, 3, 2, 1]
TWICE = [1.2 * number for number in OWN]
"""Activations' worth of idle memory that takes as many again: each is taken for a tenth larger than measured, which is more than its ballast."""
PLENTY = [20] * 4


@pytest.fixture(scope="module")
def group():
    with Group(4) as group:
        yield group


def training(calls, microbatches=M):
    return [(microbatches, False)] * calls


def limits_of(results, call):
    """Of each rank in that call."""
    return [result["calls"][call]["limit"] for result in results]


def modes_of(results):
    """Of each call; equal on all ranks."""
    [modes] = {tuple(call["mode"] for call in result["calls"]) for result in results}
    return modes


# ------------------------------------------------------------------------------------------------- auto
def test_with_exactly_1f1bs_memory_it_is_1f1b(group):
    results = group.run("measured", options={}, calls=training(4), budget=[0] * 4, compare=True)
    assert [result["difference"] for result in results] == [None] * 4
    assert modes_of(results) == ("ready:announced:1f1b",) * 4 and limits_of(results, 3) == OWN
    for result in results:
        assert result["calls"][3]["memory"] <= result["calls"][1]["memory"] + SLACK


def test_with_twice_that_it_takes_more_within_the_budget_and_no_number_changes(group):
    results = group.run("measured", options={}, calls=training(4), budget=TWICE, compare=True, greedy=True)
    assert [result["difference"] for result in results] == [None] * 4
    chosen = limits_of(results, 2)
    assert chosen == limits_of(results, 3) and OWN < chosen and all(own <= limit <= 2 * own for own, limit in zip(OWN, chosen, strict=True))
    hint = "fill-alt" if chosen == [8, 6, 4, 2] else "announced"  # what `auto` picks with that much
    assert modes_of(results) == ("ready:announced:1f1b",) * 2 + (f"ready:{hint}:{','.join(map(str, chosen))}",) * 2
    for result, idle in zip(results, TWICE, strict=True):
        own, *more = (call["memory"] for call in result["calls"][1:])
        assert max(more) <= own + idle * BALLAST + SLACK
    assert results[0]["calls"][3]["memory"] >= results[0]["calls"][1]["memory"] + BALLAST / 2, "it is used"


def test_the_rank_with_least_memory_bounds_those_after_it(group):
    results = group.run("measured", options={}, calls=training(3), budget=[20, 20, 0, 20])
    chosen = limits_of(results, 2)
    assert chosen[:2] >= OWN[:2] and chosen[2] == 2 and chosen[3] <= 2 and chosen == descending(chosen)
    [_, _, third, _] = results
    assert third["calls"][2]["memory"] <= third["calls"][1]["memory"] + SLACK


def test_other_microbatches_are_measured_anew_and_evaluation_is_none(group):
    calls = [*training(2), (M, True), *training(1), *training(1, 6), (6, True), *training(1, 6), *training(1)]
    one, two, evaluated, chosen, other, _, its, back = modes_of(group.run("measured", options={}, calls=calls, budget=PLENTY, greedy=True))
    assert {one, two, other} == {"ready:announced:1f1b"}
    assert chosen == evaluated == back != one, "one measured call more is enough for other microbatches, and what was chosen stays"
    assert its != other


def test_without_a_step_of_the_optimizer_room_is_left_for_what_it_will_hold(group):
    waiting = group.run("measured", options={}, calls=training(4), budget=PLENTY, update=False)
    assert modes_of(waiting) == ("ready:announced:1f1b",) * 4
    given_up = group.run("measured", options={}, calls=training(5), budget=PLENTY, update=False, longest=3, greedy=True)
    assert modes_of(given_up)[:4] == ("ready:announced:1f1b",) * 4 and limits_of(given_up, 4) > OWN


def test_back_to_1f1b_should_more_be_taken_than_was_foreseen(group):
    calls, budget = training(5), [*PLENTY[:3], 3]
    chosen = modes_of(group.run("measured", options={}, calls=calls, budget=budget, surprise=2, greedy=True))
    assert chosen[2] != chosen[1] == chosen[3] == chosen[4]


def test_strict_is_the_control_and_stays_at_1f1b(group):
    results = group.run("measured", options={"hint": "1f1b", "mode": "strict"}, calls=training(3), budget=PLENTY)
    assert modes_of(results) == ("strict:1f1b:1f1b",) * 3


# ------------------------------------------------------------------------------------------------- frozen first stages
FROZEN = {"frozen": 1, "tied": False}
"""The first stage, with too little idle memory for one activation more: it needs none."""
BEHIND = [0.5, *TWICE[1:]]


def test_behind_frozen_stages_the_others_take_more_and_no_number_changes(group):
    results = group.run("measured", options={}, calls=training(4), budget=BEHIND, compare=True, greedy=True, **FROZEN)
    assert [result["difference"] for result in results] == [None] * 4
    chosen = limits_of(results, 3)
    assert chosen[0] == chosen[1] > 4, "its own number doesn't hold the others back, and is no less than the next one's"
    assert all(own <= limit <= 2 * own for own, limit in zip(OWN[1:], chosen[1:], strict=True))
    first, second, *_ = (result["calls"][3]["held"] for result in results)
    assert first == 0 and second > 3
    counts = " ".join(map(str, [0, *chosen[1:]]))
    assert results[0]["said"][0].startswith(
        f"[rrfp] limit auto with {M} microbatches: {counts} activations in flight per stage (Megatron's 1F1B: 4 3 2 1; memory takes {counts}): ")
    for result, idle in zip(results, BEHIND, strict=True):
        own, *more = (call["memory"] for call in result["calls"][1:])
        assert max(more) <= own + idle * BALLAST + SLACK


def test_control_were_frozen_stages_to_count_they_would_hold_the_others_back(group):
    results = group.run("measured", options={}, calls=training(3), budget=[0, *TWICE[1:]], greedy=True, unaware=True, **FROZEN)
    assert limits_of(results, 2)[:2] == [4, 4]


def test_what_more_would_bring_behind_frozen_stages_is_simulated(group):
    for options in ({}, {"limit": f"memory:{2.5 * BALLAST / 2**30:.6f}"}):
        results = group.run("measured", options=options, calls=training(3), budget=[0.5, *PLENTY[1:]], **FROZEN)
        [line] = results[0]["said"]
        assert "simulated" not in line and line.startswith(f"[rrfp] limit {options.get('limit', 'auto')} with {M} microbatches: 0 "), line
        assert "memory takes 0 8 8 8" in line or options
    assert limits_of(results, 2) == [4, 2, 2, 2]


# ------------------------------------------------------------------------------------------------- memory:<GiB>
GIVEN = 4.9 * BALLAST


def over(results, call=2):
    """Ranks that took more than `GIVEN`, which is what four activations need."""
    return [rank for rank, result in enumerate(results) if result["calls"][call]["memory"] > GIVEN + SLACK]


@pytest.mark.parametrize("mode", ["ready", "strict"])
def test_a_given_memory_is_kept_to(group, mode):
    options = {"limit": f"memory:{GIVEN / 2**30:.6f}", "hint": "1f1b", "mode": mode}
    results = group.run("measured", options=options, calls=training(3), compare=True)
    assert [result["difference"] for result in results] == [None] * 4
    assert limits_of(results, 2) == [4] * 4 and not over(results)


def test_control_if_half_is_measured_too_much_is_held(group):
    results = group.run("measured", options={"limit": f"memory:{GIVEN / 2**30:.6f}", "hint": "f-first"}, calls=training(3), spoilt=True)
    assert limits_of(results, 2) == [8] * 4 and 0 in over(results)


def test_fewer_than_1f1b_may_fit(group):
    results = group.run("measured", options={"limit": f"memory:{2.5 * BALLAST / 2**30:.6f}"}, calls=training(3), compare=True)
    assert [result["difference"] for result in results] == [None] * 4
    assert limits_of(results, 2) == [2, 2, 2, 2] and max(result["calls"][2]["memory"] for result in results) <= 2.5 * BALLAST + SLACK


def test_too_little_memory_is_refused_on_every_rank(group):
    refusals = group.run("measured", options={"limit": "memory:.001"}, calls=training(3))
    assert len(set(refusals)) == 1
    assert refusals[0].startswith("--rrfp-limit memory:.001: too little (not even one activation fits): an activation holds up to 4.")
    assert "Megatron's 1F1B (4 3 2 1 per stage) 16." in refusals[0] and "; use memory:0.017 or more" in refusals[0] and "\n" not in refusals[0]


# ------------------------------------------------------------------------------------------------- other layouts
def test_replicas_take_the_same_limits_those_of_the_least_memory():
    """Data-parallel replicas: each pipeline has one rank without idle memory, at another place."""
    with Group(4, pipeline=2) as group:
        results = group.run("measured", options={}, calls=training(3), budget=[20, 0, 0, 20], compare=True)
        assert [result["difference"] for result in results] == [None] * 4
        assert modes_of(results) == ("ready:announced:1f1b",) * 3
        results = group.run("measured", options={}, calls=training(3), budget=[20, 1.2, 20, 20], greedy=True)
        # Ranks 0 and 1 are the first stages of the two pipelines.
        chosen = limits_of(results, 2)
        assert len(set(modes_of(results))) == 2 and chosen[:2] == [3, 3] and chosen[2] == chosen[3]


def test_several_chunks_and_no_number_changes():
    with Group(2, virtual_pipeline_model_parallel_size=2) as group:
        results = group.run("measured", options={}, calls=training(4), budget=PLENTY, compare=True, dropout=0.0, greedy=True)
        assert [result["difference"] for result in results] == [None] * 2
        assert limits_of(results, 0) == [5, 3] and limits_of(results, 3) >= [5, 3]


# ------------------------------------------------------------------------------------------------- devices
def test_the_hosts_allocator_counts_what_torch_takes():
    host = memory.Host(ranks=2)
    assert host.absent() is None
    before = host.held()
    tensor = torch.ones(1 << 22)
    assert host.held() - before >= tensor.nbytes
    del tensor
    assert abs(host.held() - before) < SLACK
    with mock.patch.object(host, "held", lambda: 0):
        assert host.absent() == "another allocator than the C library's serves torch (LD_PRELOAD)"
    with mock.patch.object(heap, "_mallinfo", None):
        assert host.held() == 0 and "glibc 2.33" in host.absent()


def test_ranks_of_a_host_share_what_is_available(monkeypatch):
    monkeypatch.setattr(memory, "_status", {"VmRSS": 100, "VmHWM": 150}.__getitem__)
    monkeypatch.setattr(memory, "_available", lambda: 800)
    assert memory.Host(ranks=4).budget(0.5) == 0.5 * (100 + 200) and memory.Host(ranks=4).peak() == 150


def test_a_containers_bound_counts(tmp_path, monkeypatch):
    most, used = tmp_path / "max", tmp_path / "current"
    used.write_text("1000\n")
    for text, expected in (("4000\n", 3000), ("500\n", 0), ("max\n", None)):
        most.write_text(text)
        monkeypatch.setattr(memory, "_CGROUPS", ((str(most), str(used)), ("/nowhere/limit", "/nowhere/usage")))
        assert memory._available() == expected if expected is not None else memory._available() > 1 << 20


def test_a_gpus_budget_leaves_out_what_others_have_taken(monkeypatch):
    cuda = SimpleNamespace(
        mem_get_info=lambda: (300, 1000), memory_reserved=lambda: 500, max_memory_reserved=lambda: 600, memory_allocated=lambda: 450)
    monkeypatch.setattr(memory.torch, "cuda", cuda)
    gpu = memory.Gpu()
    assert gpu.budget(0.9) == 900 - 200 and gpu.peak() == 600 and gpu.held() == 450 and gpu.absent() is None


def test_an_activation_is_what_a_forward_leaves():
    class Device:
        received, now = True, 0

        def held(self):
            return self.now

    def act(kind, change, *inputs):
        meter.before()
        device.now += change
        meter.after(kind, inputs)

    device = Device()
    meter = memory.Meter(device)
    act("F", 100, torch.empty(10, dtype=torch.uint8))
    act("F", 130, None)
    act("B", -90)
    assert meter.activation == 130
    act("I", -20)
    assert meter.activation == 130, "what a pending W keeps was there before"
    act("I", 15)
    assert meter.activation == 145
