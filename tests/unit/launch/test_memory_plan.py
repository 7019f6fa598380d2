import re
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl import cli
from nemo_rl.command_line import ExitCode
from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.loading import load_config, load_eval_config, load_reward_model_config
from nemo_rl.distributed import devices
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm import entry
from nemo_rl.launch import resolved_run
from nemo_rl.launch.memory_plan import (
    GB,
    EngineMemory,
    RunMemory,
    find_cure,
    make_run_memory,
    memory_plan,
    reward_model_memory_plan,
    sampling_memory_plan,
)
from nemo_rl.launch.recipe_commands import GRPO_JOB
from nemo_rl.policy.memory import ModelShape, RankMemory
from tests.fakes.model_configs import MODEL_CONFIGS
from tests.unit.launch.cuda_recipes import CUDA_RECIPES, ROOT, downloaded, recipe_and_layout, run_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("downloaded")
SMALL, MEDIUM, LARGE = (
    ModelShape.from_config(name, MODEL_CONFIGS[name])
    for name in ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B")
)


def colocated(shape: ModelShape, *, ranks: int = 1, tokens: int = 8192, utilization: float = 0.6) -> RunMemory:
    return RunMemory(
        capacity=80 * GB,
        policy=RankMemory(shape=shape, data=ranks, train_tokens=tokens, score_tokens=2 * tokens, longest=512),
        engine=EngineMemory(shape=shape, utilization=utilization),
        shares_device=True,
    )


def test_a_device_in_turns_never_holds_the_awake_engine_and_the_optimizer() -> None:
    for moment in colocated(SMALL).devices()["policy and engine"]:
        assert not {"KV cache and engine activations", "optimizer"} <= moment.parts.keys(), moment


def test_an_engine_that_does_not_sleep_is_always_there() -> None:
    memory = colocated(SMALL)
    assert memory.engine is not None
    awake = replace(memory, engine=replace(memory.engine, can_sleep=False))
    assert all(moment.parts["engine weights"] > 0 for moment in awake.devices()["policy and engine"])
    assert awake.problems()


def test_the_engine_takes_its_share_of_the_device() -> None:
    (generation,) = [m for m in colocated(SMALL).devices()["policy and engine"] if m.name == "generation"]
    assert generation.parts["engine weights"] == 2 * 1_543_714_304
    assert generation.total == 48 * GB + 2 * GB  # 0.6 of 80, and two contexts


def test_both_stay_where_every_moment_fits_with_the_engine_awake() -> None:
    memory = colocated(SMALL, tokens=2048, utilization=0.3)
    assert not memory.takes_turns
    moments = memory.devices()["policy and engine"]
    assert [moment.name for moment in moments] == ["refit", "log-probs", "training"]
    refit, training = moments[0].parts, moments[-1].parts
    # 0.3 of 80 GB, two contexts, 4 + 8 bytes a parameter, and buckets
    assert sum(refit.values()) == 24 * GB + 2 * GB + 12 * 1_543_714_304 + 2 * GB
    assert training["gradients"] == 4 * 1_543_714_304
    least = (sum(training.values()) - 24 * GB) / 0.7  # the engine has 0.3 of it
    assert [replace(memory, capacity=int(least * factor)).takes_turns for factor in (0.99, 1.01)] == [True, False]
    assert replace(memory, offload="always").takes_turns
    assert not replace(colocated(MEDIUM), offload="never").takes_turns


def test_adapters_alone_count_as_trained_in_the_decision() -> None:
    memory = colocated(MEDIUM, tokens=2048, utilization=0.4)
    assert memory.takes_turns
    assert not replace(memory, policy=replace(memory.policy, adapter_dim=16)).takes_turns


@pytest.mark.usefixtures("downloaded")
def test_a_reward_model_in_the_trainers_process_makes_policy_and_engine_take_turns() -> None:
    model = "++scorers.rm={type: reward_model, model_name: Qwen/Qwen2.5-1.5B, in_actor: IN_ACTOR}"
    scorer = (model, "++env.math.scorers=[rm]")
    for in_actor, takes_turns in (("true", False), ("false", True)):
        overrides = [text.replace("IN_ACTOR", in_actor) for text in scorer]
        assert run_memory("examples/configs/grpo_math_1B.yaml", 180, *overrides).takes_turns == takes_turns


