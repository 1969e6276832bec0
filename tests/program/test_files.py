"""Program files: every directive and model comes back as it was written; what is wrong is named with its place."""

import json

import pytest

from rrfp.errors import ConfigurationError
from rrfp.program.builders import BUILDERS
from rrfp.program.directives import Order, Place, Replicate, Shard, Split
from rrfp.program.files import model_document, parse_program, program_document, read_dag, read_program, write_program
from rrfp.program.text import print_dag
from tests.program.models import chain, diamond

EVERYTHING = [
    Split({}, "MB", 4), Split({"PP": 1, "EP": "-"}, "HALF", 2), Place({"PP": "*"}, (0, 1), "pp"), Place({"PP": "-"}, (2,)),
    Shard({"EP": "*"}, (0, 1), "ep", 2), Shard({"EP": 0}, (0, 1)), Replicate({}, (0, 1)),
    Replicate({}, (0, 1), shard_optimizer=True, shard_grads=True, shard_params=True, bucket_size=2.5, reduce_stream="r", gather_stream="g",
              prefetch=3, slotted=True),
    Order((({"PP": 0, "MB": 0, "PASS": "F"},), ({"PP": 1, "PASS": "I"}, {"PP": 2}))),
]  # fmt: skip


def test_every_directive_comes_back(tmp_path):
    write_program(tmp_path / "all.json", EVERYTHING, {"sketch": {"stages": 2}})
    found = read_program(tmp_path / "all.json")
    assert list(found.directives) == EVERYTHING and len(found.model.segments) == 2
    assert parse_program(json.loads((tmp_path / "all.json").read_text())) == found


@pytest.mark.parametrize("model", [chain(2, 8, experts=True), chain(3, 8, tied=True), diamond(8)], ids=["experts", "tied", "diamond"])
def test_every_model_comes_back(model):
    document = json.loads(json.dumps(program_document([], model_document(model.traced))))
    assert parse_program(document).model == model.traced


@pytest.mark.parametrize("name", BUILDERS)
def test_a_strategy_from_its_file_is_the_strategy(name, tmp_path):
    directives = BUILDERS[name](2, 4, replicas=2, zero=1)
    write_program(tmp_path / "p.json", directives, {"sketch": {"stages": 4 if name in ("interleaved", "zb-v", "dualpipev") else 2}})
    dag = read_dag(tmp_path / "p.json")
    (tmp_path / "p.txt").write_text(print_dag(dag))
    assert read_dag(tmp_path / "p.txt") == dag and list(read_program(tmp_path / "p.json").directives) == directives


@pytest.mark.parametrize("document, message", [
    ({}, "the file: 'directives' is a required property"),
    ({"directives": [{"place": {"devices": [0]}}]}, "directives/0/place: 'filter' is a required property"),
    ({"directives": [{"place": {"filter": {"PP": "x"}, "devices": [0]}}]}, "directives/0/place/filter/PP"),
    ({"directives": [{"place": {"filter": {}, "devices": []}}]}, r"directives/0/place/devices: \[\] should be non-empty"),
    ({"directives": [{"move": {"filter": {}}}]}, "directives/0: .*'move' was unexpected"),
    ({"directives": [{"split": {"filter": {}, "dim_name": "MB", "count": 0}}]}, "directives/0/split/count: 0 is less than the minimum of 1"),
    ({"directives": [{"order": {"row": [[{"PASS": "G"}]]}}]}, r"directives/0/order/row/0/0/PASS: 'G' is not one of"),
    ({"directives": [], "model": {"sketch": {"stages": "two"}}}, "model/sketch/stages: 'two' is not of type 'integer'"),
])  # fmt: skip
def test_what_the_schema_forbids_is_named_with_its_place(document, message, tmp_path):
    (tmp_path / "wrong.json").write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match=f"wrong.json: {message}"):
        read_program(tmp_path / "wrong.json")


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing.json: cannot be read"):
        read_program(tmp_path / "nothing.json")
    (tmp_path / "half.json").write_text('{"directives": [')
    with pytest.raises(ConfigurationError, match="half.json: is neither JSON nor the text of a DAG"):
        read_dag(tmp_path / "half.json")
    (tmp_path / "bare.json").write_text('{"directives": []}')
    with pytest.raises(ConfigurationError, match='program: describes no model; give it a "model"'):
        read_dag(tmp_path / "bare.json")
