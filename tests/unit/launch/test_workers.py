import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from nemo_rl.config.collect import CollectRunConfig
from nemo_rl.config.layout import Layout
from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.loading import load_collect_config, load_eval_config
from nemo_rl.errors import ConfigError, GenerationError, WorkerError
from nemo_rl.launch import workers
from nemo_rl.launch.memory_plan import GB, make_run_memory
from nemo_rl.launch.placement_plan import collection_placement_plan
from nemo_rl.launch.workers import _half_of_cores, _open_generation, _started, _takes_turns
from nemo_rl.policy.driver import PolicyThread
from tests.unit.launch.conftest import Recipe, plan_of
from tests.unit.launch.cuda_recipes import CUDA_RECIPES, downloaded, recipe_and_layout  # noqa: F401


@pytest.mark.parametrize(("usual", "asked", "expected"), [(8, None, 4), (1, None, 1), (6, "6", 6)])
def test_models_of_this_process_compute_on_half_of_the_cores(
    usual: int, asked: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    torch.set_num_threads(usual)
    try:
        with _half_of_cores():
            thread = PolicyThread()
        assert thread.run_blocking(torch.get_num_threads) == expected
        assert torch.get_num_threads() == usual
        thread.close()
    finally:
        torch.set_num_threads(before)


def test_the_plan_has_a_line_a_part(recipe: Recipe) -> None:
    assert plan_of(recipe("policy.model_name=m")).splitlines() == [
        "# placement",
        "#   policy: m, FSDP2, 1 rank on cpu, float32",
        "#   reference policy: none (no KL penalty)",
        "#   generation: hf on cpu, started by the driver, float32",
        "#   environments: letters",
        "#   weight sync: in process",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("loss_fn.reference_policy_kl_penalty=0.1", "#   reference policy: a frozen copy beside the policy"),
        ("policy.generation={backend: vllm, in_actor: true}", "#   generation: vllm on cpu, in a Ray actor, float32"),
        (
            "policy.generation={backend: vllm, vllm_cfg: {precision: bfloat16}}",
            "#   generation: vllm on cpu, started by the driver, bfloat16",
        ),
        ("++env.asker={type: agent, command: [cat]}", "#   environments: letters"),
        (
            "policy={model_name: m, dtensor_cfg: {lora_cfg: {enabled: true, dim: 4}}}",
            "#   policy: m, FSDP2, 1 rank on cpu, float32, LoRA of dim 4",
        ),
        ("++env.asker={type: agent, command: [cat]}", "#   agents: asker; gateway on 127.0.0.1"),
    ],
)
def test_the_plan_follows_the_configuration(recipe: Recipe, override: str, line: str) -> None:
    assert line in plan_of(recipe(override)).splitlines()


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ("policy.dtensor_cfg={data_parallel_size: 2, tensor_parallel_size: 2}", "cluster.num_nodes=2"),
            [
                "#   cluster: Ray, of RAY_ADDRESS or local, 2 nodes",
                "#   policy: m, FSDP2, 4 ranks (2 data x 2 tensor parallel) on cpu: node 0; node 1, float32",
                "#   generation: vllm, 1 engine on cpu: node 0, float32",
            ],
        ),
        (
            ("policy.dtensor_cfg={data_parallel_size: 6, expert_parallel_size: 3}",),
            ["#   policy: m, FSDP2, 6 ranks, experts over 3 ranks, in 2 copies on cpu: node 0, float32"],
        ),
        (
            ("policy.megatron_cfg={enabled: true, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 3}",),
            ["#   policy: m, Megatron, 6 ranks (1 data x 3 pipeline x 2 tensor parallel) on cpu: node 0, float32"],
        ),
        (
            (
                "policy.model_name=Qwen/Qwen3-30B-A3B",
                "policy.megatron_cfg={enabled: true, data_parallel_size: 2, tensor_model_parallel_size: 4, "
                "expert_model_parallel_size: 2, expert_tensor_parallel_size: 2}",
            ),
            [
                "#   policy: Qwen/Qwen3-30B-A3B, Megatron, 8 ranks (2 data x 1 pipeline x 4 tensor parallel), "
                "experts over 4 ranks, in 2 copies on cpu: node 0, float32"
            ],
        ),
        (
            ("policy.device=cuda", "cluster={gpus_per_node: 2, address: auto}"),
            [
                "#   cluster: Ray at auto, 1 node with 2 GPUs each",
                "#   policy: m, FSDP2, 2 ranks on cuda: node 0 GPUs 0 1, float32",
                "#   generation: vllm, 2 engines on cuda: node 0 GPUs 0 1, shared with the policy, float32",
            ],
        ),
        (
            (
                "policy.device=cuda",
                "cluster.gpus_per_node=3",
                "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
            ),
            [
                "#   policy: m, FSDP2, 2 ranks on cuda: node 0 GPUs 0 1, float32",
                "#   generation: vllm, 1 engine on cuda: node 0 GPU 2, float32",
            ],
        ),
    ],
    ids=["two CPU nodes", "experts", "megatron", "megatron experts", "colocated", "split"],
)
def test_the_plan_of_a_cluster_names_nodes_and_gpus(
    recipe: Recipe, overrides: tuple[str, ...], lines: list[str]
) -> None:
    plan = plan_of(recipe("policy.model_name=m", "policy.generation.backend=vllm", *overrides)).splitlines()
    assert set(lines) <= set(plan)


