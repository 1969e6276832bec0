"""docs/programs.md's training script, and what `compile` says before it runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rrfp.program
from rrfp.errors import ConfigurationError

pytestmark = pytest.mark.timeout(240)
PAGE = (Path(__file__).parents[3] / "docs/programs.md").read_text()


def test_the_pages_script_trains(groups):
    (code,) = re.findall(r"```python\n(# train.py\n.*?)```", PAGE, re.S)
    for found in groups(4).run("page", code=code):
        assert len(found["means"]) == 10 and found["means"][-1] < 0.8 * found["means"][0]


def test_the_whole_model_goes_when_every_rank_has_its_part(groups):
    """ZeRO-3's memory is the shard and the gathered buckets, not the model besides."""
    code = re.findall(r"```python\n(# train.py\n.*?)```", PAGE, re.S)[0].replace("zero=2", "zero=3").replace("Model()", "(made := Model())")
    code = code.replace("    for step in", "    import gc, weakref\n    x = torch.zeros(16, 8)\n    training.step({'x': x, 'y': x}, loss)\n"
                        "    kept = weakref.ref(made.layers[0].weight)\n    del made\n    gc.collect()\n    held = int(kept() is not None)\n    for step in")
    assert [found["held"] for found in groups(4).run("page", code=code)] == [0] * 4


def test_without_a_job_it_is_refused():
    with pytest.raises(ConfigurationError, match="compile: torch.distributed is not initialised; start with torchrun"):
        rrfp.program.compile(torch.nn.Linear(1, 1), [])
    with pytest.raises(ConfigurationError, match="mode fast: must be one of strict, ready"):
        rrfp.program.compile(torch.nn.Linear(1, 1), [], mode="fast")


def test_the_package_alone_imports_no_torch():
    code = "import sys, rrfp, rrfp.program; assert not {'torch', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
