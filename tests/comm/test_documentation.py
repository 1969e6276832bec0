"""The example in the guide runs."""

import re
from pathlib import Path


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "transport.md").read_text(), re.DOTALL)
    exec(compile(code, "docs/transport.md", "exec"), {})