def test_reference_under_adapters_is_the_policy_itself(recipe: Recipe) -> None:
    adapters = "policy.dtensor_cfg={lora_cfg: {enabled: true}}"
    lines = plan_of(recipe("loss_fn.reference_policy_kl_penalty=0.1", adapters)).splitlines()
    assert "#   reference policy: the policy without its adapters" in lines


QUICKSTART = Path(__file__).parents[3] / "examples" / "configs" / "collect.yaml"
EVALUATION = Path(__file__).parents[3] / "examples" / "configs" / "eval.yaml"


def collection(*overrides: str) -> CollectRunConfig:
    return load_collect_config(QUICKSTART, ("++policy.device=cpu", *overrides))


def test_the_plan_of_a_collection_has_its_model_and_engine() -> None:
    assert collection_placement_plan(collection()).splitlines() == [
        "# placement",
        "#   model: nemo_rl/quickstart",
        "#   generation: vllm on cpu, started by the driver, float32",
        "#   environments: reasoning_gym",
    ]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("server.tensor_parallel_size=2", "server.data_parallel_size=4"),
            "#   generation: vllm on cpu, started by the driver, 2 tensor parallel, 4 data parallel, float32",
        ),
        (("server.backend=hf",), "#   generation: hf on cpu, started by the driver, float32"),
        (
            ("server.address=[http://a:1,http://b:1]", "server.api=chat"),
            "#   generation: the one model served at http://a:1, http://b:1, api: chat",
        ),
        (("server.address=http://a:1", "server.model=m"), "#   generation: m served at http://a:1, api: auto"),
        (("++env.asker={type: agent, command: [cat]}",), "#   agents: asker; gateway on 127.0.0.1"),
    ],
)
def test_the_plan_of_a_collection_follows_its_configuration(overrides: tuple[str, ...], line: str) -> None:
    assert line in collection_placement_plan(collection(*overrides)).splitlines()


def test_the_plan_of_a_comparison_names_both_models_in_turn() -> None:
    config = load_eval_config(EVALUATION, ("eval.baseline=nemo_rl/quickstart-1",))
    plan = collection_placement_plan(*config.models).splitlines()
    assert plan[1] == "#   models: nemo_rl/quickstart-1, then nemo_rl/quickstart"


class Measured:
    """A policy whose device has this memory."""

    def __init__(self, gigabytes: int) -> None:
        self.capacity, self.num_measured = gigabytes * GB, 0

    async def device_bytes(self) -> int:
        self.num_measured += 1
        return self.capacity


def turns_and_measurements(config: Any, layout: Layout, gigabytes: int) -> tuple[bool, int]:
    policy: Any = Measured(gigabytes)
    return asyncio.run(_takes_turns(config, layout, policy)), policy.num_measured


VLLM, RECIPE = "policy.generation={backend: vllm}", "examples/configs/grpo_math_1B.yaml"


