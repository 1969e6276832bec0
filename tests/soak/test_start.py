"""Starting a job on a busy machine: it starts, or ends at its deadline and says who did not come."""

import os
import re
import socket
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/
from benchmarks import soak  # noqa: E402
from benchmarks.soak_job import LAYOUTS, Layout, Worker  # noqa: E402
from rrfp.compare.group import Group  # noqa: E402

EIGHT = LAYOUTS["eight"]
NAMED = (r"rank \d failed:(?s:.*)PipelineError: ranks? [\d, ]+ "
         r"(did not come within \d+ s \(\w+\): look for their first error, or raise the start-up deadline"
         r"|did not say hello in time: raise the start-up deadline|\(process \d+\) ended)")


@pytest.mark.timeout(600)
def test_every_start_succeeds_while_others_burn_the_cores(full, seed, capsys):
    times = soak.start_often(EIGHT, starts=40 if full else 2, burners=8, seed=seed)
    with capsys.disabled():
        print(f"\n{len(times)} starts of 8 processes beside 8 that burn the cores: {min(times):.2f} to {max(times):.2f} s")


def test_a_start_that_is_not_done_in_time_says_who_is_missing(seed):
    """Negative control: a deadline that nobody can meet."""
    with pytest.raises(RuntimeError) as caught:
        soak.start_often(EIGHT, starts=50, burners=8, seed=seed, deadline=0.02)
    assert re.search(NAMED, str(caught.value)), caught.value


class Late(Worker):
    """Rank 2 never comes. The others write down what they were told."""

    def __init__(self, index, workers, directory, *, notes: Path, **options):
        if index == 2:
            threading.Event().wait(20.0)
            raise AssertionError("nobody ended the group")
        try:
            super().__init__(index, workers, directory, **options)
        except Exception as error:
            (notes / f"rank{index}").write_text(f"{type(error).__name__}: {error}")
            raise


def test_every_rank_names_the_one_that_did_not_come(seed, tmp_path, monkeypatch):
    """Rank 0 has rank 1 for its only neighbour, which came: it still names rank 2."""
    collect = Group._collect

    def patient(group, deadline):  # the group would end all ranks at the first one's word
        try:
            return collect(group, deadline)
        finally:
            for index in (0, 1, 3):
                group._workers[index].join(10.0)

    monkeypatch.setattr(Group, "_collect", patient)
    with pytest.raises(RuntimeError, match=r"rank 2 did not come"):
        Group(4, stage=partial(Late, layout=Layout(4), seed=seed, notes=tmp_path), start_deadline=1.0)
    line = "PipelineError: rank 2 did not come within 1 s (who): look for their first error, or raise the start-up deadline"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {f"rank{index}": line for index in (0, 1, 3)}


def test_a_job_of_one_process_keeps_the_port_that_it_will_use(monkeypatch, capsys):
    """Between the launcher's choice of a port and the job's store nobody else gets it."""
    launcher = pytest.importorskip("rrfp.megatron.launcher")
    monkeypatch.setattr(os, "environ", {})
    launcher._one_process_without_torchrun()
    address = "127.0.0.1", int(os.environ["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    socket.create_server(address).close()
    monkeypatch.setattr(os, "environ", {"MASTER_PORT": "1234"})
    launcher._one_process_without_torchrun()
    assert os.environ["MASTER_PORT"] == "1234" and os.environ["RANK"] == "0", "what the user sets stays"