def test_gathered_weights_count_in_the_decision_on_one_rank() -> None:
    memory = colocated(SMALL, tokens=2048, utilization=0.53)
    assert not memory.takes_turns
    assert replace(memory, policy=replace(memory.policy, is_kept_whole=True)).takes_turns


@pytest.mark.parametrize(
    ("memory", "cure"),
    [
        (colocated(SMALL, tokens=32768), "++policy.sequence_packing.train_mb_tokens=8192"),
        (colocated(SMALL, utilization=0.95), "++policy.generation.vllm_cfg.gpu_memory_utilization=0.85"),
        (colocated(MEDIUM, tokens=512), "++policy.dtensor_cfg.cpu_offload=true"),
    ],
    ids=["micro-batch", "engine's share", "offload"],
)
def test_the_nearest_cure_makes_everything_fit(memory: RunMemory, cure: str) -> None:
    assert memory.problems()
    assert find_cure(memory) == cure


def test_several_changes_together_where_none_is_enough_alone() -> None:
    memory = colocated(LARGE, ranks=8)
    assert any("the engine needs" in problem for problem in memory.problems())
    assert "vllm_cfg.tensor_parallel_size=" in find_cure(memory)
    assert len(find_cure(memory).split()) > 1


def test_a_shared_device_keeps_the_policy_on_the_host_while_the_engine_samples() -> None:
    memory = colocated(SMALL)
    assert memory.host().parts["offloaded policy"] == 12 * 1_543_714_304
    assert replace(memory, shares_device=False).host().parts["offloaded policy"] == 0


@pytest.mark.parametrize("gigabytes", [80, 141])
@pytest.mark.parametrize("recipe", CUDA_RECIPES)
def test_every_recipe_for_gpus_fits(recipe: str, gigabytes: int) -> None:
    assert run_memory(recipe, gigabytes).problems() == []


SIZED = [recipe for recipe in CUDA_RECIPES if "Expected peak:" in (ROOT / recipe).read_text()]


@pytest.mark.parametrize("recipe", SIZED)
def test_a_recipe_states_the_peak_that_the_plan_expects_on_its_gpus(recipe: str) -> None:
    stated = re.search(r"# Expected peak: ([\d.]+) of (\d+) GB \((.+)\)\.\n", (ROOT / recipe).read_text())
    assert stated is not None
    config, _ = recipe_and_layout(recipe)
    memory = run_memory(recipe, int(stated[2]))
    assert config.cluster.gpu_memory_gb == int(stated[2])
    assert memory.problems() == []
    largest = max((m for moments in memory.devices().values() for m in moments), key=lambda moment: moment.total)
    assert (f"{largest.total / GB:.1f}", largest.name) == (stated[1], stated[3])


def test_recipes_are_sized_for_the_usual_wishes() -> None:
    names = {Path(recipe).stem for recipe in SIZED}
    assert names >= {"grpo_math_7B", "grpo_math_32B", "grpo_math_7B_lora", "grpo_math_7B_lora_24gb",
                     "grpo_math_7B_async", "grpo_math_7B_16k", "distillation_math_8B",
                     "grpo_math_30B_A3B", "grpo_math_30B_A3B_lora"}  # fmt: skip
    assert "examples/agents/grpo_math_7B.yaml" in SIZED


def test_the_main_recipe_on_24_gb_names_the_overrides_that_make_it_fit(caplog: pytest.LogCaptureFixture) -> None:
    recipe = "examples/configs/grpo_math_1B.yaml"
    plan = memory_plan(*recipe_and_layout(recipe, "++cluster.gpu_memory_gb=24"))
    plan.log_problems()
    assert caplog.messages[0].startswith("expected peaks of each GPU of 24 GB (cluster.gpu_memory_gb): does not fit: ")
    cure = plan.problems[-1].removeprefix("nearest cure: ").split()
    assert cure == ["++policy.dtensor_cfg.activation_checkpointing=true", "++policy.dtensor_cfg.cpu_offload=true"]
    assert run_memory(recipe, 24, *cure).problems() == []


def test_a_plan_without_problems_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    memory_plan(*recipe_and_layout("examples/configs/grpo_math_1B.yaml", "++cluster.gpu_memory_gb=80")).log_problems()
    assert caplog.messages == []


