import pytest

from nemo_rl import cli
from nemo_rl.commands import ExitCode
from nemo_rl.config.layout import make_layout
from nemo_rl.config.loading import load_config, load_eval_config, load_reward_model_config
from nemo_rl.launch.memory_plan import GB
from nemo_rl.launch.memory_report import make_run_memory, memory_plan, reward_model_memory_plan, sampling_memory_plan
from tests.unit.launch.cuda_recipes import CUDA_RECIPES, ROOT, downloaded, run_memory  # noqa: F401

pytestmark = pytest.mark.usefixtures("downloaded")


@pytest.mark.parametrize("gigabytes", [80, 141])
@pytest.mark.parametrize("recipe", CUDA_RECIPES)
def test_every_recipe_for_gpus_fits(recipe: str, gigabytes: int) -> None:
    assert run_memory(recipe, gigabytes).problems() == []


def test_all_training_recipes_with_a_model_of_the_hub_are_planned() -> None:
    found = (path for root in ("examples", "nemo_rl/recipes") for path in (ROOT / root).rglob("*.yaml"))
    recipes = {str(path.relative_to(ROOT)): path.read_text() for path in found}
    named = {name for name, text in recipes.items() if "model_name: Qwen/" in text and "collect" not in name}
    assert named == CUDA_RECIPES.keys()


def test_the_plan_of_the_main_recipe() -> None:
    config = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", ("++cluster.gpu_memory_gb=80",))
    lines = memory_plan(config, make_layout(config, "cuda")).splitlines()
    assert lines[0] == "# memory: expected peaks of each GPU of 80 GB (cluster.gpu_memory_gb)"
    assert lines[2].startswith("#   policy and engine, generation: 49.0 GB (engine weights 3.1, KV cache")
    assert [line.partition(":")[0] for line in lines[1:6]] == [
        f"#   policy and engine, {name}" for name in ("start", "generation", "refit", "log-probs", "training")
    ]
    assert lines[-1] == "#   everything fits"


def test_a_machine_without_a_gpu_plans_for_80_gb_and_says_so() -> None:
    config = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", ())
    text = memory_plan(config, make_layout(config, "cpu"))
    assert "# memory: expected peak of the host" in text
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
    config = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", ("policy.device=cpu", *overrides))
    layout = make_layout(config, "cpu")
    plan = memory_plan(config, layout)
    # of an engine: 3.1 GB of weights in bfloat16, a cache of half a GiB, and 2 GB where it has a process of its own
    engines = len(layout.engines) * (2 * 1_543_714_304 + 2**29) + num_engine_processes * 2 * GB
    assert f"(processes {4 * num_processes:.1f}, " in plan
    assert f", engines {engines / GB:.1f})" in plan


def test_an_engine_in_the_driver_has_no_process_on_the_host() -> None:
    config = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", ("policy.generation.backend=hf",))
    beside = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", ())
    found = [make_run_memory(c, make_layout(c, "cuda"), 80 * GB).host().parts["processes"] for c in (config, beside)]
    assert found == [8 * GB, 12 * GB]


def test_dry_run_of_the_command_line_ends_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("policy.device=cpu",)
    assert cli.run(["grpo", "--config", "grpo_math_1B", "--dry-run", *overrides]) == ExitCode.DONE
    configuration, _, placement = capsys.readouterr().out.partition("\n# placement\n")
    assert configuration.startswith("grpo:\n")
    _, _, memory = placement.partition("\n# memory: ")
    config = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", overrides)
    assert f"# memory: {memory}" == memory_plan(config, make_layout(config, "cpu")) + "\n"
    assert memory.startswith("expected peak of the host")
    assert "training: " in memory


def test_what_does_not_fit_is_named_with_its_cure() -> None:
    overrides = ("++cluster.gpu_memory_gb=80", "policy.sequence_packing.train_mb_tokens=32768")
    config = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", overrides)
    lines = memory_plan(config, make_layout(config, "cuda")).splitlines()
    assert lines[-2].startswith("#   does not fit: training needs ")
    assert lines[-1] == "#   nearest cure: micro-batches of 8192 tokens"


def test_a_model_that_is_not_here_is_named() -> None:
    config = load_config(ROOT / "nemo_rl/recipes/grpo_math_1B.yaml", ("policy.model_name=our/model",))
    assert memory_plan(config, make_layout(config, "cuda")).splitlines() == [
        "# memory",
        "#   unknown: config.json of our/model is not on this machine; get it with: hf download our/model config.json",
    ]


def test_the_engine_of_an_evaluation_that_is_too_large() -> None:
    overrides = ("policy.model_name=Qwen/Qwen2.5-32B", "policy.precision=bfloat16", "++cluster.gpu_memory_gb=80",
                 "++policy.max_total_sequence_length=40960")  # fmt: skip
    config = load_eval_config(ROOT / "nemo_rl/recipes/eval.yaml", overrides)
    lines = sampling_memory_plan(*config.models).splitlines()
    # 65.5 GB of weights, 2 x 64 x 1,024 x 2 bytes for each of 40,960 tokens, and a context
    assert lines[-1] == (
        "#   does not fit: the engine needs 77.3 GB for weights and one sequence, and has 72.0; nearest cure: "
        "server.tensor_parallel_size: 2"
    )


def test_the_plan_of_a_reward_model() -> None:
    overrides = ("policy.model_name=Qwen/Qwen2.5-1.5B",)
    config = load_reward_model_config(ROOT / "nemo_rl/recipes/rm_quickstart.yaml", overrides)
    assert "weights 6.2, gradients 6.2, optimizer 12.3" in reward_model_memory_plan(config)
