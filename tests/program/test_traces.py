"""A trace read back as the nodes of its program: what the virtual clock ran, written by real recorders, is what comes back."""

import re

import pytest

from rrfp.errors import ConfigurationError
from rrfp.program.builders import dualpipev, one_f_one_b
from rrfp.program.clock import overlap, paired, run
from rrfp.program.dag import ALL_TO_ALL, COMPUTE, RECV, SEND, UPDATE
from rrfp.program.directives import apply
from rrfp.program.lower import lower
from rrfp.program.traced import sketch
from rrfp.program.traces import spans
from rrfp.program.training import training_dag
from rrfp.trace.chrome import chrome_events
from rrfp.trace.files import read
from rrfp.trace.picture import draw
from rrfp.trace.recorder import Recorder

PARTS = ("attention", "experts", "combine")


def record(program, directory):
    """The clock's run as one replica's trace. Returns its spans."""
    found = run(program.dag).spans
    for plan in program.plans:
        recorder = Recorder(rank=plan.rank, stages=plan.dependencies.stages, directory=directory, ranks=len(program.plans))
        recorder.begin_call(0, microbatches=4, forward_only=False, now=0.0)
        for action, node in plan.nodes.items():
            start, end = found[node.name]
            recorder.action(action, start, end if node.kind in (COMPUTE, UPDATE) else start, 0)
        for stream, names in plan.streams.items():
            for name in names:
                if program.dag.nodes[name].kind not in (COMPUTE, UPDATE, SEND, RECV):
                    recorder.moved(stream, name, *found[name])
        recorder.end_call(max(span.end for span in found.values()))
        recorder.close()
    return found


@pytest.fixture
def program():
    dag = training_dag(sketch(4, parts=PARTS, batch=8))
    return lower(apply(dag, dualpipev(2, 4, replicas=2, experts=True)))


def test_what_ran_comes_back_by_node(program, tmp_path):
    ran = record(program, tmp_path)
    found = spans(program, read(tmp_path))
    kinds = {name: node.kind for name, node in program.dag.nodes.items()}
    assert found == {name: span for name, span in ran.items() if kinds[name] not in (SEND, RECV)}
    assert list(found) == sorted(found, key=lambda name: found[name]), "in the order of start"
    assert overlap(program.dag, found, paired(program.dag)) == overlap(program.dag, ran, paired(program.dag)) > 0.8


def test_a_pair_is_the_other_sub_dag(program):
    nodes = program.dag.nodes
    for name, others in paired(program.dag).items():
        assert others and {(nodes[other].phase, nodes[other].dims["MB"]) for other in others} != {(nodes[name].phase, nodes[name].dims["MB"])}
        assert all(nodes[other].kind == COMPUTE and nodes[other].devices == nodes[name].devices for other in others)
        assert (nodes[name].phase, nodes[name].dims) not in [(nodes[other].phase, nodes[other].dims) for other in others]


def test_another_programs_trace_is_refused(program, tmp_path):
    record(program, tmp_path)
    other = lower(apply(training_dag(sketch(2, batch=8)), one_f_one_b(2, 4)))
    with pytest.raises(ConfigurationError, match=re.escape("the trace is not of this program: rank 0 has no action ")):
        spans(other, read(tmp_path))


def test_streams_stand_beside_computation_in_perfetto_and_in_the_picture(program, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    record(program, tmp_path)
    timeline, seen = read(tmp_path), []
    events = chrome_events(timeline)
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"all_to_all (rank 0)", "reduce (rank 1)"} <= tracks
    moved = {event["name"] for event in events if event.get("cat") == ALL_TO_ALL}
    assert moved == {node.name for node in program.dag.of(ALL_TO_ALL)}
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.extend(figure.axes))
    draw([("dualpipev", timeline)], tmp_path / "timeline.png")
    assert [label.get_text() for label in seen[0].get_yticklabels()] == ["rank 0", "all_to_all", "reduce", "rank 1", "all_to_all", "reduce"]
