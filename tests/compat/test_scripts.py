"""NeMo-RL's names of scripts: each runs its recipe, or says what to run; without --config the quickstart is named."""

import runpy
import sys
from pathlib import Path

import pytest

from nemo_rl.command_line import ExitCode

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("run_grpo_math.py", "model_name: Qwen/Qwen2.5-1.5B"),
        ("run_grpo_rm.py", "Skywork/Skywork-Reward-V2-Qwen3-0.6B"),
        ("run_grpo_sliding_puzzle.py", "type: sliding_puzzle"),
        ("run_distillation_math.py", "topk_logits_k: 64"),
        ("run_vlm_grpo.py", "dataset_name: counted_squares"),
    ],
)
def test_a_script_of_nemo_rls_name_has_its_recipe_by_default(
    name: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, monkeypatch, "--dry-run", "policy.device=cpu", "policy.generation.backend=hf") == ExitCode.DONE
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("run_ppo.py", "run_grpo.py --config reinforce_plus_plus"),
        ("run_vlm_sft.py", "only text"),
        ("run_xtoken_off_policy_distillation.py", "run_distillation.py --config distillation_cross_tokenizer"),
        ("run_grpo_single_controller.py", "run_grpo.py --config async"),
    ],
)
def test_a_script_that_does_not_exist_here_says_what_to_run(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, monkeypatch, "--config", "examples/configs/theirs.yaml") == ExitCode.BAD_INPUT
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "default"), [("run_grpo.py", "grpo_math_1B"), ("run_sft.py", "sft"), ("run_eval.py", "evals/eval")]
)
def test_without_a_recipe_the_quickstart_is_named_and_nemo_rls_default(
    name: str, default: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(name, monkeypatch, "--dry-run", "policy.device=cpu")
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "--config" in one]
    assert line.startswith("without --config the recipe ")
    assert line.endswith(f"NeMo-RL's default is --config {default}")
    run(name, monkeypatch, "--dry-run", "policy.device=cpu", "--config", "sft_quickstart")
    assert "NeMo-RL's default" not in capsys.readouterr().err
