"""`groups`: real processes, started once for each number of ranks."""

import pytest

from tests.program.execute.group import Group


@pytest.fixture(scope="session")
def groups():
    """groups(ranks) -> `Group`."""
    started: dict[int, Group] = {}

    def get(ranks: int) -> Group:
        if ranks in started and not started[ranks].usable:
            started.pop(ranks).close()
        if ranks not in started:
            started[ranks] = Group(ranks)
        return started[ranks]

    yield get
    for group in started.values():
        group.close()
