import pytest

from rrfp.policy import Policy
from rrfp.simulate.__main__ import main, parse_policy, parse_seeds


@pytest.mark.parametrize("text, policy", [
    ("alt", Policy(hint="alt")),
    ("1f1b:eager:strict", Policy(hint="1f1b", limit="eager", mode="strict")),
    ("bf:paper:32", Policy(hint="bf", limit="paper:32")),
    ("fill-r:2p-1:split:free", Policy(hint="fill-r", limit="2p-1", split=True, order="free")),
])
def test_policies_in_one_word(text, policy):
    assert parse_policy(text) == policy


def test_seeds():
    assert list(parse_seeds("15-17")) == [15, 16, 17] and list(parse_seeds("3")) == [3]


def test_the_table(capsys):
    small = ["--ranks", "2", "--microbatches", "4", "--seeds", "1", "--scenarios", "uniform"]
    assert main(["1f1b:1f1b:strict", "gpipe:8", *small, "--each"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 ranks, 1 chunks, 4 microbatches, 1 seeds" in lines[0]
    assert lines[2].split()[:4] == ["1f1b:1f1b:strict", "2", "1.000", "1.000"] and lines[3].strip() == "uniform 1.000"


def test_what_cannot_be_is_one_line(capsys):
    assert main(["bfw", "--seeds", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: --rrfp-hint bfw: needs a backward split")
