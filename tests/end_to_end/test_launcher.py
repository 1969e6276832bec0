"""`python -m rrfp` and `rrfp.install`: what they refuse, by option, value, rule and way out, and what they leave alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

sys.path.insert(0, os.path.dirname(__file__))  # the helpers lie beside the test
import pretrain_gpt_job as job  # noqa: E402
from job import environments  # noqa: E402
from pretrain_gpt_job import OWN_SCRIPT, ROOT, Trainings  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def data() -> list[str]:
    return job.make_data()


@pytest.fixture(scope="module")
def server(data):
    return Trainings(OWN_SCRIPT, data)


def start(*arguments: str, cwd=None, **variables) -> subprocess.CompletedProcess:
    """`python -m rrfp` with these arguments, one process."""
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, "-m", "rrfp", *arguments],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )


def refusal(run) -> str:
    """The one line of a refusal with exit status 2."""
    code, text = (
        (run.returncode, run.stderr) if isinstance(run, subprocess.CompletedProcess) else (run.codes[0], run.outputs[0])
    )
    assert code == 2, text[-3000:]
    lines = [line for line in text.splitlines() if line.startswith("rrfp: ")]
    assert len(lines) == 1 and "Traceback" not in text, text[-3000:]
    return lines[0]


# ------------------------------------------------------------------------------------------------- before the script
def test_help_names_the_way_to_start():
    done = start("--help")
    assert done.returncode == 0 and not done.stderr
    assert "-m rrfp [--cpu] SCRIPT" in done.stdout and "--pipeline-schedule rrfp" in done.stdout and "doctor" in done.stdout
    assert start("-h").stdout == done.stdout


def test_nothing_to_run_says_how():
    done = start()
    assert done.returncode == 2 and "SCRIPT" in done.stderr and not done.stdout
    assert start("--cpu").returncode == 2


def test_unknown_option_before_the_script():
    assert (
        refusal(start("--gpu", "pretrain_gpt.py"))
        == "rrfp: --gpu: unknown option before the script; see `python -m rrfp --help`"
    )


def test_missing_script():
    assert re.fullmatch(
        r"rrfp: nowhere\.py: no such script; give the path .*pretrain_gpt\.py", refusal(start("--cpu", "nowhere.py"))
    )


def test_a_refusal_is_told_once():
    done = start("--cpu", "nowhere.py", RANK="1")
    assert done.returncode == 2 and not done.stderr


def test_without_a_gpu_the_line_names_cpu_mode():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    line = refusal(start(str(OWN_SCRIPT), "--pipeline-schedule", "rrfp"))
    assert "torch.cuda.is_available() is False" in line and "python -m rrfp --cpu SCRIPT" in line


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
def test_an_unknown_release_of_megatron(tmp_path, cpu):
    """The package beside the script is the one that counts, as with a source checkout."""
    import torch

    if not cpu and not torch.cuda.is_available():
        pytest.skip("needs a GPU to come that far")
    files = {
        "megatron/core/__init__.py": "__version__ = '0.20.1'\n",
        "megatron/core/pipeline_parallel/__init__.py": "",
        "megatron/core/pipeline_parallel/schedules.py": "def forward_backward_pipelining_without_interleaving(*, model): ...\n",
        "megatron/training/__init__.py": "",
        "megatron/training/arguments.py": "def add_megatron_arguments(parser): ...\n\n\ndef validate_args(args): ...\n",
        "train.py": "raise AssertionError('must not be reached')\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    line = refusal(start(*["--cpu"][:cpu], str(tmp_path / "train.py")))
    assert line == "rrfp: megatron-core 0.20.1: supported are 0.17.1 to 0.19.x; install one of those"


def test_no_megatron_at_all(tmp_path):
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/__init__.py").write_text("")  # hides the installed one
    (tmp_path / "train.py").write_text("")
    line = refusal(start("--cpu", str(tmp_path / "train.py")))
    assert "megatron.training can't be imported" in line and "pip install 'megatron-core>=0.17.1,<0.20'" in line


def test_importing_the_package_imports_neither_torch_nor_megatron():
    def loaded(modules: str) -> str:
        script = f"import sys, {modules}; print([name for name in sys.modules if name in ('torch', 'megatron')])"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
        ).stdout

    assert loaded("rrfp, rrfp.cli, rrfp.megatron, rrfp.policy") == "[]\n"
    assert loaded("rrfp.cli, torch") == "['torch']\n"  # control


# --------------------------------------------------------------------------------- options, when Megatron has parsed them
REFUSED = {
    "hint": (
        "--rrfp-hint fastest",
        r"--rrfp-hint fastest: is neither a hint nor a file; use one of auto, announced, .*1f1b, .*or a CSV file's path",
    ),
    "hint of a split backward": ("--rrfp-hint zb-h1", "--rrfp-hint zb-h1: needs a backward split into I and W; add --rrfp-split-backward, or use fill-alt or 1f1b"),
    "limit": (
        "--rrfp-limit 0",
        "--rrfp-limit 0: must be one of auto, 1f1b, eager, 2p-1, 2p, a number of at least 1, a slope like 23-9, a list like 7,5,3,1, memory:<GiB>, or "
        "paper:<number>",
    ),
    "timeout": ("--rrfp-timeout 0", "--rrfp-timeout 0: a timeout is a number of seconds above 0"),
    "lanes": ("--rrfp-lanes 0", "--rrfp-lanes 0: must be at least 1; use 1 "),
    "scenario": ("--rrfp-emulate rain", "--rrfp-emulate rain: no scenario 'rain'; choose one of uniform, "),
    "scenario's unit": (
        "--rrfp-emulate images:fast",
        r"--rrfp-emulate images:fast: write NAME\[:UNIT_MS\[:SEED\]\], like images:30:7",
    ),
    "two paddings": (
        "--rrfp-emulate images --rrfp-inject J1",
        "--rrfp-inject J1 with --rrfp-emulate images: .*give one of the two",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_option(server, tmp_path, name):
    options, expected = REFUSED[name]
    run = server.run("rrfp", tmp_path, *options.split(), ranks=1, world=4, pipeline=2, codes=[2])
    assert re.search(expected, refusal(run)), refusal(run)


@pytest.mark.parametrize(
    "options", ["--rrfp-inject J4", "--rrfp-mode lazy", "--rrfp-order none", "--rrfp-agreement loud", "--pipeline-schedule gpipe", "--rrfp-lanes two"]
)
def test_choices_are_refused_by_the_parser(server, tmp_path, options):
    run = server.run("rrfp", tmp_path, *options.split(), ranks=1, world=4, pipeline=4, codes=[2])
    flag, value = options.split()
    assert re.search(rf"error: argument {flag}: invalid (choice|int value): '{value}'", run.text)


def test_bad_values_are_refused_under_1f1b_too(server, tmp_path):
    run = server.run("1f1b", tmp_path, "--rrfp-timeout", "-1", ranks=1, world=4, pipeline=4, codes=[2])
    assert "--rrfp-timeout -1:" in refusal(run)


# ------------------------------------------------------------------------------------------------- hints that do not fit the job
LIST_1F1B = ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]
HINT_FILES = {
    "wrong token": (["0F0,0F1,0B0,0X2,0B1,0B2", LIST_1F1B[1]], r"line 1, column 4, rank 0, position 3: .*0X2"),
    "no action at all": ([LIST_1F1B[0], "1F0,1B0,1F1,hello,1F2,1B2"], r"line 2, column 4, rank 1, position 3: .*hello"),
    "duplicate": ([LIST_1F1B[0], "1F0,1B0,1F1,1B1,1F1,1B2"], r"line 2, column 5, rank 1, position 4: 1F1 .*position 2"),
    "another rank's": (["0F0,0F1,0B0,1F2,0B1,0B2", LIST_1F1B[1]], r"line 1, column 4, rank 0, position 3: 1F2 belongs to rank 1"),
    "missing": ([LIST_1F1B[0], "1F0,1B0,1F1,1B1,1F2"], r"line 2, column 6, rank 1, position 5: the row ends without 1B2"),
    "impossible": (["0F0,0F1,0B2,0F2,0B1,0B0", LIST_1F1B[1]], r"line 1, column 3, rank 0, position 2: 0B2 stands before 0F2"),
    "deadlock": ([LIST_1F1B[0], "1F0,1F1,1F2,1B0,1B1,1B2"], r"deadlocks: .*0B0.*1F2"),
    "too few rows": (LIST_1F1B[:1], r"has 1 rows for 2 ranks"),
}
THREE = ["--global-batch-size", "6", "--train-iters", "2"]


@pytest.mark.parametrize("name", HINT_FILES)
def test_hint_file(server, tmp_path, name):
    rows, expected = HINT_FILES[name]
    path = tmp_path / "hint.csv"
    path.write_text("\n".join(rows) + "\n")
    run = server.run("rrfp", tmp_path, *THREE, "--rrfp-hint", str(path), "--rrfp-mode", "strict", ranks=2, codes=[2, 2])
    assert re.search(rf"--rrfp-hint {re.escape(str(path))}: {expected}", refusal(run)), refusal(run)


def test_a_right_hint_file_runs(server, tmp_path):
    """Control of the refusals above."""
    path = tmp_path / "hint.csv"
    path.write_text("\n".join(LIST_1F1B) + "\n")
    run = server.run("rrfp", tmp_path, *THREE, "--rrfp-hint", str(path), "--rrfp-mode", "strict", ranks=2)
    assert len(run.log) == 2 and f"[rrfp] hint {path}, mode strict" in run.text


def test_a_list_above_the_limit_is_refused_in_strict_mode(server, tmp_path):
    run = server.run(
        "rrfp", tmp_path, *THREE, *"--rrfp-hint gpipe --rrfp-mode strict --rrfp-limit 2".split(), ranks=2, codes=[2, 2]
    )
    assert re.search(
        "--rrfp-hint gpipe: its list holds 3 activations at stage 0, but --rrfp-limit 2 allows 2; use --rrfp-limit 3 or ",
        refusal(run),
    )


# ------------------------------------------------------------------------------------------------- delegated, left alone
def test_one_stage_is_delegated_with_one_line(server, tmp_path):
    run = server.run("rrfp", tmp_path, *THREE, ranks=1)
    (line,) = [line for line in run.text.splitlines() if "[rrfp]" in line]
    assert "--pipeline-model-parallel-size 1" in line and "Megatron's own schedule runs" in line
    assert len(run.log) == 2


@pytest.fixture(scope="module")
def parser(data):
    """The server of a script that parses Megatron's arguments and says whose schedule would run."""
    return Trainings(HERE / "launcher_script.py", data)


