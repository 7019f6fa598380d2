"""nemo_rl.train, Trainer and evaluate on real parts: README's lines, a run that goes on, and an evaluation of it."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import nemo_rl

ROOT = Path(__file__).parents[2]
SMALL = {
    "policy.generation.backend": "hf",
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "logger.progress": False,
}


def test_the_lines_of_the_readme_train(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(import nemo_rl\n.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    code = code.replace("max_num_steps=50", "max_num_steps=2")
    (tmp_path / "lines.py").write_text(code)
    (tmp_path / "main.py").write_text("if __name__ == '__main__':\n    import lines\n")
    command = [sys.executable, "main.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    reward, model_path = done.stdout.split()[-2:]
    assert 0 <= float(reward) <= 1
    assert (Path(tmp_path) / model_path / "config.json").is_file()


def test_a_trainer_goes_on_where_it_stopped_also_beside_a_running_loop_and_its_model_is_evaluated(
    tmp_path: Path, fresh: Path
) -> None:
    def brief(completion: str, limit: int) -> float:
        return float(len(completion) < limit)

    rows = [{"prompt": f"Describe {n}.", "limit": 4} for n in range(16)]
    trainer = nemo_rl.Trainer(
        str(fresh), brief, rows, recipe="quickstart", max_num_steps=2, output_dir=str(tmp_path), overrides=SMALL
    )
    first = trainer.train()
    assert (first.step, first.interrupted, [row["step"] for row in first.metrics]) == (2, False, [1, 2])
    assert "train/reward" in first.metrics[-1]

    async def go_on() -> nemo_rl.TrainingResult:
        return trainer.train(max_num_steps=3)

    second = asyncio.run(go_on())
    assert (second.step, [row["step"] for row in second.metrics]) == (3, [3])
    assert second.model_path is not None
    assert (second.model_path / "model.safetensors").is_file()
    evaluated = nemo_rl.evaluate(
        str(second.checkpoint),
        brief,
        rows[:4],
        num_tests_per_prompt=2,
        max_length=64,
        overrides={"server.backend": "hf", "eval.output_dir": str(tmp_path / "evaluations")},
    )
    assert (evaluated.num_rollouts, evaluated.num_failed) == (8, 0)
    assert 0 <= evaluated.scores["reward"] <= 1
