"""`rrfp schedule show`, `check` and `convert`: what they print, write and refuse."""

import re
from pathlib import Path

import pytest

from rrfp.cli import main
from rrfp.scheduler.lists import PUBLISHED, read_file

GOLDEN = Path(__file__).parents[1] / "scheduler" / "golden"



def run(capsys, *arguments):
    """Exit status, and what was printed and said."""
    status = main(["schedule", *map(str, arguments)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_show_prints_figures_and_a_timetable(capsys):
    status, out, err = run(capsys, "show", "1f1b", "--ranks", 2, "--microbatches", 2)
    assert (status, err) == (0, "")
    assert out == """\
1f1b: 2 ranks, 2 microbatches, backward whole
at F=1 B=2 I=1 W=1: makespan 9, bubble 33.3%

rank  stages  ends  idle  in flight  pending W
   0  0       9     3     2          -
   1  1       7     3     1          -

time  rank 0  rank 1
   0  0F0
   1  0F1     1F0
   2          1B0
   3          |
   4  0B0     1F1
   5  |       1B1
   6          |
   7  0B1
   8  |
"""


def test_show_puts_ties_in_parentheses_and_goes_on_with_bars(capsys):
    status, out, _ = run(capsys, "show", "dualpipe-v", "--ranks", 2, "--microbatches", 4)
    assert status == 0 and "2 ranks of 2 chunks in a V, 4 microbatches, some backwards split into I and W" in out
    table = out.partition("time")[2].splitlines()
    assert table[8:13] == ["   7  (0F3    |", "   8  3B1)    (2F2", "   9  |       1B0)", "  10  (3F2    |", "  11  0B0)    (1F3"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_list_can_be_shown(capsys, name):
    status, out, _ = run(capsys, "show", name, "--ranks", 4, "--microbatches", 8)
    units = int(re.search(r"makespan (\d+)", out)[1])
    assert status == 0 and len(out.splitlines()) == 3 + 5 + 2 + units


def test_show_draws_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "zb.png"
    assert run(capsys, "show", "zb-h1", "--ranks", 2, "--microbatches", 3, "--picture", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_show_of_what_cannot_run_says_so_and_shows_the_rows(capsys, tmp_path):
    file = tmp_path / "stuck.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    status, out, _ = run(capsys, "show", file)
    assert status == 1
    assert f"{file}: cannot run: deadlocks: 0B0 at line 1, column 2, rank 0, position 1 and 1F1 at line 2, column 2, rank 1, position 1 wait" in out
    assert "step  rank 0  rank 1\n   0  0F0     1F0\n   1  0B0     1F1\n" in out


@pytest.mark.parametrize("arguments, verdict", [
    ("zb-v --ranks 4 --microbatches 8", "runs: 4 ranks of 2 chunks in a V, 8 microbatches, backward split into I and W; makespan 51, bubble 5.9%, "
     "in flight 8/8/8/8, pending W 1/3/5/7; not for Megatron, which places chunks looped"),
    ("looped-bfs --ranks 2 --microbatches 4", "runs: 2 ranks of 2 chunks, 4 microbatches, backward whole; makespan 27, bubble 11.1%, in flight 8/8; "
     "leaves microbatch order (rank 0, position 9: 2B2 after 2B3), so strict mode needs --rrfp-order free"),
    ("looped-bfs --ranks 2 --microbatches 4 --order microbatch", "runs: 2 ranks of 2 chunks, 4 microbatches, backward whole; makespan 27, "
     "bubble 11.1%, in flight 8/8"),
    ("1f1b --ranks 4 --microbatches 8 --limit eager", "runs: 4 ranks, 8 microbatches, backward whole; makespan 33, bubble 27.3%, in flight 7/5/3/1"),
    ("gpipe --ranks 2 --microbatches 2 --split", "runs: 2 ranks, 2 microbatches, backward split into I and W; makespan 8, bubble 25.0%, "
     "in flight 2/2, pending W 1/1"),
    ("fill --ranks 2 --chunks 2 --microbatches 4", "runs: 2 ranks of 2 chunks, 4 microbatches, backward whole; makespan"),
    ("zb-h1 --ranks 2 --chunks 2 --microbatches 4", "cannot run: is a list for one chunk per rank, rank 0 has 2; use 1f1b"),
    ("dualpipe-v --ranks 2 --microbatches 3", "cannot run: does not exist for M = 3 on 2 ranks of 2 chunks (DualPipeV requires at least as many "
     "microbatches as stages, but got 3 microbatches and 4 stages); use another number, or 1f1b, which exists for any"),
])
def test_check_gives_one_line(capsys, arguments, verdict):
    status, out, err = run(capsys, "check", *arguments.split())
    assert out.startswith(f"{arguments.split()[0]}: {verdict}") and out.count("\n") == 1 and not err
    assert out.rstrip() == f"{arguments.split()[0]}: {verdict}" or arguments.startswith("fill")
    assert status == ("cannot run" in verdict)


@pytest.mark.parametrize("content, verdict", [
    ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "cannot run: line 2, column 4, rank 1, position 3: the row ends without 1B1 (1 missing)"),
    ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1,0F1\n", "cannot run: line 2, column 5, rank 1, position 4: 0F1 belongs to rank 0; remove it"),
    ("0F0,0I0,0F1,0B1,0W0\n", "runs: 1 rank, 2 microbatches, some backwards split into I and W; makespan 6, bubble 0.0%, in flight 2, pending W 1"),
    ("0F0,0B0,0I0,0W0\n", "cannot run: line 1, column 3, rank 0, position 2: 0I0 is half of the backward that 0B0 in this row is the whole of; list "
     "0B0, or 0I0 and 0W0, not both"),
    ("0F0,0I0,0W0\n1F0,1I0,1B0,1W0\n", "cannot run: line 2, column 2, rank 1, position 1: 1I0 is half of the backward that 1B0"),
    ("0F0,0B0\n0F1,0B1\n", "cannot run: line 2 (rank 1) holds stage 0, as line 1 (rank 0) does; a stage lives on one rank, so give rank 1 one"),
    ("0F0,0B0\n\n0F1,0B1\n1F0,1B0\n", "cannot run: line 3 (rank 1) holds stage 0, as line 1 (rank 0) does"),
    ("# rrfp: generator=nosuch\n0F0,0B0\n", "cannot run: its line generator=nosuch names no list; name one of 1f1b, gpipe"),
    ("# rrfp: generator=zb-h1\n0F0,0B0\n", "cannot run: its line generator=zb-h1 names a list with a backward split into I and W, and here"),
    ("# rrfp: generator=zb-h1\n0F0,0I0,0W0\n", "runs: 1 rank, 1 microbatch, backward split into I and W"),
    ("# rrfp: generator=lists_of_mine:make\n0F0,0B0\n", "runs: 1 rank, 1 microbatch, backward whole"),
    ("0F0,0Q0\n", "cannot run: line 1, column 2, rank 0, position 1: '0Q0': there is no kind Q; use F, B, I or W"),
    ("0F0,0B0\n2F0,2B0\n", "cannot run: stage 1 stands nowhere, and stage 2 does; number stages from 0 on"),
    ("0F0,0B0\n,,\n", "cannot run: line 2 (rank 1) holds no action; give every rank a stage"),
    ("0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n", "runs: 2 ranks, 1 microbatch, backward whole; makespan 6, bubble 50.0%, "
     "in flight 1/1; left out, for it follows from the rest: 1 RECV_B, 1 RECV_F, 1 REDUCE_GRAD, 1 SEND_B, 1 SEND_F"),
    ("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", "runs: 2 ranks of 2 chunks, 1 microbatch, backward whole; makespan 12"),
    ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", "runs: 2 ranks of 2 chunks (stages on ranks 0 0 1 1), 1 microbatch,"),
])
def test_check_of_files(capsys, tmp_path, content, verdict):
    file = tmp_path / "list.csv"
    file.write_text(content)
    status, out, err = run(capsys, "check", file)
    assert out.startswith(f"{file}: {verdict}") and out.count("\n") == 1 and not err
    assert status == verdict.startswith("cannot")


def test_a_program_is_a_list_too(capsys, tmp_path):
    """Its order of stages, here placed in a V."""
    assert main(["program", "build", "dualpipev", str(tmp_path / "dual.json"), "--ranks", "2", "--microbatches", "4"]) == 0
    capsys.readouterr()
    status, out, err = run(capsys, "check", tmp_path / "dual.json")
    assert status == 0 and ": runs: 2 ranks of 2 chunks in a V, 4 microbatches, some backwards split" in out and not err


@pytest.mark.parametrize("name", PUBLISHED)
def test_convert_writes_what_torch_reads(capsys, tmp_path, name):
    golden = next(GOLDEN.glob(f"{name}-?-*.csv"))
    ranks, microbatches = golden.stem.rsplit("-", 2)[1:]
    out = tmp_path / "out.csv"
    assert run(capsys, "convert", name, out, "--ranks", ranks, "--microbatches", microbatches)[0] == 0
    assert out.read_text() == golden.read_text()
    again = tmp_path / "again.csv"
    status, said, _ = run(capsys, "convert", out, again, "--generator", name)
    assert status == 0 and said.startswith(f"{again}: {ranks} ranks of 2 chunks")
    assert again.read_text() == f"# rrfp: generator={name}\n" + golden.read_text()
    run(capsys, "convert", again, out)
    assert read_file(out).generator == name, "a file keeps its generator"


def test_convert_numbers_anew(capsys, tmp_path):
    out = tmp_path / "out.csv"
    run(capsys, "convert", "looped-bfs", out, "--ranks", 2, "--chunks", 1, "--microbatches", 3, "--order", "microbatch")
    assert out.read_text() == "0F0,0F1,0F2,,,0B0,0B1,0B2\n,1F0,1F1,1F2,1B0,1B1,1B2\n"


def test_convert_refuses_what_cannot_run(capsys, tmp_path):
    file, out = tmp_path / "list.csv", tmp_path / "out.csv"
    file.write_text("0B0,0F0\n")
    status, said, _ = run(capsys, "convert", file, out)
    assert status == 1 and "cannot run: line 1, column 1, rank 0, position 0: 0B0 stands before 0F0" in said and not out.exists()


@pytest.mark.parametrize("arguments, message", [
    ("show nonsense --ranks 2 --microbatches 2", "NAME|FILE nonsense: is neither a list nor a file; use one of auto, announced"),
    ("check 1f1b --microbatches 2", "--ranks: is missing, and 1f1b is made for any size; give --ranks N"),
    ("check 1f1b --ranks 2", "--microbatches: is missing, and 1f1b"),
    ("check zb-v --ranks 2 --microbatches 4 --limit 2p", "--limit: zb-v is a published list, which is what it is; leave the option out"),
    ("check FILE --ranks 3", "--ranks 3: FILE is for 2; leave the option out"),
    ("check FILE --microbatches 3", "--microbatches 3: FILE is for 1; leave"),
    ("check FILE --chunks 2", "--chunks 2: FILE is for 1; leave"),
    ("check FILE --split", "--split: FILE is a file, which says itself what runs; leave the option out"),
    ("check 1f1b --ranks 2 --microbatches 2 --limit lots", "--rrfp-limit lots: must be one of auto, 1f1b, eager"),
    ("convert FILE /nowhere/out.csv", "OUT /nowhere/out.csv: there is no directory /nowhere"),
    ("convert FILE OUT --generator fill", "--generator fill: names no list; name one of 1f1b, gpipe"),
    ("convert FILE OUT --generator zb-h1", "--generator zb-h1: names a list with a backward split into I and W"),
    ("show FILE --picture out.jpg", "--picture out.jpg: is a PNG; give it a name that ends in .png"),
])
def test_refusals_name_the_option(capsys, tmp_path, arguments, message):
    file = tmp_path / "list.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    texts = [word.replace("FILE", str(file)).replace("OUT", str(tmp_path / "out.csv")) for word in arguments.split()]
    status, out, err = run(capsys, *texts)
    wanted = message if message.startswith("NAME") else message.replace("FILE", str(file))
    assert (status, out) == (2, "") and err.startswith(f"rrfp: {wanted}"), err
