"""What runs by readiness, what is refused and what is left to Megatron: by name, with the rule and the way out."""

import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
core = pytest.importorskip("megatron.core")

from megatron.core.enums import Fp8Recipe  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from rrfp.errors import ConfigurationError  # noqa: E402
from rrfp.megatron import compatibility, forward_backward, split_backward  # noqa: E402
from rrfp.megatron.compatibility import check_call, check_megatron, delegation, refusal  # noqa: E402
from rrfp.megatron.options import Options  # noqa: E402

REFUSED = {
    "--expert-tensor-parallel-num-weight-shards": {"expert_gtp_weight_remat_size": 2},
    "GTP": {"gtp_weight_remat_size": 2},
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
    "--fp8-recipe delayed": {"fp8": "e4m3", "fp8_recipe": "delayed"},
    "--moe-router-load-balancing-type": {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
}
DELEGATED = {
    "--hybrid-context-parallel": {"hybrid_context_parallel": True},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "moe_paged_stash": {"moe_paged_stash": True},
    "--fine-grained-activation-offloading": {"fine_grained_activation_offloading": True},
    "--cpu-offloading": {"cpu_offloading": True},
}
HARMLESS = [
    {},
    {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 4,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    {"fp8": "e4m3", "fp8_recipe": "delayed", "tp_only_amax_red": True},
    {"fp8": None, "fp8_recipe": "delayed"},
    {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
    {"moe_router_load_balancing_type": "aux_loss"},
    {"gtp_weight_remat_size": None},
    {"cuda_graph_impl": "none"},
    {"cuda_graph_impl": None},
    {"defer_embedding_wgrad_compute": True},
]


@pytest.mark.parametrize("option", REFUSED)
def test_refused(option):
    config = SimpleNamespace(**REFUSED[option])
    line = refusal(config)
    assert re.match(rf"--pipeline-schedule rrfp with {re.escape(option)}.*: .+; use --pipeline-schedule 1f1b$", line)
    assert delegation(config) is None
    with pytest.raises(ConfigurationError, match=re.escape(line)):
        check_call(config, order="microbatch")


@pytest.mark.parametrize("option", DELEGATED)
def test_delegated(option):
    config = SimpleNamespace(**DELEGATED[option])
    assert re.match(rf"{re.escape(option)}: \S.+", delegation(config)) and refusal(config) is None


@pytest.mark.parametrize("config", HARMLESS, ids=str)
def test_neither(config):
    """Control. Megatron's unit tests pass a bare config that lacks most fields."""
    config = SimpleNamespace(**config)
    assert refusal(config) is None and delegation(config) is None
    check_call(config, order="microbatch")


@pytest.mark.parametrize("recipe", list(Fp8Recipe))
def test_every_recipe_of_fp8_is_decided(recipe):
    """Delayed scaling alone keeps a history that is reduced over data-parallel ranks. A recipe that is new here has to be looked at."""
    assert recipe.value in {"delayed", "tensorwise", "mxfp8", "blockwise", "custom"}
    assert (refusal(SimpleNamespace(fp8="hybrid", fp8_recipe=recipe)) is not None) == (recipe == Fp8Recipe.delayed)


def test_pairs_by_order_forbid_a_free_order():
    line = refusal(SimpleNamespace(defer_embedding_wgrad_compute=True), order="free")
    assert "--rrfp-order free with --defer-embedding-wgrad-compute" in line and line.endswith("use --rrfp-order microbatch")
    assert refusal(SimpleNamespace(), order="free") is None


# ------------------------------------------------------------------------------------------------- releases
def test_the_installed_release_is_known():
    check_megatron()


@pytest.mark.parametrize("version", ["0.16.1", "0.20.0", "1.0.0", "0.15.0rc4"])
def test_an_unknown_release_is_refused(monkeypatch, version):
    monkeypatch.setattr(core, "__version__", version)
    with pytest.raises(
        ConfigurationError,
        match=rf"megatron-core {re.escape(version)}: supported are 0\.17\.1 to 0\.19\.x; install one of those",
    ):
        check_megatron()


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.0rc1"])
def test_a_known_release_is_taken(monkeypatch, version):
    monkeypatch.setattr(core, "__version__", version)
    check_megatron()


def test_a_schedule_with_an_unknown_keyword_is_refused(monkeypatch):
    def forward_backward_pipelining_without_interleaving(*, model, tracing_level=0): ...

    monkeypatch.setattr(
        schedules, "forward_backward_pipelining_without_interleaving", forward_backward_pipelining_without_interleaving
    )
    with pytest.raises(
        ConfigurationError, match="its schedules take tracing_level, which this release of rrfp doesn't know; install"
    ):
        check_megatron()


def test_the_keywords_are_those_of_the_installed_schedule():
    import inspect

    assert (
        set(inspect.signature(schedules.forward_backward_pipelining_without_interleaving).parameters) == compatibility._KEYWORDS
    )
    ours = forward_backward.make_forward_backward(
        Options(), original=schedules.forward_backward_pipelining_without_interleaving
    )
    assert set(inspect.signature(ours.__wrapped__).parameters) == compatibility._KEYWORDS
    assert set(ours.__code__.co_varnames[: ours.__code__.co_kwonlyargcount]) == compatibility._KEYWORDS


# ------------------------------------------------------------------------------------------------- one call
@pytest.fixture
def schedule(monkeypatch):
    """Ours, over an original that only says what it was given."""
    monkeypatch.setattr(forward_backward, "_said", set())
    calls = []

    def forward_backward_pipelining_without_interleaving(**keywords):
        calls.append(keywords)
        return ["Megatron's"]

    function = forward_backward.make_forward_backward(Options(), original=forward_backward_pipelining_without_interleaving)
    function.calls = calls
    return function


def call(function, *, config=None, **keywords):
    model = SimpleNamespace(config=SimpleNamespace(**{"overlap_p2p_comm": False} | (config or {})))
    given = {
        "forward_step_func": print,
        "data_iterator": None,
        "model": [model],
        "num_microbatches": 4,
        "seq_length": 8,
        "micro_batch_size": 2,
    }
    return function(**given | keywords), given | keywords


class MultiModuleProcessGroupCollection: ...


class MultiModulePipelineCommunicator: ...


@pytest.mark.parametrize(
    "keywords, reason",
    [
        ({"config": {"cuda_graph_impl": "local"}}, "--cuda-graph-impl: graphs are captured in one fixed order"),
        ({"config": {"moe_paged_stash": True}}, "moe_paged_stash: "),
        ({"adjust_tensor_shapes_fn": lambda receive, send: (receive, send)}, r"adjust_tensor_shapes_fn: .*\(distillation\)"),
        ({"pg_collection": MultiModuleProcessGroupCollection()}, "multi-module process groups: "),
        ({"p2p_communicator": MultiModulePipelineCommunicator()}, "multi-module process groups: "),
    ],
)
def test_a_call_is_delegated_with_one_line_and_all_it_was_given(schedule, capsys, keywords, reason):
    for _ in range(3):
        result, given = call(schedule, **keywords, forward_only=True, collect_non_loss_data=True)
        assert result == ["Megatron's"]
        given.pop("config", None)
        assert {name: schedule.calls[-1][name] for name in given} == given
        assert set(schedule.calls[-1]) == compatibility._KEYWORDS
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"\[rrfp\] Megatron's own schedule runs this job: {reason}", line)


@pytest.mark.parametrize("option", REFUSED)
def test_a_call_is_refused(schedule, option):
    with pytest.raises(ConfigurationError, match=re.escape(option)):
        call(schedule, config=REFUSED[option])
    assert not schedule.calls


def test_megatrons_own_complaints_are_kept(schedule):
    with pytest.raises(ValueError, match="does not support overlapping p2p communication"):
        call(schedule, config={"overlap_p2p_comm": True})
    with pytest.raises(AssertionError, match="does not support model chunking"):
        call(schedule, model=[1, 2])
    with pytest.raises(TypeError, match="unheard_of"):
        call(schedule, unheard_of=1)
    with pytest.raises(TypeError):
        schedule(print, None)
    with pytest.raises(ValueError, match="both p2p_communicator and pg_collection"):
        call(schedule, pg_collection=SimpleNamespace(tp=1, cp=1))


def test_interleaving_asks_what_megatrons_does():
    def forward_backward_pipelining_with_interleaving(**_): ...

    interleaved = forward_backward.make_forward_backward(Options(), original=forward_backward_pipelining_with_interleaving, interleaved=True)
    assert interleaved.__name__ == "forward_backward_pipelining_with_interleaving"
    module = torch.nn.Linear(1, 1)
    with pytest.raises(AssertionError, match="interleaved pipeline parallelism expected model chunking"):
        call(interleaved, model=module)
    with pytest.raises(AssertionError, match="expected each model chunk to have a data iterator"):
        call(interleaved, model=[module, module], data_iterator=None)
    module.config = SimpleNamespace(overlap_p2p_comm=True, batch_p2p_comm=True)
    with pytest.raises(ValueError, match="Can not use both overlap_p2p_comm and batch_p2p_comm"):
        call(interleaved, model=[module, module], data_iterator=[None, None])


@pytest.mark.parametrize("settings, shape", [
    ({}, (8, 2, 32)), ({"sequence_parallel": True}, (4, 2, 32)), ({"variable_seq_lengths": True}, None), ({"mtp_standalone": True}, None)])
def test_a_shape_is_expected_where_megatron_does_not_ask_for_it(settings, shape):
    """It asks with variable lengths, and if several tokens are predicted on a stage of their own (`P2PCommunicator._communicate`)."""
    config = SimpleNamespace(**{"sequence_parallel": False, "variable_seq_lengths": False, "mtp_standalone": False, "hidden_size": 32,
                                "pipeline_dtype": torch.bfloat16} | settings)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2), cp=SimpleNamespace(size=lambda: 2))
    expected = forward_backward._activation(config, groups, seq_length=16, micro_batch_size=2, decoder_seq_length=None)
    assert (expected.dtype, expected.shape) == ("bfloat16", shape)


