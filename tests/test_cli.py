"""The command line: which command runs, what is refused, and with which exit status."""

import os
import subprocess
import sys

import pytest

from rrfp import cli
from rrfp.errors import ConfigurationError


@pytest.fixture(autouse=True)
def first_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def test_doctor_gets_its_arguments(monkeypatch):
    from rrfp import doctor

    seen = []
    monkeypatch.setattr(doctor, "main", lambda argv: seen.append(argv) or 1)
    assert cli.main(["doctor", "--timeout", "3"]) == 1
    assert seen == [["--timeout", "3"]]


def test_trace_gets_its_arguments(monkeypatch):
    from rrfp.trace import command

    seen = []
    monkeypatch.setattr(command, "main", lambda argv: seen.append(argv))
    assert cli.main(["trace", "DIR"]) == 0
    assert seen == [["DIR"]]


def test_a_refusal_is_one_line_and_status_2(monkeypatch, capsys):
    from rrfp import doctor

    def refuse(argv):
        raise ConfigurationError("--this 3: that rule; that way out")

    monkeypatch.setattr(doctor, "main", refuse)
    assert cli.main(["doctor"]) == 2
    said = capsys.readouterr()
    assert said.err == "rrfp: --this 3: that rule; that way out\n" and said.out == ""


def test_an_interrupted_command_says_so_in_one_line(monkeypatch, capsys):
    from rrfp import doctor

    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "rrfp doctor: interrupted\n"


@pytest.mark.parametrize("command", [
    "rrfp schedule show 1f1b --ranks 4 --microbatches 200",
    "rrfp schedule check 1f1b --ranks 2 --microbatches 2",
    "rrfp.simulate --scenario uniform --stages 2 --microbatches 2",
    "rrfp program build 1f1b /dev/stdout --ranks 2 --microbatches 400",
    "rrfp --version",
    "rrfp --help",
    "rrfp balance --help",
])
def test_a_reader_that_has_gone_ends_a_command_quietly(command):
    """As `| head -1`: while much is printed, at the end of little, and where argparse prints and exits."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", *command.split()], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0 if command == "rrfp balance --help" else 141, ""), "argparse passes over what it can't print"


def test_another_broken_pipe_is_not_hidden(capfd):
    def command():
        raise BrokenPipeError("between processes")

    with pytest.raises(BrokenPipeError, match="between processes"):
        cli.status_of("rrfp compare", command)


@pytest.mark.parametrize("argv, text", [
    (["--gpu", "train.py"], "--gpu: unknown option before the script"),
    (["no_such_script.py"], "no_such_script.py: no such script; give the path"),
    ([], "usage:"),
])
def test_what_the_launcher_refuses(capsys, argv, text):
    pytest.importorskip("torch")
    assert cli.main(list(argv)) == 2
    assert text in capsys.readouterr().err


def test_help_is_no_error(capsys):
    pytest.importorskip("torch")
    assert cli.main(["--help"]) == 0
    assert "rrfp doctor" in capsys.readouterr().out


def test_refusals_are_said_by_one_rank(capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["no_such_script.py"]) == 2
    assert capsys.readouterr().err == ""


def test_doctor_and_trace_need_no_megatron():
    """Neither command may depend on what the launcher imports."""
    script = "import sys; from rrfp import cli; import rrfp.doctor; sys.exit(bool({'torch', 'megatron'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_command_without_an_output_keeps_its_status():
    """Started with `>&-`."""
    for arguments, status in ((["--version"], 0), (["simulate", "--scenario", "nope"], 2)):
        done = subprocess.run(["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-m", "rrfp", *arguments], stderr=subprocess.PIPE, timeout=120)
        assert done.returncode == status and b"Traceback" not in done.stderr, done.stderr
