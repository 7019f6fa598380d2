"""Faults planted in a project's files and recipe: doctor names each, and raises no alarm on three sound machines."""

import copy
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nemo_rl.doctor.diagnosis import Finding, diagnose
from nemo_rl.doctor.facts import Facts
from nemo_rl.doctor.recipe_facts import probe_recipe
from tests.unit.doctor.planted import make_project, write_recipe
from tests.unit.doctor.test_diagnosis import CUDA, GPU, SOUND

Recipe = dict[str, Any]
Plant = Callable[[Recipe, Path], None]


class Fault(NamedTuple):
    """A change of the sound project, and what doctor says about it."""

    plant: Plant
    cause: str
    machine: Facts = SOUND


def put(key: str, value: Any) -> Plant:
    """Set a key of the recipe; {here} in a text is the project's directory."""

    def plant(recipe: Recipe, here: Path) -> None:
        *path, last = key.split(".")
        section = recipe
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value.replace("{here}", str(here)) if isinstance(value, str) else value

    return plant


def write(file: str, text: str) -> Plant:
    def plant(recipe: Recipe, here: Path) -> None:
        (here / file).write_text(text)

    return plant


def remove(file: str) -> Plant:
    return lambda recipe, here: (here / file).unlink()


def lengthen_model(recipe: Recipe, here: Path) -> None:
    path = here / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))


