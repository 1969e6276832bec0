"""The examples in the guide run."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "agreement.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["domain", "members"])
def test_the_example_runs(code):
    exec(compile(code, GUIDE.name, "exec"), {})
