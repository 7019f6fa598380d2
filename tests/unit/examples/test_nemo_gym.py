"""examples/nemo_gym: recipes that load, rows that are rows, a launch script that starts what it should."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.config.loading import load_collect_config, load_config, resolved_yaml
from nemo_rl.data.prompt_sets import load_prompt_sets
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig

FOLDER = Path(__file__).parents[3] / "examples" / "nemo_gym"
COLLECTION = "collect.yaml"
TRAINING = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != COLLECTION)
FILES = ("quickstart", "math", "workplace_assistant", "mix")
SHELLCHECK = shutil.which("shellcheck")


@pytest.fixture
def rows_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NEMO_GYM_DATA with the names of the files that the recipes read."""
    for name in FILES:
        for part in ("train", "validation"):
            (tmp_path / f"{name}_{part}.jsonl").touch()
    monkeypatch.setenv("NEMO_GYM_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def make_rows() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_rows", FOLDER / "make_rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*TRAINING, COLLECTION])
def test_every_recipe_loads_and_its_resolved_form_is_the_same_config(
    name: str, rows_directory: Path, tmp_path: Path
) -> None:
    load = load_collect_config if name == COLLECTION else load_config
    config = load(FOLDER / name)
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load(path) == config
    section = config.env["nemo_gym"]
    assert isinstance(section, NemoGymConfig)
    assert section.config_paths
    assert any("vllm_model_for_training" in config_path for config_path in section.config_paths)
    assert section.python is None


def test_recipes_name_the_agents_of_rows_that_name_none(rows_directory: Path) -> None:
    defaults = {name: load_config(FOLDER / name).data.default.agent_name for name in TRAINING}
    assert defaults == {
        "grpo_math.yaml": "math_with_judge_simple_agent",
        "grpo_mix.yaml": "workplace_assistant_simple_agent",
        "grpo_workplace_assistant.yaml": "workplace_assistant_simple_agent",
        "quickstart.yaml": None,
    }


def test_the_quickstarts_rows_are_two_environments_in_turn_and_fit_its_model(
    make_rows: ModuleType, tmp_path: Path
) -> None:
    assert make_rows.main(["quickstart", "--directory", str(tmp_path)]) == 0
    train, (validation,) = load_prompt_sets(
        DataConfig(
            train=DatasetConfig(dataset_name="nemo_gym", data_path=str(tmp_path / "quickstart_train.jsonl"), size=10),
            validation=DatasetConfig(dataset_name="nemo_gym", data_path=str(tmp_path / "quickstart_validation.jsonl")),
        ),
        run_seed=0,
    )
    agents = [prompt.agent_name for prompt in train.prompts]
    assert agents == ["reasoning_gym_simple_agent", "mcqa_simple_agent"] * 5
    assert validation.agent_names == set(agents)
    spelling, choice = (prompt.env_state["row"] for prompt in train.prompts[:2])
    assert spelling["answer"] == spelling["metadata"]["word"][::-1]
    assert choice["options"][1]["B"] == choice["options"][0]["A"][::-1]
    assert choice["expected_answer"] == "B"


def test_a_blend_spreads_each_file_evenly_and_names_agents(make_rows: ModuleType, tmp_path: Path) -> None:
    named = {"responses_create_params": {"input": "x"}, "agent_ref": {"name": "own"}}
    few, many, out = tmp_path / "few.jsonl", tmp_path / "many.jsonl", tmp_path / "blend" / "rows.jsonl"
    few.write_text("".join(json.dumps({**named, "id": i}) + "\n" for i in range(2)))
    many.write_text("".join(json.dumps({"responses_create_params": {"input": "y"}, "id": i}) + "\n" for i in range(4)))
    command = ["blend", "--output", str(out), "--rows", str(few), "--rows", str(many)]
    assert make_rows.main(command) == 1
    assert make_rows.main([*command, "other"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["agent_ref"]["name"], row["id"]) for row in rows] == [
        ("other", 0),
        ("own", 0),
        ("other", 1),
        ("other", 2),
        ("own", 1),
        ("other", 3),
    ]


def test_tasks_of_reasoning_gym_take_turns_and_unknown_ones_are_named(
    make_rows: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert make_rows.main(["reasoning-gym", "gcd", "chain_sum", "--size", "2", "--output", str(out)]) == 0
    tasks = [json.loads(line)["metadata"]["source_dataset"] for line in out.read_text().splitlines()]
    assert tasks == ["gcd", "chain_sum"] * 2
    assert make_rows.main(["reasoning-gym", "gdc", "--output", str(out)]) == 1
    assert "no task gdc" in capsys.readouterr().err


TOKEN_REPORT = 'echo "$RAY_AUTH_MODE $(stat -c %a "$RAY_AUTH_TOKEN_PATH") $(wc -c <"$RAY_AUTH_TOKEN_PATH")" >>calls'


def launch(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """launch.sbatch with commands of the cluster that only say what they were called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("uv", "srun", "scontrol"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*"\n[ -z "$RAY_AUTH_TOKEN_PATH" ] || {TOKEN_REPORT}\n')
        program.chmod(0o755)
    return subprocess.run(
        ["bash", str(FOLDER / "launch.sbatch"), *arguments],
        env={"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
def test_the_launch_script_starts_one_run_on_one_node(tmp_path: Path) -> None:
    (tmp_path / "examples/nemo_gym").mkdir(parents=True)
    (tmp_path / "examples/nemo_gym/.env").write_text('CONFIG=my.yaml\nOVERRIDES="a=1 b=2"\n')
    done = launch(tmp_path, "c=3", SLURM_GPUS_ON_NODE="1")
    assert done.stdout.splitlines() == [
        "uv sync --no-group cpu --group cuda",
        "srun --overlap --nodes=1 --ntasks=1 uv run --no-sync examples/nemo_gym/run_grpo_nemo_gym.py "
        "--config my.yaml a=1 b=2 c=3 cluster.num_nodes=1 cluster.gpus_per_node=1",
    ]
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
def test_the_launch_script_gives_up_at_its_deadline(tmp_path: Path) -> None:
    done = launch(tmp_path, SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="n[1-2]", RAY_PORT="1", START_TIMEOUT_S="0")
    assert done.returncode == 1
    assert "the Ray head at" in done.stderr
    assert "not there within 0 s" in done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "token 600 64"  # steps inherit the job's token by the name of its file
    assert not list(tmp_path.glob(".ray_token.*"))


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_the_launch_script_is_clean_under_shellcheck() -> None:
    assert SHELLCHECK is not None
    subprocess.run([SHELLCHECK, str(FOLDER / "launch.sbatch")], check=True)