def cut_weights(recipe: Recipe, here: Path) -> None:
    data = (here / "model" / "model.safetensors").read_bytes()
    (here / "model" / "model.safetensors").write_bytes(data[: len(data) // 2])


def garble_weights(recipe: Recipe, here: Path) -> None:
    (here / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def log_below_a_file(recipe: Recipe, here: Path) -> None:
    (here / "taken").write_text("")
    recipe["logger"]["log_dir"] = str(here / "taken" / "runs")


def drop_template(recipe: Recipe, here: Path) -> None:
    (here / "model" / "chat_template.jinja").unlink(missing_ok=True)
    path = here / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))


def closed_server(recipe: Recipe, here: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    recipe["scorers"] = {"judge": {"type": "judge", "base_urls": [url], "model": "m", "prompt": "{response}"}}
    recipe["env"]["own"]["scorers"] = ["judge"]


LONG = json.dumps({"input": "Spell " + "a" * 500, "output": "a"}) + "\n"
SHORT = json.dumps({"input": "Spell a.", "output": "a"}) + "\n"
NO_ANSWER = json.dumps({"input": "Spell a.", "output": None}) + "\n"
OFFLINE = replace(SOUND, is_offline=True)

FAULTS: dict[str, Fault] = {
    "a model that is not here, offline": Fault(
        put("policy.model_name", "org/absent"), "policy.model_name = org/absent is not in", OFFLINE
    ),
    "a path without a model": Fault(put("policy.model_name", "{here}/no_model"), "there is no such directory"),
    "weights that are cut off": Fault(cut_weights, "model.safetensors is cut off"),
    "weights that are no safetensors": Fault(garble_weights, "model.safetensors is cut off or damaged"),
    "no weights": Fault(remove("model/model.safetensors"), "has no model.safetensors"),
    "no configuration": Fault(remove("model/config.json"), "has no config.json"),
    "no tokenizer": Fault(remove("model/tokenizer_config.json"), "has no tokenizer_config.json"),
    "no chat template": Fault(drop_template, "its tokenizer has none"),
    "a log_dir that cannot be written": Fault(log_below_a_file, "logger.log_dir"),
    "a checkpoint_dir that is a file": Fault(
        put("checkpointing.checkpoint_dir", "{here}/train.jsonl"), "checkpointing.checkpoint_dir"
    ),
    "a response longer than the sequence": Fault(
        put("policy.generation.max_new_tokens", 100), "policy.generation.max_new_tokens = 100"
    ),
    "a sequence longer than the model": Fault(
        put("policy.max_total_sequence_length", 10**6), "policy.max_total_sequence_length = 1000000"
    ),
    "prompts that are all too long": Fault(write("train.jsonl", LONG), "all training prompts are longer"),
    "some prompts that are too long": Fault(write("train.jsonl", LONG + SHORT), "1 of 2 sampled training prompts"),
    "the quickstart's limits for a model of long answers": Fault(
        lengthen_model, "64 tokens together, of the 4096 that the model takes: policy.generation.max_new_tokens = 8"
    ),
    "CUDA without a GPU": Fault(put("policy.device", "cuda"), "policy.device = cuda, and this machine has no"),
    "a reward that raises on every row": Fault(
        put("env.own.type", "planted_rewards:broken"), "all 12 calls fail, the first with RuntimeError: no such column"
    ),
    "a reward that reads a column that is not there": Fault(
        put("env.own.type", "planted_rewards:lost"), "env.own: all 12 calls fail, the first with KeyError: 'solution'"
    ),
    "an environment that returns nothing": Fault(
        put("env.own.type", "planted_rewards:Stuck"), "a step gave NoneType, not EnvStep"
    ),
    "a reward that cannot be imported": Fault(put("env.own.type", "planted_rewards:absent"), "planted_rewards:absent"),
    "a judge that does not answer": Fault(closed_server, "does not accept a connection"),
    "a data file that is missing": Fault(remove("train.jsonl"), "train.jsonl"),
    "a row that is no JSON": Fault(write("train.jsonl", SHORT + "{"), "line 2: no valid JSON"),
    "a row without an answer": Fault(write("train.jsonl", NO_ANSWER), "'output' is None"),
    "a stop token that the model has not": Fault(
        put("policy.generation.stop_token_ids", [5000]), "policy.generation.stop_token_ids = [5000]"
    ),
    "a misspelt key": Fault(put("grpo.num_prompt_per_step", 4), "did you mean grpo.num_prompts_per_step?"),
    "rows of an environment that is not there": Fault(put("data.default.env_name", "onw"), "did you mean own?"),
    "W&B without wandb": Fault(
        put("logger.wandb_enabled", True), "wandb is not installed", replace(SOUND, has_wandb=False)
    ),
    "more GPUs than there are": Fault(
        put("cluster.gpus_per_node", 8), "cluster.gpus_per_node = 8, and this machine has 2 GPUs", CUDA
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe]:
    directory = tmp_path_factory.mktemp("project")
    return directory, make_project(directory)


@pytest.fixture
def project(sound: tuple[Path, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Recipe]:
    directory, recipe = sound
    for file in directory.rglob("*"):
        if file.is_file():
            copied = tmp_path / file.relative_to(directory)
            copied.parent.mkdir(exist_ok=True)
            copied.write_bytes(file.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "planted_rewards", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    moved = json.loads(json.dumps(recipe).replace(str(directory), str(tmp_path)))
    return tmp_path, copy.deepcopy(moved)


def examine(directory: Path, recipe: Recipe, machine: Facts) -> list[Finding]:
    return diagnose(replace(machine, recipe=probe_recipe(write_recipe(directory, recipe), ())))


def test_more_than_24_faults_are_planted() -> None:
    assert len(FAULTS) >= 24


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_named(name: str, project: tuple[Path, Recipe]) -> None:
    directory, recipe = project
    fault = FAULTS[name]
    fault.plant(recipe, directory)
    findings = examine(directory, recipe, fault.machine)
    assert any(fault.cause in finding.cause for finding in findings), findings
    assert len(findings) == 1, findings


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        pytest.param(replace(SOUND, has_vllm_cpu=False), [("policy.generation.backend", "hf")], id="laptop"),
        pytest.param(replace(CUDA, gpus=(GPU,)), [], id="GPU"),
        pytest.param(
            replace(SOUND, has_slurm=True), [("policy.device", "cuda"), ("cluster.gpus_per_node", 8)], id="Slurm node"
        ),
    ],
)
def test_sound_project_on_a_sound_machine_raises_no_alarm(
    machine: Facts, changes: list[tuple[str, Any]], project: tuple[Path, Recipe]
) -> None:
    directory, recipe = project
    for key, value in changes:
        put(key, value)(recipe, directory)
    assert examine(directory, recipe, machine) == []