@pytest.mark.parametrize(
    "way, options, ours",
    [
        ("1f1b", "", False),
        ("1f1b", "--rrfp-limit eager", False),
        ("rrfp", "", True),
        ("1f1b", "--rrfp-trace DIR", True),
        ("1f1b", "--rrfp-emulate images", True),
        ("1f1b", "--rrfp-inject J1", True),
    ],
)
def test_megatrons_function_object_stays_unless_asked_otherwise(parser, tmp_path, way, options, ours):
    run = parser.run(way, tmp_path, *options.replace("DIR", str(tmp_path)).split(), ranks=1, world=4, pipeline=4)
    (said,) = [json.loads(line) for line in run.text.splitlines() if line.startswith("{")]
    # The schedule, and Megatron's forward and backward step, which only the instruments wrap.
    assert said["same"] == ([False, True, True] if way == "rrfp" else [not ours] * 3)
    assert said["module"][0] == ("megatron" if ours else "pipeline_parallel")
    assert said["argv"].endswith("launcher_script.py") and said["groups"] == 1
    assert said["limit"] == ("eager" if "eager" in options else "auto")


def test_install_twice_uninstall_before_and_after_the_groups(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "launcher_checks.py")],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | one | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RRFP_REPORT_DIR": str(tmp_path)},
        )
        for one in environments(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-4000:]
    assert all("all checks passed" in output for output in outputs)


def test_install_without_a_gpu_names_cpu_mode():
    import torch

    import rrfp
    from rrfp.errors import ConfigurationError

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigurationError, match=r"rrfp\.install\(cpu=True\)"):
        rrfp.install()


def test_install_refuses_bad_options_by_name():
    from rrfp.errors import ConfigurationError
    from rrfp.megatron import install

    for options, expected in [
        ({"limit": 0}, "--rrfp-limit 0"),
        ({"timeout": -1.0}, "--rrfp-timeout -1"),
        ({"schedule": "zb"}, "--pipeline-schedule zb"),
    ]:
        with pytest.raises(ConfigurationError, match=expected):
            install(**options)
    with pytest.raises(ConfigurationError, match=r"rrfp.install\(speed=...\): no such option; there are agreement, decide_ahead, emulate, "):
        install(speed=3)
