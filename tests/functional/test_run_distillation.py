"""Distillation through the command line: real vLLM, both models of the quickstart, a few steps."""

from collections import Counter
from pathlib import Path

import pytest

from tests.functional.cli import ROOT, Run, run_command_line
from tests.support.metric_names import find_undocumented

pytestmark = pytest.mark.timeout(600)  # the first one also makes the models

SCRIPT = ROOT / "examples" / "run_distillation.py"
NUM_STEPS, NUM_PROMPTS, NUM_HELD_OUT = 3, 8, 16


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the number of conversations of each environment call, one line per call."""
    return tmp_path_factory.mktemp("calls") / "calls.txt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, calls: Path) -> Run:
    kind = "tests.functional.counting:CountingEnvironment"
    run = run_command_line(
        SCRIPT,
        tmp_path_factory.mktemp("logs"),
        f"++env.counting={{type: '{kind}', kwargs: {{path: '{calls}'}}}}",
        "data.default.env_name=counting",
        f"distillation.max_num_steps={NUM_STEPS}",
        f"distillation.num_prompts_per_step={NUM_PROMPTS}",
        f"distillation.max_val_samples={NUM_HELD_OUT}",
        "distillation.val_greedy=false",
        "distillation.val_teacher=false",
        f"distillation.val_period={NUM_STEPS}",
        "weight_sync.verify=true",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def test_the_student_comes_nearer_to_the_teacher(run: Run) -> None:
    metrics = run.metrics()
    assert [step for step in metrics if "train/loss" in metrics[step]] == [1, 2, 3]
    assert metrics[3]["train/loss"] < metrics[1]["train/loss"]
    assert metrics[1]["train/teacher_topk_mass"] > 0.9
    assert find_undocumented(name for step in metrics.values() for name in step if "/" in name) == []


def test_the_engine_holds_the_weights_of_the_student_at_every_step(run: Run) -> None:
    for step in (1, 2, 3):
        assert run.metrics()[step]["train/max_logprob_error"] <= 1e-4, step


def test_training_scores_each_rollout_alone_and_validation_all_in_one_call(run: Run, calls: Path) -> None:
    sizes = Counter(int(line) for line in calls.read_text().splitlines())
    assert run.returncode == 0
    assert sizes == {1: NUM_STEPS * NUM_PROMPTS, NUM_HELD_OUT: 2}  # validated at the start and the end


BAD_INPUT = [  # a process each
    (("distillation.topk_logits_k=1000",), "distillation.topk_logits_k"),
    (("++teachers.spelling={model_name: nemo_rl/quickstart-teacher}",), "teachers.spelling"),
    (("loss_fn.kl_type=backward",), "loss_fn.kl_type"),
]


@pytest.mark.slow  # test_run_grpo.py has one in CI
@pytest.mark.parametrize(("arguments", "expected"), BAD_INPUT)
def test_bad_input_ends_before_a_model_loads(arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    run = run_command_line(SCRIPT, tmp_path, *arguments)
    assert run.returncode == 2, run.stderr
    assert expected in run.stderr
    assert "Traceback" not in run.stderr
    assert run.directory is None


MEGATRON = (
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    "++teacher.megatron_cfg.enabled=true",
)


@pytest.mark.slow  # several runs; tests/contracts/test_distillation.py has the numbers
def test_ranks_and_backends_of_student_and_teacher_change_no_loss(tmp_path: Path) -> None:
    three_steps = (
        "policy.generation.backend=hf",
        "distillation.max_num_steps=3",
        "distillation.num_prompts_per_step=4",
        "distillation.val_at_start=false",
        "distillation.val_at_end=false",
        "distillation.val_teacher=false",
        "distillation.val_period=0",
        "checkpointing.enabled=false",
    )
    teachers = {(): [], ("teacher.dtensor_cfg.data_parallel_size=2",): ["teacher_0.log", "teacher_1.log"],
                MEGATRON: ["teacher_0.log"]}  # fmt: skip
    losses = []
    for layout, expected_logs in teachers.items():
        run = run_command_line(SCRIPT, tmp_path, *three_steps, *layout)
        assert run.returncode == 0, run.stdout + run.stderr
        losses.append([metrics["train/loss"] for metrics in run.metrics().values() if "train/loss" in metrics])
        assert run.directory is not None
        assert sorted(path.name for path in (run.directory / "logs").glob("teacher_*.log")) == expected_logs
    alone, *others = losses
    assert len(alone) == 3
    for found in others:
        assert found == pytest.approx(alone, abs=1e-4)
