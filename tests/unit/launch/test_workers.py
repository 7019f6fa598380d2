import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.collect import CollectRunConfig
from nemo_rl.config.layout import make_layout
from nemo_rl.config.loading import load_collect_config, load_eval_config
from nemo_rl.errors import GenerationError, WorkerError
from nemo_rl.launch import workers
from nemo_rl.launch.workers import _open_generation, _started, _takes_turns, collection_placement_plan, placement_plan
from nemo_rl.policy.offload import DeviceRoom, MeasureRoom
from tests.unit.launch.conftest import Recipe


def test_the_plan_has_a_line_a_part(recipe: Recipe) -> None:
    assert placement_plan(recipe("policy.model_name=m")).splitlines() == [
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
    assert line in placement_plan(recipe(override)).splitlines()


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
            ("policy.megatron_cfg={enabled: true, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 3}",),
            ["#   policy: m, Megatron, 6 ranks (1 data x 3 pipeline x 2 tensor parallel) on cpu: node 0, float32"],
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
    ids=["two CPU nodes", "megatron", "colocated", "split"],
)
def test_the_plan_of_a_cluster_names_nodes_and_gpus(
    recipe: Recipe, overrides: tuple[str, ...], lines: list[str]
) -> None:
    plan = placement_plan(recipe("policy.model_name=m", "policy.generation.backend=vllm", *overrides)).splitlines()
    assert set(lines) <= set(plan)


def test_reference_under_adapters_is_the_policy_itself(recipe: Recipe) -> None:
    adapters = "policy.dtensor_cfg={lora_cfg: {enabled: true}}"
    lines = placement_plan(recipe("loss_fn.reference_policy_kl_penalty=0.1", adapters)).splitlines()
    assert "#   reference policy: the policy without its adapters" in lines


QUICKSTART = Path(__file__).parents[3] / "nemo_rl" / "recipes" / "collect.yaml"
EVALUATION = Path(__file__).parents[3] / "nemo_rl" / "recipes" / "eval.yaml"


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
    """A policy whose device has some room."""

    def __init__(self, room: DeviceRoom) -> None:
        self.room, self.num_measured = room, 0

    async def run_with_weights(self, use: object) -> DeviceRoom:
        assert isinstance(use, MeasureRoom)
        self.num_measured += 1
        return self.room


ROOMY, FULL = DeviceRoom(10**9, 60 * 10**9, 141 * 10**9), DeviceRoom(10**9, 20 * 10**9, 141 * 10**9)
VLLM = "policy.generation={backend: vllm}"


@pytest.mark.parametrize(
    ("overrides", "room", "has_teachers", "expected"),
    [
        ((VLLM,), ROOMY, False, (False, 1)),
        ((VLLM,), FULL, False, (True, 1)),
        ((VLLM,), ROOMY, True, (True, 0)),
        ((VLLM, "++policy.offload=always"), ROOMY, False, (True, 0)),
        ((VLLM, "++policy.offload=never"), FULL, False, (False, 0)),
        (("policy.generation={backend: hf}",), FULL, False, (False, 0)),  # never sleeps
    ],
)
def test_policy_and_engine_take_turns_unless_both_fit(
    recipe: Recipe, overrides: tuple[str, ...], room: DeviceRoom, has_teachers: bool, expected: tuple[bool, int]
) -> None:
    config, policy = recipe(*overrides), Measured(room)
    layout = make_layout(config, "cuda")
    turns = asyncio.run(_takes_turns(config, layout, policy, has_teachers=has_teachers))  # type: ignore[arg-type]
    assert (turns, policy.num_measured) == expected


def test_vllm_has_its_own_process_where_validation_runs_beside_training(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def return_section(section: Any, *args: object, **options: object) -> Any:
        return section

    monkeypatch.setattr(workers, "make_generation", return_section)
    config = recipe(VLLM, "++grpo.val_overlap=true")
    section: Any = asyncio.run(_open_generation(config, "model", make_layout(config, "cpu"), ()))
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
