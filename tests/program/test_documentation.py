"""docs/programs.md: its code runs as it stands, and gives what it says."""

import json
import re
from pathlib import Path

from rrfp.program.builders import dualpipev
from rrfp.program.directives import apply
from rrfp.program.files import parse_program
from rrfp.program.hint_rows import stage_rows
from rrfp.program.traced import sketch
from rrfp.program.training import training_dag

PAGE = (Path(__file__).parents[2] / "docs/programs.md").read_text()


def test_the_tutorial_runs_and_its_dualpipev_is_dualpipev(capsys):
    page: dict = {}
    dags = []
    # Those run on real processes: execute/test_run.py, test_train_command.py.
    for code in re.findall(r"```python\n(?!# train.py|# my_model.py)(.*?)```", PAGE, re.S):
        exec(code, page)  # the page's own code
        dags.append(page["dag"])
    assert capsys.readouterr().out == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 0UPDATE\n['PP0', 'PP1', 'PP2', 'PP3']\n"
    shipped = apply(training_dag(sketch(8, batch=10)), dualpipev(4, 10))  # tests/program/test_builders.py holds it against torch's
    assert stage_rows(dags[1]) == stage_rows(shipped)


def test_the_pages_file_is_one():
    (document,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    program = parse_program(json.loads(document))
    assert len(program.directives) == 3 and len(program.dag().of("SEND")) == 4
