"""What training on a large file of NeMo Gym's rows costs in memory, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "x"}], "tools": []},
    "agent_ref": {"type": "responses_api_agents", "name": "agent"},
    "expected_answer": "y" * 700,
}
LOAD = """
import json, resource, sys, time
from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.datasets import load_datasets
from nemo_rl.data.loader import PromptLoader

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before, began = megabytes(), time.perf_counter()
section = DatasetConfig(dataset_name="nemo_gym", data_path=sys.argv[1])
held_out = DatasetConfig(**{**section.model_dump(), "size": 10})
train, _ = load_datasets(DataConfig(train=section, validation=held_out), run_seed=0)
loader = PromptLoader(train.prompts, shuffle=True, seed=0, max_epochs=2)
loaded_s = time.perf_counter() - began
for _ in range(20):
    loader.take(64)
rows = sum(1 for _ in train.prompts)
print(json.dumps({"growth": megabytes() - before, "rows": rows, "loaded_s": loaded_s, "agents": [*train.agent_names]}))
"""


def growth_over(path: Path, num_bytes: int) -> dict:
    """Peak memory that loading, 20 steps and a pass over all prompts add, in megabytes."""
    num_rows = 0
    with path.open("w") as rows:
        while rows.tell() < num_bytes:
            rows.writelines(json.dumps(ROW | {"id": num_rows + i}) + "\n" for i in range(1000))
            num_rows += 1000
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert (figures["rows"], figures["agents"]) == (num_rows - 10, ["agent"])
    return figures


def test_rows_of_a_file_are_not_held_in_memory(tmp_path: Path) -> None:
    assert growth_over(tmp_path / "rows.jsonl", 20_000_000)["growth"] < 15


@pytest.mark.slow
def test_a_file_of_300_megabytes_takes_less_than_50(tmp_path: Path) -> None:
    figures = growth_over(tmp_path / "rows.jsonl", 300_000_000)
    assert figures["growth"] < 50, figures
