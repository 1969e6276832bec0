"""patches/apply.py: goes in and out cleanly, and refuses everything else in one line."""

import subprocess

import pytest

RELEASES = ["core_v0.17.1", "core_v0.18.2", "core_v0.19.0"]


def contents(tree):
    return {path.relative_to(tree): path.read_bytes() for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts}


def refused(apply, capsys, *arguments):
    assert apply.main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("apply.py: ")
    return captured.err


@pytest.mark.parametrize("name", RELEASES)
def test_in_and_out_again(apply, make_tree, capsys, name):
    tree = make_tree(name)
    clean = contents(tree)
    assert apply.main([str(tree), "--check"]) == 0
    assert contents(tree) == clean
    assert apply.main([str(tree)]) == 0
    changed = {str(path) for path, text in contents(tree).items() if text != clean[path]}
    assert changed == {
        "megatron/core/pipeline_parallel/schedules.py", "megatron/training/arguments.py", "megatron/training/training.py"
    }  # fmt: skip
    assert apply.main([str(tree), "--reverse"]) == 0
    assert contents(tree) == clean
    assert f"{name}.patch applies cleanly" in capsys.readouterr().out


def test_a_patched_tree_is_not_patched_twice(apply, make_tree, capsys):
    tree = make_tree(RELEASES[0])
    assert "is not patched" in refused(apply, capsys, tree, "--reverse")
    apply.main([str(tree)])
    patched = contents(tree)
    capsys.readouterr()
    assert "is patched already" in refused(apply, capsys, tree)
    assert "is patched already" in refused(apply, capsys, tree, "--check")
    assert contents(tree) == patched


@pytest.mark.parametrize("file", ["core/pipeline_parallel/schedules.py", "training/arguments.py", "training/training.py"])
def test_a_tree_with_other_text_is_refused_whole(apply, make_tree, capsys, file):
    tree = make_tree(RELEASES[1])
    path = tree / "megatron" / file
    path.write_text(path.read_text().replace("pp_size > 1", "pp_size > 2").replace("args = get_args()", "arguments = get_args()")
                    .replace("_add_sft_args(parser)", "_add_sft_args(p)"))
    before = contents(tree)
    line = refused(apply, capsys, tree)
    assert "does not fit" in line and file in line and "start from a clean checkout" in line
    assert contents(tree) == before


def test_a_half_patched_tree_is_refused(apply, make_tree, capsys):
    tree = make_tree(RELEASES[2])
    path = tree / "megatron/training/arguments.py"
    clean = path.read_text()
    apply.main([str(tree)])
    path.write_text(clean)
    capsys.readouterr()
    for options in ([], ["--reverse"]):
        assert "does not fit" in refused(apply, capsys, tree, *options)


def test_lines_moved_elsewhere_do_not_matter(apply, make_tree):
    tree = make_tree(RELEASES[2])
    path = tree / "megatron/training/training.py"
    path.write_text("# one more line\n" * 5 + path.read_text())
    before = contents(tree)
    assert apply.main([str(tree)]) == 0
    assert apply.main([str(tree), "--reverse"]) == 0
    assert contents(tree) == before


@pytest.mark.parametrize("version", [(0, 16, 1), (0, 20, 0), (1, 17, 1)])
def test_an_unknown_release_is_named(apply, make_tree, capsys, version):
    line = refused(apply, capsys, make_tree(RELEASES[0], version=version))
    assert "is megatron-core " + ".".join(map(str, version)) in line and "core_v0.18.2" in line and "python -m rrfp" in line


def test_what_is_no_checkout_is_refused(apply, make_tree, tmp_path, capsys):
    assert "is not a Megatron-LM checkout" in refused(apply, capsys, tmp_path)
    tree = make_tree(RELEASES[0])
    (tree / "megatron/core/package_info.py").write_text("raise SystemExit('never run')\n")
    assert "names no version" in refused(apply, capsys, tree)


def test_git_is_needed(apply, make_tree, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "git is needed" in refused(apply, capsys, make_tree(RELEASES[0]))


def git(tree, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True, timeout=60)


def test_inside_another_repository_it_is_still_applied(apply, make_tree, tmp_path):
    # Below the root of some repository, git apply would skip every file and call that success.
    git(tmp_path, "init")
    tree = make_tree(RELEASES[2])
    before = contents(tree)
    assert apply.main([str(tree)]) == 0
    assert contents(tree) != before


def test_uncommitted_changes_are_refused(apply, make_tree, capsys):
    tree = make_tree(RELEASES[2])
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "clean")
    path = tree / "megatron/training/training.py"
    path.write_text(path.read_text() + "# mine\n")
    assert "uncommitted changes in megatron/training/training.py" in refused(apply, capsys, tree)
    git(tree, "commit", "-a", "-m", "mine")
    assert apply.main([str(tree)]) == 0
    assert apply.main([str(tree), "--reverse"]) == 0
    git(tree, "diff", "--exit-code")
