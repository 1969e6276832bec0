from rrfp.action import Action, Edge, parse_action
from rrfp.placement import Placement
from rrfp.scheduler.dependencies import chain, without_weights


def a(text):
    return parse_action(text)


def test_a_middle_stage_waits_for_both_neighbours():
    tasks = chain(Placement.looped(3), 1, 2).tasks
    assert list(map(str, tasks)) == ["1F0", "1B0", "1F1", "1B1"]
    forward, backward = tasks[a("1F1")], tasks[a("1B1")]
    assert (forward.after, forward.arrivals, forward.sends, forward.in_flight) == ((), (Edge(0, 1),), (Edge(1, 2),), 1)
    assert (backward.after, backward.arrivals, backward.sends) == ((a("1F1"),), (Edge(2, 1),), (Edge(1, 0),))
    assert backward.in_flight == -1


def test_the_ends_of_the_chain():
    first, last = chain(Placement.looped(2), 0, 1).tasks, chain(Placement.looped(2), 1, 1).tasks
    assert first[a("0F0")].arrivals == () and first[a("0B0")].sends == ()
    assert last[a("1F0")].sends == () and last[a("1B0")].arrivals == () and last[a("1B0")].after == (a("1F0"),)


def test_split_gives_the_slot_back_at_w():
    tasks = chain(Placement.looped(2), 0, 1, split=True).tasks
    assert "0B0" not in map(str, tasks)
    gradient, weight = tasks[a("0I0")], tasks[a("0W0")]
    assert (gradient.in_flight, gradient.backlog) == (0, 1)
    assert (weight.in_flight, weight.backlog, weight.after, weight.arrivals) == (-1, -1, (a("0I0"),), ())


def test_stages_of_one_rank_hand_over_locally():
    # The V of two ranks: stages 1 and 2 both live on rank 1.
    tasks = chain(Placement.v(2), 1, 1).tasks
    assert tasks[a("1F0")].sends == () and tasks[a("2F0")].arrivals == () and tasks[a("2F0")].after == (a("1F0"),)
    assert tasks[a("1B0")].after == (a("1F0"), a("2B0")) and tasks[a("1B0")].arrivals == ()
    assert tasks[a("2B0")].sends == () and tasks[a("2B0")].arrivals == (Edge(3, 2),)


def test_a_frozen_stage_has_no_backward_and_holds_nothing():
    placement = Placement.looped(3)
    frozen, trainable = chain(placement, 0, 1, first_trainable=1).tasks, chain(placement, 1, 1, first_trainable=1).tasks
    assert list(frozen) == [Action("F", 0, 0)] and frozen[a("0F0")].in_flight == 0
    assert trainable[a("1B0")].sends == ()


def test_forward_only_runs_forwards_and_holds_nothing():
    tasks = chain(Placement.looped(2), 1, 3, forward_only=True, split=True).tasks
    assert list(map(str, tasks)) == ["1F0", "1F1", "1F2"] and all(task.in_flight == 0 for task in tasks.values())


def test_stages_without_weights_have_no_w_and_their_i_gives_the_slot_back():
    whole = chain(Placement.looped(2, 2), 0, 2, split=True)
    less = without_weights(whole, [2])
    assert set(whole.tasks) - set(less.tasks) == {Action("W", 2, 0), Action("W", 2, 1)}
    for action, task in less.tasks.items():
        if action.stage == 2 and action.kind == "I":
            assert (task.in_flight, task.backlog) == (-1, 0)
        else:
            assert task == whole.tasks[action]