def test_the_share_of_an_engine_that_a_small_card_cannot_hold_is_named() -> None:
    overrides = ("policy.model_name=Qwen/Qwen2.5-7B", "++cluster.gpu_memory_gb=24")
    plan = memory_plan(*recipe_and_layout("examples/configs/grpo_math_1B.yaml", *overrides))
    # 15.2 GB of weights, keys and values of 512 tokens, and a context
    needed = "the engine needs 16.3 GB for weights and one sequence, and has 0.6 of 24 GB"
    assert f"does not fit: {needed}" in plan.problems


def test_the_plan_of_the_main_recipe() -> None:
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", ("++cluster.gpu_memory_gb=80",))
    lines = str(memory_plan(config, make_layout(config, "cuda"))).splitlines()
    assert lines[0] == "# memory: expected peaks of each GPU of 80 GB (cluster.gpu_memory_gb)"
    assert lines[2].startswith("#   policy and engine, generation: 50.0 GB (engine weights 3.1, KV cache")
    assert [line.partition(":")[0] for line in lines[1:6]] == [
        f"#   policy and engine, {name}" for name in ("start", "generation", "refit", "log-probs", "training")
    ]
    assert lines[-1] == "#   everything fits"


def test_a_machine_without_a_gpu_plans_for_80_gb_and_says_so() -> None:
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", ())
    text = str(memory_plan(config, make_layout(config, "cuda")))
    assert "GPU of 80 GB (assumed: this machine has no GPU, and cluster.gpu_memory_gb is not set)" in text


@pytest.mark.parametrize(
    ("overrides", "num_processes", "num_engine_processes"),
    [
        (("++policy.generation.vllm_cfg.in_process=true",), 1, 0),
        (("++policy.generation.vllm_cfg.in_process=false",), 1, 1),
        (("++grpo.val_overlap=true",), 1, 1),  # which samples while the policy trains
        (("policy.generation.backend=hf",), 1, 0),
        (("policy.generation.num_replicas=2",), 2, 2),  # of a cluster, where the policy's rank has a process too
    ],
)
def test_the_host_counts_the_processes_that_there_are(
    overrides: tuple[str, ...], num_processes: int, num_engine_processes: int
) -> None:
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", ("policy.device=cpu", *overrides))
    layout = make_layout(config, "cpu")
    plan = str(memory_plan(config, layout))
    # of an engine: 3.1 GB of weights in bfloat16, a cache of half a GiB, and 2 GB where it has a process of its own
    engines = len(layout.engines) * (2 * 1_543_714_304 + 2**29) + num_engine_processes * 2 * GB
    assert f"(processes {4 * num_processes:.1f}, " in plan
    assert f", engines {engines / GB:.1f})" in plan


def test_an_engine_in_the_driver_has_no_process_on_the_host() -> None:
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", ("policy.generation.backend=hf",))
    beside = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", ())
    found = [make_run_memory(c, make_layout(c, "cuda"), 80 * GB).host().parts["processes"] for c in (config, beside)]
    assert found == [8 * GB, 12 * GB]


def test_dry_run_of_the_command_line_ends_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("policy.device=cpu",)
    assert cli.run(["grpo", "--config", "grpo_math_1B", "--dry-run", *overrides]) == ExitCode.DONE
    configuration, _, placement = capsys.readouterr().out.partition("\n# placement\n")
    assert configuration.startswith("grpo:\n")
    _, _, memory = placement.partition("\n# memory: ")
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", overrides)
    assert f"# memory: {memory}" == f"{memory_plan(config, make_layout(config, 'cpu'))}\n"
    assert memory.startswith("expected peak of the host")
    assert "training: " in memory


def planned_text(*overrides: str) -> str:
    return GRPO_JOB.plan(load_config(ROOT / "examples/configs/grpo_math_1B.yaml", overrides))


@pytest.fixture
def login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(resolved_run, "has_gpu", lambda: False)
    monkeypatch.setattr(devices, "cuda_problem", lambda: "this machine has no CUDA device")


@pytest.mark.usefixtures("login_node")
def test_a_dry_run_on_a_login_node_believes_the_gpus_of_the_recipe() -> None:
    text = planned_text("cluster.gpus_per_node=8", "++cluster.gpu_memory_gb=48")
    here, _, there = text.partition("\n\n# placement\n")
    assert "FSDP2, 1 rank on cpu" in here
    assert "FSDP2, 8 ranks on cuda: node 0 GPUs 0 1 2 3 4 5 6 7" in there
    assert "# memory: expected peaks of each GPU of 48 GB (cluster.gpu_memory_gb)" in there