@pytest.mark.usefixtures("downloaded")
@pytest.mark.parametrize(
    ("overrides", "gigabytes", "expected"),
    [
        ((), 180, (False, 1)),  # 176 GB with both awake
        ((), 141, (True, 1)),
        (("++policy.offload=always",), 180, (True, 0)),
        (("++policy.offload=never",), 24, (False, 0)),
        (("policy.generation.vllm_cfg={enable_sleep_mode: false}",), 24, (False, 0)),
        (("policy.generation.backend=hf",), 24, (False, 0)),  # never sleeps
        (("policy.model_name=our/model",), 180, (True, 1)),  # of unknown size
    ],
)
def test_policy_and_engine_take_turns_unless_the_plan_holds_both(
    overrides: tuple[str, ...], gigabytes: int, expected: tuple[bool, int]
) -> None:
    assert turns_and_measurements(*recipe_and_layout(RECIPE, *overrides), gigabytes) == expected


@pytest.mark.usefixtures("downloaded")
def test_teachers_on_the_policys_device_need_turns() -> None:
    found = recipe_and_layout("examples/configs/distillation_math.yaml")
    assert turns_and_measurements(*found, 1000) == (True, 1)


@pytest.mark.usefixtures("downloaded")
@pytest.mark.parametrize("recipe", CUDA_RECIPES)
def test_the_decision_of_a_run_agrees_with_the_plan_on_every_device(recipe: str) -> None:
    cells = 0
    for devices in (1, 2, 4, 8):
        try:
            config, layout = recipe_and_layout(recipe, f"++cluster.gpus_per_node={devices}", "++cluster.num_nodes=1")
        except ConfigError:  # fewer devices than ranks that share layers, or experts
            continue
        for gigabytes in (24, 48, 80, 141, 180):
            memory = make_run_memory(config, layout, gigabytes * GB)
            if not memory.shares_device or memory.engine is None:
                continue
            awake = replace(memory, offload="never").devices()["policy and engine"]
            assert all("engine weights" in moment.parts for moment in awake)
            fits = memory.offload == "auto" and all(moment.total <= memory.capacity for moment in awake)
            assert turns_and_measurements(config, layout, gigabytes)[0] == (not fits), (devices, gigabytes)
            cells += 1
    assert cells >= 5 or "sft" in recipe or "async" in recipe


def test_vllm_has_its_own_process_where_validation_runs_beside_training(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def return_section(section: Any, *args: object, **options: object) -> Any:
        return section

    monkeypatch.setattr(workers, "make_generation", return_section)
    config = recipe(VLLM, "++grpo.val_overlap=true")
    policy: Any = SimpleNamespace(path="model", config=LlamaConfig())
    section: Any = asyncio.run(_open_generation(config, policy, make_layout(config, "cpu"), (), None))
    assert section.vllm_cfg.in_process is False


class StartedEngine:
    """An engine that notes when it starts and that it was closed."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def start(self, *, fails: bool = False) -> Any:
        self.events.append("started")
        await asyncio.sleep(0)
        if fails:
            raise GenerationError("no room")
        self.events.append("ready")
        return self

    async def close(self) -> None:
        self.events.append("closed")


@pytest.mark.parametrize(("at_once", "expected"), [(True, ["started", "ready", "policy"]), (False, ["policy"])])
def test_engines_on_devices_of_their_own_start_beside_the_policy(at_once: bool, expected: list[str]) -> None:
    engine = StartedEngine()

    async def main() -> None:
        async with _started(engine.start, at_once=at_once) as starting:
            for _ in range(3):
                await asyncio.sleep(0)
            engine.events.append("policy")
            assert engine.events == expected
            assert await starting() is engine

    asyncio.run(main())
    assert engine.events == [*expected, *(() if at_once else ("started", "ready"))]


@pytest.mark.parametrize("turns", [0, 3])
def test_engines_end_where_the_policy_does_not_start(turns: int) -> None:
    engine = StartedEngine()

    async def main() -> None:
        async with _started(engine.start, at_once=True):
            for _ in range(turns):
                await asyncio.sleep(0)
            raise WorkerError("no rank")

    with pytest.raises(WorkerError, match="no rank"):
        asyncio.run(main())
    assert engine.events == (["started", "ready", "closed"] if turns else [])


def test_engines_that_do_not_start_beside_the_policy_end_the_start() -> None:
    async def main() -> None:
        async with _started(partial(StartedEngine().start, fails=True), at_once=True) as starting:
            await starting()

    with pytest.raises(GenerationError, match="no room"):
        asyncio.run(main())
