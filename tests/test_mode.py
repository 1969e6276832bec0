import pytest

from rrfp.errors import ConfigurationError
from rrfp.mode import mode_name, parse_mode
from rrfp.policy import Policy


@pytest.mark.parametrize(("text", "policy"), [
    ("ready:auto:1f1b", Policy()),
    ("ready:announced:1f1b", Policy(hint="announced")),
    ("strict:1f1b:1f1b", Policy(hint="1f1b", mode="strict")),
    ("ready:fill-r:2p-1", Policy(hint="fill-r", limit="2p-1", split=True)),
    ("ready:fill:2p-1:split", Policy(hint="fill", limit="2p-1", split=True)),
    ("ready:bf:paper:32", Policy(hint="bf", limit="paper:32")),
    ("ready:alt:2p:free:lanes=4", Policy(hint="alt", limit="2p", order="free", lanes=4)),
])
def test_a_mode_is_read_and_written(text, policy):
    assert parse_mode(text) == policy
    assert mode_name(policy) == text


def test_the_limit_may_be_left_out():
    assert parse_mode("ready:alt") == Policy(hint="alt")


def test_a_file_with_weight_gradients_splits(tmp_path):
    file = tmp_path / "hint.csv"
    file.write_text("0F0,0I0,0W0\n")
    assert parse_mode(f"ready:{file}:1f1b").split


@pytest.mark.parametrize("text", ["alt:2p", "ready", "ready::2p", "ready:nonsense:2p", "ready:alt:2q", "ready:alt:2p:lanes=x",
                                  "ready:alt:2p:lanes=0"])
def test_nonsense_is_refused_by_name(text):
    with pytest.raises(ConfigurationError):
        parse_mode(text)