@pytest.mark.usefixtures("login_node")
@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("cluster.gpus_per_node=4", "++policy.dtensor_cfg.tensor_parallel_size=3"),
         "policy.dtensor_cfg.tensor_parallel_size"),
        (("cluster.gpus_per_node=4", "policy.generation.vllm_cfg.tensor_parallel_size=8"),
         "policy.generation.vllm_cfg.tensor_parallel_size"),
        (("cluster.gpus_per_node=3",), "policy.train_global_batch_size"),
    ],
)  # fmt: skip
def test_a_layout_that_no_such_machine_accepts_is_refused_on_a_login_node(overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned_text(*overrides)
    assert refused.value.key == key
    assert "on cpu" in planned_text(*overrides, "policy.device=cpu")


@pytest.mark.usefixtures("login_node")
def test_an_engine_for_gpus_alone_is_planned_on_a_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "vllm_devices", lambda: ("cuda",))
    assert planned_text("cluster.gpus_per_node=2").count("# placement") == 1
    assert "2 ranks on cuda" in planned_text("cluster.gpus_per_node=2", "policy.device=cuda")


@pytest.mark.usefixtures("login_node")
def test_a_recipe_that_names_no_gpus_is_planned_for_this_machine_alone() -> None:
    text = GRPO_JOB.plan(load_config(ROOT / "examples/configs/quickstart.yaml", ()))
    assert "on cuda" not in text


def test_what_does_not_fit_is_named_with_its_cure() -> None:
    overrides = ("++cluster.gpu_memory_gb=80", "policy.sequence_packing.train_mb_tokens=32768")
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", overrides)
    lines = str(memory_plan(config, make_layout(config, "cuda"))).splitlines()
    assert lines[-2].startswith("#   does not fit: training needs ")
    keys = ("train_mb_tokens", "logprob_mb_tokens")
    cure = " ".join(f"++policy.sequence_packing.{key}=8192" for key in keys)
    assert lines[-1] == f"#   nearest cure: {cure}"


def test_a_model_that_is_not_here_is_named() -> None:
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", ("policy.model_name=our/model",))
    problem = "config.json of our/model is not on this machine; get it with: hf download our/model config.json"
    assert str(memory_plan(config, make_layout(config, "cuda"))) == f"# memory: unknown: {problem}"


def test_the_engine_of_an_evaluation_that_is_too_large() -> None:
    overrides = ("policy.model_name=Qwen/Qwen2.5-32B", "policy.precision=bfloat16", "++cluster.gpu_memory_gb=80",
                 "++policy.max_total_sequence_length=40960")  # fmt: skip
    config = load_eval_config(ROOT / "examples/configs/eval.yaml", overrides)
    lines = str(sampling_memory_plan(*config.models)).splitlines()
    # 65.5 GB of weights, 2 x 64 x 1,024 x 2 bytes for each of 40,960 tokens, and a context
    assert lines[-2:] == [
        "#   does not fit: the engine needs 77.3 GB for weights and one sequence, and has 0.9 of 80 GB",
        "#   nearest cure: ++server.tensor_parallel_size=2",
    ]


def test_evaluation_on_a_cpu_is_planned_for_the_host() -> None:
    overrides = ("policy.model_name=Qwen/Qwen2.5-1.5B", "policy.precision=bfloat16")
    config = load_eval_config(ROOT / "examples/configs/eval.yaml", overrides)
    plan = str(sampling_memory_plan(*config.models, device="cpu"))
    assert plan.startswith("# memory: expected peak of the host\n")
    assert "weights 3.1" in plan  # 1.54e9 parameters of 2 bytes
    assert "GPU" not in plan


def test_the_plan_of_a_reward_model() -> None:
    overrides = ("policy.model_name=Qwen/Qwen2.5-1.5B",)
    config = load_reward_model_config(ROOT / "examples/configs/rm_quickstart.yaml", overrides)
    assert "weights 6.2, gradients 6.2, optimizer 12.3" in str(reward_model_memory_plan(config))
