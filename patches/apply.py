"""Makes `--pipeline-schedule` a flag of a Megatron-LM checkout: applies the patch of its release, after checking it.

    python patches/apply.py DIR              check that the patch applies and reverses cleanly, then apply it
    python patches/apply.py DIR --check      only check
    python patches/apply.py DIR --reverse    take it out again

Needs Python and git, nothing else; the checkout need not be a git repository. Either everything is applied or nothing changes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PATCHES = {(0, 17): "core_v0.17.1", (0, 18): "core_v0.18.2", (0, 19): "core_v0.19.0"}
"""(major, minor) of megatron-core -> the release that the patch was made on."""


class Refused(Exception):
    """Why nothing was done, in one line."""


def release(tree: Path) -> tuple[int, int, int]:
    """The version of a checkout, read from `megatron/core/package_info.py` without running it. Raises Refused."""
    path = tree / "megatron" / "core" / "package_info.py"
    try:
        text = path.read_text()
    except OSError:
        raise Refused(f"{tree} is not a Megatron-LM checkout: it has no megatron/core/package_info.py") from None
    found = [re.search(rf"^{name}\s*=\s*(\d+)\s*$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    if None in found:
        raise Refused(f"{path} names no version: MAJOR, MINOR and PATCH are expected in it")
    return tuple(int(match[1]) for match in found)


def patch_for(tree: Path) -> Path:
    """The patch for a checkout. Raises Refused for a release that has none."""
    version = release(tree)
    name = PATCHES.get(version[:2])
    if name is None:
        known = ", ".join(PATCHES.values())
        raise Refused(
            f"{tree} is megatron-core {'.'.join(map(str, version))}, for which there is no patch (there is for {known}): "
            "use `python -m rrfp SCRIPT ...`, which needs none"
        )
    return Path(__file__).resolve().parent / f"{name}.patch"


def touched(patch: Path) -> list[str]:
    """The files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)


def check(tree: Path, patch: Path, *, reverse: bool) -> None:
    """Refuses unless the patch goes in (or, `reverse`, comes out) and leads back to the very same bytes. Changes nothing."""
    fits, complaint = _git(tree, patch, "--check", *["--reverse"] * reverse)
    if not fits:
        if _git(tree, patch, "--check", *["--reverse"] * (not reverse))[0]:
            raise Refused(f"{tree} is not patched" if reverse else f"{tree} is patched already: nothing to do")
        raise Refused(
            f"{patch.name} does not fit {tree}: files differ from the release ({complaint}); start from a clean checkout"
        )
    if not reverse and (changed := _uncommitted(tree, touched(patch))):
        names = ", ".join(changed)
        raise Refused(f"{tree} has uncommitted changes in {names}: commit or stash them first, to tell the patch apart")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        before = {name: (tree / name).read_bytes() for name in touched(patch)}
        for name, content in before.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
        for direction in (reverse, not reverse):
            fits, complaint = _git(copy, patch, *["--reverse"] * direction)
            if not fits:
                raise Refused(f"{patch.name} does not come out of {tree} again as it went in ({complaint}): nothing was changed")
        if any((copy / name).read_bytes() != content for name, content in before.items()):
            raise Refused(f"{patch.name} leaves other files in {tree} when taken back: nothing was changed")


def apply(tree: Path, *, reverse: bool = False, only_check: bool = False) -> str:
    """Returns what was done, in one line. Raises Refused."""
    if shutil.which("git") is None:
        raise Refused("git is needed to apply a patch, and is not installed")
    tree = tree.resolve()
    patch = patch_for(tree)
    check(tree, patch, reverse=reverse)
    if only_check:
        return f"{patch.name} applies cleanly to {tree} and reverses cleanly"
    done, complaint = _git(tree, patch, *["--reverse"] * reverse)
    if not done:
        raise Refused(f"{patch.name} could not be {'taken out of' if reverse else 'applied to'} {tree}: {complaint}")
    return f"{patch.name} {'taken out of' if reverse else 'applied to'} {tree}: {', '.join(touched(patch))}"


def _git(tree: Path, patch: Path, *options: str) -> tuple[bool, str]:
    """Runs `git apply` in `tree`. Returns success and the first line of what it said."""
    result = _run(tree, "apply", "--whitespace=nowarn", *options, str(patch))
    return result.returncode == 0, result.stderr.strip().split("\n")[0]


def _uncommitted(tree: Path, names: list[str]) -> list[str]:
    """Which of these files differ from the last commit; none if `tree` is not a git repository."""
    if not (tree / ".git").exists():
        return []
    return [name for name in names if _run(tree, "diff", "--quiet", "HEAD", "--", name).returncode == 1]


def _run(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    # Above a tree that is no repository there may be one: git would then silently skip the patch, so it must not look there.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent), "LC_ALL": "C"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    return subprocess.run(["git", *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=60)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage="%(prog)s DIR [--reverse | --check]")
    parser.add_argument("tree", type=Path, metavar="DIR", help="a Megatron-LM checkout")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--reverse", action="store_true", help="take the patch out again")
    what.add_argument("--check", action="store_true", help="check that it would apply and reverse cleanly; change nothing")
    options = parser.parse_args(argv)
    try:
        print(apply(options.tree, reverse=options.reverse, only_check=options.check))
    except Refused as refused:
        print(f"apply.py: {refused}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
