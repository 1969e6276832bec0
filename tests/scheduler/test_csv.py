"""PyTorch's CSV notation, read and written, and what a file may say about other numbers of microbatches."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_side import torch_reads, torch_schedule

from rrfp.action import Action
from rrfp.errors import ConfigurationError
from rrfp.megatron import _check_at_start
from rrfp.megatron.options import Options
from rrfp.placement import Placement
from rrfp.policy import Policy, register_hint
from rrfp.policy_rows import rows_of
from rrfp.schedule.plan import plan_of
from rrfp.scheduler import lists
from rrfp.scheduler.lists import as_row, read, read_file, text_of, write

LIST = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "list.csv"


def text(row):
    return " ".join(map(str, lists.actions_of(row)))


# ---------------------------------------------------------------------- to torch and back
@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (3, 6), (4, 12)])
@pytest.mark.parametrize("name", lists.PUBLISHED)
def test_torch_to_file_to_ours_to_file_to_torch(name, ranks, microbatches, tmp_path):
    """Equal to the last idle step, and torch would run it."""
    schedule = torch_schedule(name, ranks, 2, microbatches)
    schedule._dump_csv(tmp_path / "torch.csv", format="compute_only")
    ours = read_file(tmp_path / "torch.csv")
    assert (ours.microbatches, ours.splits, sum(ours.left_out.values())) == (microbatches, lists.PUBLISHED[name].split, 0)
    write(ours.steps, tmp_path / "ours.csv")
    assert torch_reads(tmp_path / "ours.csv", ranks, 2, microbatches) == schedule.pipeline_order
    assert (tmp_path / "ours.csv").read_text() == (tmp_path / "torch.csv").read_text().replace("\r\n", "\n")


@pytest.mark.parametrize("name", lists.PUBLISHED)
def test_what_torch_lowered_is_read_as_the_list_it_came_from(name, tmp_path):
    """Sends, receives and collectives follow from the actions here, so they are counted and left out."""
    schedule = torch_schedule(name, 2, 2, 4)
    schedule._dump_csv(tmp_path / "lowered.csv", format="compute_comms")
    schedule._dump_csv(tmp_path / "plain.csv", format="compute_only")
    lowered, plain = read_file(tmp_path / "lowered.csv"), read_file(tmp_path / "plain.csv")
    assert lowered.rows == plain.rows
    crossings = 4 * (2 if lists.PUBLISHED[name].v else 3)  # per direction: the turn of a V is within a rank
    sends = {kind: count for kind, count in lowered.left_out.items() if kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")}
    assert sends == dict.fromkeys(("SEND_F", "RECV_F", "SEND_B", "RECV_B"), crossings)
    assert lowered.left_out["UNSHARD"] >= 4 and lowered.left_out["REDUCE_GRAD"] == 4


@pytest.mark.parametrize("name, split", [("1f1b", False), ("gpipe", False), ("zb-h1", True), ("alt", False)])
def test_torch_reads_our_own_lists(name, split, file):
    plan = plan_of(name, ranks=3, microbatches=5, limit="5")
    write(plan.steps, file)
    order = torch_reads(file, 3, 1, 5)
    assert [" ".join(map(str, order[rank])) for rank in range(3)] == list(map(text, plan.rows))


actions = st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 99), st.integers(0, 999))
groups = st.one_of(st.just(()), st.tuples(actions), st.lists(actions, min_size=2, max_size=3).map(tuple))
rows = st.lists(st.lists(groups, min_size=1, max_size=9).filter(any).map(tuple), min_size=1, max_size=5)


@given(rows=rows, generator=st.sampled_from([None, "zb-v", "mine:make"]))
def test_whatever_is_written_is_read(tmp_path_factory, rows, generator):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    write(rows, path, generator=generator)
    assert (read_file(path).steps, read_file(path).generator) == (rows, generator)
    assert read(path) == lists.without_idle(rows)


def test_what_is_written(file):
    write([as_row(["0F0", ("0F1", "0B0"), "0B1"]), ((), *as_row(["1F0", "1B0"]))], file, generator="1f1b")
    assert file.read_text() == "# rrfp: generator=1f1b\n0F0,(0F1;0B0)OVERLAP_F_B,0B1\n,1F0,1B0\n"


def test_spreadsheets_may_have_had_it(file):
    """A mark at the beginning, quotes, blanks, CR LF, empty lines, trailing empty cells, remarks."""
    file.write_bytes('\ufeff# my list\r\n"0F0", 0F1 ,,0B0,0B1,,\r\n\r\n1F0,1B0,( 1F1 ; 1B1 )OVERLAP_F_B\r\n'.encode())
    assert list(map(text, read(file))) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_a_pair_is_a_tie(file):
    """Strict mode runs it in whichever order its actions become ready, before anything behind it."""
    file.write_text("0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n")
    policy = Policy(hint=str(file), mode="strict", limit="4")
    scheduler = policy.scheduler(Placement.looped(2), 0, 4)
    for expected in ("0F0", "0F1", "0F2"):
        action = scheduler.choose(0.0).action
        assert str(action) == expected
        scheduler.launched(action, 0.0)
        scheduler.completed(action, 1.0)
    assert scheduler.choose(0.0).action is None, "0F3 stands behind the pair, whose 0B0 has not come"


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("content, message", [
    ("0F0,0B0\n1F0,B10\n", "line 2, column 2, rank 1, position 1: 'B10' is not an action: write stage, kind and microbatch, like 2F0"),
    ("# list\n\n0F0,,0X0\n", "line 3, column 3, rank 0, position 1: '0X0': there is no kind X; use F, B, I or W"),
    ("0F\n", "line 1, column 1, rank 0, position 0: '0F' names no microbatch: write it like 0F0"),
    ("0F0 0B0\n", "line 1, column 1, rank 0, position 0: '0F0 0B0' is not an action"),
    ("0F0;0B0\n", "'0F0;0B0' is not an action"),
    ("(0F0;0B0)\n", r"'\(0F0;0B0\)' is no group of two actions or more: write it like \(0F7;7B3\)OVERLAP_F_B"),
    ("(0F0;0B0)OVERLAP\n", "is no group of two actions or more"),
    ("(0F0;0B0\n", "is no group of two actions or more"),
    ("(0F0)OVERLAP_F_B\n", "is no group of two actions or more"),
    ("()OVERLAP_F_B\n", "is not an action"),
    ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", "column 2, rank 0, position 1: '0SEND_F0': there is no kind SEND_F; use F, B, I or W"),
    ("0F0,(0F1;(0B0;0F2)OVERLAP_F_B)OVERLAP_F_B\n", "column 2"),
    ('0F0,"0B0\n', "line 1: is no line of a CSV file"),
    ("", "holds no action; write one line per rank, like 0F0,0F1,0B0,0B1"),
    ("# rrfp: generator=zb-v\n,,\n", "holds no action"),
    ("# rrfp: generator=\n0F0,0B0\n", "line 1: '# rrfp: generator=' says nothing that is known; write # rrfp: generator=NAME"),
    ("# rrfp: microbatches=4\n0F0,0B0\n", "line 1: '# rrfp: microbatches=4' says nothing that is known"),
])
def test_a_bad_file_is_named_by_line_column_and_token(file, content, message):
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=f"^--rrfp-hint {file}: .*{message}"):
        read_file(file)


def test_a_file_that_cannot_be_read(file):
    with pytest.raises(ConfigurationError, match="cannot be read .*No such file.*; give a built-in hint or a CSV file"):
        read(file)
    file.write_bytes(b"\xff\xfe0F0\n")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(file)


def test_an_impossible_entry_is_named_by_its_cell(file):
    file.write_text("# mine\n0F0,,0F1,0B0,0B1\n\n1F0,1B0,,1B1,1F1\n")
    with pytest.raises(ConfigurationError, match="line 4, column 4, rank 1, position 2: 1B1 stands before 1F1"):
        Policy(hint=str(file)).scheduler(Placement.looped(2), 0, 2)
    file = file.with_name("short.csv")
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,,1F1\n")
    with pytest.raises(ConfigurationError, match="line 2, column 5, rank 1, position 3: the row ends without 1B1"):
        Policy(hint=str(file)).scheduler(Placement.looped(2), 0, 2)


# ---------------------------------------------------------------------- other numbers of microbatches
def job(hint, mode="ready", **more):
    """What a Megatron job of two pipeline ranks, two microbatches per call, checks of its hint before it starts."""
    args = argparse.Namespace(pipeline_model_parallel_size=2, data_parallel_size=1, global_batch_size=2, micro_batch_size=1, **more)
    _check_at_start(Options(hint=str(hint), mode=mode, limit="9"), args)


OTHERS = {"ramp-up": {"rampup_batch_size": ["1", "1", "100"]}, "evaluation": {"eval_global_batch_size": 3},
          "steps of the batch size": {"step_batch_size_schedule": "0:2 1B:4"}}


@pytest.mark.parametrize("mode", ["ready", "strict"])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_a_list_for_one_number_is_refused_at_start_if_the_run_can_have_another(file, others, mode):
    file.write_text(LIST)
    job(file, mode)
    with pytest.raises(ConfigurationError, match=f"^--rrfp-hint {file}: is for 2 microbatches, and this run has calls of [134]; let a first line "
                                                 "`# rrfp: generator=NAME` name the list for other numbers, or use a hint"):
        job(file, mode, **others)


@pytest.mark.parametrize("mode", ["ready", "strict"])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_unless_it_names_a_generator(file, others, mode):
    file.write_text("# rrfp: generator=gpipe\n" + LIST)
    job(file, mode, **others)
    policy = Policy(hint=str(file), mode=mode, limit="9")
    placement = Placement.looped(2)
    assert text(rows_of(policy, placement, 2, {})[1]) == "1F0 1B0 1F1 1B1"
    assert text(rows_of(policy, placement, 3, {})[1]) == "1F0 1F1 1F2 1B0 1B1 1B2"
    assert text(Policy(hint=str(file), mode="strict", limit="9").list_for(placement, 3)[0]) == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_a_generator_may_be_a_registered_function(file):
    register_hint("generator-of-test-csv", lambda context: [
        [*(f"{rank}F{m}" for m in range(context.microbatches)), *(f"{rank}B{m}" for m in range(context.microbatches))] for rank in range(2)])
    file.write_text("# rrfp: generator=generator-of-test-csv\n" + LIST)
    assert text(rows_of(Policy(hint=str(file)), Placement.looped(2), 3, {})[0]) == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_a_generator_may_be_imported(file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lists_of_mine.py").write_text(
        "def make(c):\n    return [[f'{r}{k}{m}' for k in 'FB' for m in range(c.microbatches)] for r in range(2)]\n")
    file.write_text("# rrfp: generator=lists_of_mine:make\n" + LIST)
    job(file, eval_global_batch_size=3)
    file = file.with_name("other.csv")
    file.write_text("# rrfp: generator=no_such_module:make\n" + LIST)
    with pytest.raises(ConfigurationError, match="no_such_module:make: can't be imported"):
        job(file)


@pytest.mark.parametrize("name, message", [
    ("fill", "its line generator=fill names no list; name one of 1f1b, gpipe"), ("nonsense", "its line generator=nonsense names no list"),
    ("zb-h1", "its line generator=zb-h1 names a list with a backward split into I and W, and here backwards are whole")])
def test_a_generator_must_make_a_list_for_this_run(file, name, message):
    file.write_text(f"# rrfp: generator={name}\n" + LIST)
    with pytest.raises(ConfigurationError, match=message):
        Policy(hint=str(file))


def test_a_generator_that_does_not_fit_is_refused_at_start(file):
    """Its own rule, and the size: interleaved 1F1B of PyTorch's wants whole rounds."""
    file.write_text("# rrfp: generator=interleaved-1f1b\n" + text_of(plan_of("interleaved-1f1b", ranks=2, chunks=1, microbatches=2).steps))
    job(file)
    with pytest.raises(ConfigurationError, match="--rrfp-hint interleaved-1f1b: does not exist for M = 5 on 2 ranks"):
        job(file, eval_global_batch_size=5)


@pytest.mark.parametrize("name", [name for name, each in lists.PUBLISHED.items() if each.v])
def test_the_drop_in_refuses_a_v_by_name(name):
    with pytest.raises(ConfigurationError, match=f"^--rrfp-hint {name}: is a list with a V placement .*, and Megatron places chunks looped; use "):
        Options(hint=name)


@pytest.mark.parametrize("mode", ["ready", "strict"])
@pytest.mark.parametrize("name", ["looped-bfs", "interleaved-1f1b"])
def test_the_drop_in_takes_looped_ones(name, mode):
    args = argparse.Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, data_parallel_size=1, global_batch_size=6,
                              micro_batch_size=1)
    _check_at_start(Options(hint=name, mode=mode, limit="12"), args)
    args.rampup_batch_size = ["5", "1", "100"]
    if name == "interleaved-1f1b":
        with pytest.raises(ConfigurationError, match="does not exist for M = 5 on 2 ranks of 2 chunks"):
            _check_at_start(Options(hint=name, mode=mode, limit="12"), args)
