"""What could not be written is refused in one line, and nothing is left by looking."""

import pytest

from rrfp import outputs
from rrfp.errors import ConfigurationError
from rrfp.outputs import check_file, check_picture, make_directory


def test_what_can_be_written_passes_and_stays_as_it_was(tmp_path):
    (tmp_path / "old.json").write_text("kept")
    check_file("--json", tmp_path / "old.json")
    check_file("--json", tmp_path / "new.json")
    check_file("--json", None)
    check_picture(tmp_path / "new.png")
    check_picture(None)
    assert (tmp_path / "old.json").read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["old.json"]
    for _ in range(2):
        make_directory("--out", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(("check", "name", "says"), [
    (lambda path: check_file("--json", path), "gone/x.json", r"--json .*gone/x.json: there is no directory"),
    (lambda path: check_file("--json", path), ".", r"--json .*: cannot be written \(Is a directory\)"),
    (check_picture, "x.jpeg2", r"--picture .*x.jpeg2: is a PNG"),
    (check_picture, "gone/x.png", r"--picture .*gone/x.png: there is no directory"),
    (lambda path: make_directory("--out", path), "file", r"--out .*file: no directory can be made there \(File exists\)"),
    (lambda path: make_directory("--out", path), "file/below", r"--out .*below: no directory can be made there \(Not a directory\)"),
])
def test_what_cannot_is_refused(tmp_path, check, name, says):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=says) as refusal:
        check(tmp_path / name)
    assert "\n" not in str(refusal.value)


def test_a_picture_takes_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="matplotlib is not installed"):
        check_picture(tmp_path / "x.png")