def test_weight_gradients_that_nobody_would_compute_are_refused():
    """Unless it was the split backward that put them off."""
    config = SimpleNamespace(delay_wgrad_compute=True)
    line = "--pipeline-schedule rrfp with --delay-wgrad-compute: nothing would run what is put off; use --rrfp-split-backward instead"
    assert refusal(config) == line and refusal(config, split=True) is None


SPLIT_REFUSED = {option: (values, "Megatron's own schedule") for option, values in DELEGATED.items()} | {
    "--overlap-dispatch-backward-with-experts-wgrad": ({"overlap_dispatch_backward_with_experts_wgrad": True}, "one of the two"),
}


@pytest.mark.parametrize("option", SPLIT_REFUSED)
def test_jobs_that_cannot_split_their_backward(option):
    values, why = SPLIT_REFUSED[option]
    line = split_backward.refusal(SimpleNamespace(**values))
    assert line.startswith(f"--rrfp-split-backward with {option}: ") and why in line and "\n" not in line
    assert split_backward.refusal(SimpleNamespace()) is None


@pytest.mark.parametrize("installed, arguments, needed", [
    ("2.2.0", {}, "2.3.0"), ("2.3.0", {}, None), ("2.6.0", {"gradient_accumulation_fusion": False}, "2.7.0"),
    ("2.7.0", {"gradient_accumulation_fusion": False}, None), ("2.7.0", {"overlap_grad_reduce": True}, "2.8.0"),
    ("2.8.0", {"overlap_grad_reduce": True, "gradient_accumulation_fusion": False}, None)])
def test_releases_of_transformer_engine_that_can_delay(monkeypatch, installed, arguments, needed):
    def numbers(version):
        return [int(part) for part in version.split(".")]

    monkeypatch.setattr("megatron.core.utils.is_te_min_version", lambda version: numbers(installed) >= numbers(version))
    values = {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": True, "overlap_grad_reduce": False} | arguments
    line = split_backward.refusal(SimpleNamespace(**values))
    assert line is None if needed is None else f"need Transformer Engine {needed} or later" in line
