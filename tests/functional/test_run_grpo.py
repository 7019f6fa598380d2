"""The main job through the command line: real vLLM, the quickstart's model, a few steps."""

import json
from pathlib import Path

import pytest

from nemo_rl.cli import run as run_command
from nemo_rl.metric_names import ranking_metrics
from nemo_rl.observability.trace_file import TRACE_FILE
from nemo_rl.trace.bubbles import count_bubbles
from nemo_rl.trace.timeline import Timeline
from tests.functional.cli import Run, run_grpo
from tests.support.metric_names import find_undocumented
from tests.support.quick import quick
from tests.support.trace_sql import ask, open_trace

pytestmark = pytest.mark.timeout(600)  # the first one also makes the quickstart's model

SMALL = (
    "grpo.max_num_steps=3",
    "grpo.num_prompts_per_step=4",
    "++policy.optimizer.kwargs.lr=1e-4",
    "grpo.max_val_samples=16",
    "grpo.val_period=3",
    "weight_sync.verify=true",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = run_grpo(
        tmp_path_factory.mktemp("logs"),
        *SMALL,
        "logger.wandb_enabled=true",
        "logger.tensorboard_enabled=true",
        "logger.trace.enabled=true",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def test_a_run_trains_its_steps_and_validates(run: Run) -> None:
    metrics = run.metrics()
    assert [step for step in metrics if "train/loss" in metrics[step]] == [1, 2, 3]
    assert 0 <= metrics[0]["validation/accuracy"] <= 1
    assert {"validation/accuracy", "validation/greedy_accuracy"} <= metrics[3].keys()


def test_the_engine_holds_the_weights_of_the_policy_at_every_step(run: Run) -> None:
    for step, metrics in run.metrics().items():
        if "train/loss" in metrics:
            assert metrics["train/max_logprob_error"] <= 1e-4, step
            assert metrics["train/token_mult_prob_error"] - 1 <= 1e-5, step


def test_metrics_have_the_names_of_the_field(run: Run) -> None:
    names = run.metrics()[3].keys()
    expected = {
        "train/reward", "train/grad_norm", "train/lr", "train/advantages/mean", "train/probs_ratio",
        "train/approx_entropy", "train/global_valid_seqs", "train/global_valid_toks", "train/avg_turns_per_sample",
        "train/truncation_rate", "timing/train/total_step_time", "timing/train/generation",
        "timing/train/policy_training", "timing/train/weight_sync", "performance/samples_per_sec",
        "performance/tokens_per_sec", "performance/train_flops", "train/avg_trajectory_age",
        "timing/validation/total_validation_time",
    }  # fmt: skip
    assert expected <= names


OWN = "category = ''"  # slices that come from no profile
WITHIN = """from slice child join args a on a.slice_id = child.rowid join args b on b.span_id = a.parent_id
            join slice parent on parent.rowid = b.slice_id"""


def test_ten_questions_to_the_trace(run: Run) -> None:
    """In SQL, over the tables that Perfetto makes of such a file."""
    assert run.directory is not None
    trace, timed = open_trace(run.directory / TRACE_FILE), run.metrics()[3]
    rows = [json.loads(line) for line in (run.directory / "rollouts/train.jsonl").read_text().splitlines()]
    phase = "select sum(dur) from slice join args on slice_id = slice.rowid where name = '{}' and step = 3"
    # 1 to 3: how many steps are there, and how long did the third sample and train?
    assert ask(trace, "select count(*) from slice where name = 'total_step_time'") == 3
    for name in ("generation", "policy_training"):
        assert ask(trace, phase.format(name)) == pytest.approx(timed[f"timing/train/{name}"], abs=0.05)
    # 4, 5: how many tokens were sampled, by how many rollouts at least (validation has some, too)?
    window = """ts >= (select min(ts) from slice where name = 'generation' and args like '%"step": 3%') and ts + dur <=
      (select max(ts + dur) + 0.01 from slice where name = 'generation' and args like '%"step": 3%')"""
    sampled = f"select {{}} from slice where name = 'rollout' and {window}"
    third = [row for row in rows if row["step"] == 3]
    assert ask(trace, sampled.format("count(*)")) == len(third) == timed["train/num_rollouts"]
    tokens = sum(row["num_generated_tokens"] for row in third)
    assert ask(trace, sampled.format("sum(json_extract(args, '$.num_sampled_tokens'))")) == tokens
    # 6: does each request of a rollout lie within it?
    assert ask(trace, f"select count(*) {WITHIN} where parent.name = 'rollout' and child.name = 'generation'") > 0
    outside = "(child.ts < parent.ts - 1e-6 or child.ts + child.dur > parent.ts + parent.dur + 1e-6)"
    assert ask(trace, f"select count(*) {WITHIN} where {outside}") == 0
    # 7: how is a request divided?
    counts = [
        ask(trace, f"select count(*) from slice where name = '{name}'") for name in ("queue", "prefill", "decode")
    ]
    assert len(set(counts)) == 1
    assert counts[0] >= len(rows)
    # 8: how many requests ran at once?
    assert 1 < ask(trace, "select max(value) from counter where name = 'engine/running_requests'") <= 64
    # 9: on how many samples was the policy trained in the third step?
    trained = f"""with own as materialized (select *, ts + dur as till from slice where {OWN})
      select sum(json_extract(part.args, '$.num_samples')) from own part join own phase
      on part.ts >= phase.ts and part.till <= phase.till + 1e-6
      where part.name = 'micro_batch' and phase.name = 'policy_training' and phase.args like '%"step": 3%'"""
    assert ask(trace, trained) == len(third)
    # 10: do slices of a lane nest?
    crossing = f"""with own as materialized (select upid, tid, ts, ts + dur as till from slice where {OWN})
      select count(*) from own a join own b on a.upid = b.upid and a.tid = b.tid
      where a.ts < b.ts and b.ts < a.till - 1e-6 and b.till > a.till + 1e-6"""
    assert ask(trace, crossing) == 0


@pytest.mark.slow  # a run under two profilers
def test_the_profile_of_a_step_stands_in_the_trace(tmp_path: Path) -> None:
    profiled = "grpo.max_num_steps=2", "logger.trace.enabled=true", "logger.profile.steps=[2]"
    run = run_grpo(tmp_path, *SMALL, *profiled)
    assert run.directory is not None, run.stdout + run.stderr
    trace = open_trace(run.directory / TRACE_FILE)
    names = trace.execute("select distinct name from process").fetchall()
    assert any("step_2_policy_rank0" in name for (name,) in names)
    (start, end) = trace.execute(
        "select ts, ts + dur from slice join args on slice_id = slice.rowid where name = 'total_step_time' and step = 2"
    ).fetchone()
    operators = trace.execute("select min(ts), max(ts + dur), count(*) from slice where category = 'profile,cpu_op'")
    first, last, count = operators.fetchone()
    assert count > 100
    assert start - 0.2 <= first <= last <= end + 0.2


def test_the_trace_accounts_for_the_time_of_each_step_and_agrees_with_the_timers(run: Run) -> None:
    assert run.directory is not None
    timeline = Timeline.read(run.directory)
    assert [step.number for step in timeline.steps] == [1, 2, 3]
    steps = timeline.steps[1:]
    assert sum(step.covered_share * step.seconds for step in steps) >= 0.95 * sum(step.seconds for step in steps)
    timed = run.metrics()[3]
    for name in ("generation", "policy_training", "weight_sync"):
        seconds = sum(end - start for start, end in timeline.steps[2].phases[name]) / 1e9
        assert seconds == pytest.approx(timed[f"timing/train/{name}"], abs=0.05)
    waits = [phase for step in timeline.steps for phase in step.phases["generation"]]
    trained = [r for r in timeline.rollouts if any(start <= r.start_ns <= end for start, end in waits)]
    assert len(trained) == 3 * 4 * 8


def test_the_plan_of_what_ran_takes_as_long_as_it_did(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.directory is not None
    sweep = ["--sweep", "grpo.num_prompts_per_step=8", "--sweep", "policy.generation.vllm_cfg.max_num_seqs=4"]
    assert run_command(["plan", str(run.directory), *sweep, "--json"]) == 0
    as_it_ran, other = json.loads(capsys.readouterr().out)
    traced = count_bubbles(Timeline.read(run.directory))
    assert traced is not None
    assert as_it_ran["bubbles"]["step_s"] == pytest.approx(traced.step_s, rel=0.3)
    assert other["keys"] == {"grpo.num_prompts_per_step": 8, "policy.generation.vllm_cfg.max_num_seqs": 4}
    assert other["bubbles"]["step_s"] > as_it_ran["bubbles"]["step_s"]


def test_every_logged_metric_is_documented(run: Run) -> None:
    logged = {name for metrics in run.metrics().values() for name in metrics}
    assert logged
    assert find_undocumented(logged) == []


def test_every_plain_metric_of_a_checkpoint_may_rank_it(run: Run) -> None:
    assert run.directory is not None
    info = json.loads((run.directory / "checkpoints" / "step_3" / "training_info.json").read_text())
    train = {name.removeprefix("train:") for name in info["metrics"] if name.startswith("train:") and "/" not in name}
    assert train
    assert train <= ranking_metrics("train", "grpo")


def test_the_run_directory_holds_configuration_rollouts_and_checkpoint(run: Run) -> None:
    assert run.directory is not None
    assert "num_prompts_per_step: 4" in (run.directory / "config.yaml").read_text()
    rollouts = [json.loads(line) for line in (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert len(rollouts) == 3 * 4 * 8
    assert list(run.directory.glob("wandb/**/*.wandb"))
    assert list(run.directory.glob("**/events.out.tfevents.*"))
    assert (run.directory / "checkpoints" / "step_3" / "training_info.json").exists()


def test_the_summary_shows_the_way_on(run: Run) -> None:
    assert "step_3" in run.stdout
    assert "checkpointing.checkpoint_dir=" in run.stdout


BAD_INPUT = [  # a process each
    (("grpo.num_prompt_per_step=4",), "grpo.num_prompts_per_step"),
    (("++grpo.num_prompt_per_step=4",), "grpo.num_prompts_per_step"),
    (("--config", "absent.yaml"), "absent.yaml"),
    (("policy.train_global_batch_size=7",), "policy.train_global_batch_size"),
    (("data.max_input_seq_length=3",), "data.max_input_seq_length"),
    (("env.reasoning_gym.require_stopp=true",), "require_stop"),
]


@pytest.mark.parametrize(("arguments", "expected"), quick(BAD_INPUT, BAD_INPUT[:1]))
def test_bad_input_ends_before_a_model_loads(arguments: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    run = run_grpo(tmp_path, *arguments)
    assert run.returncode == 2, run.stderr
    assert expected in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow  # tests/unit/test_bad_inputs.py has it in this process
def test_a_broken_line_of_a_data_set_is_named_before_a_model_loads(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"input": "1 + 1", "output": "2"}\n{"input": "1 + 2", "output"\n')
    run = run_grpo(tmp_path, "data.train.dataset_name=jsonl", f"data.train.data_path={data}")
    assert run.returncode == 2, run.stderr
    assert f"{data}:2" in run.stderr
    assert "Traceback" not in run.stderr


def test_malformed_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("grpo:\n  seed: 1\n bad: [\n")
    run = run_grpo(tmp_path, "--config", str(recipe))
    assert run.returncode == 2, run.stderr
    assert "recipe.yaml:" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_dry_run_prints_the_configuration_and_the_placement(tmp_path: Path) -> None:
    run = run_grpo(tmp_path, "--dry-run", "grpo.num_prompts_per_step=4")
    assert run.returncode == 0, run.stderr
    assert "train_global_batch_size: 32" in run.stdout
    assert "# placement" in run.stdout
    assert run.directory is None


def test_conversations_of_several_turns_are_trained_on_as_they_were_sampled(tmp_path: Path) -> None:
    run = run_grpo(
        tmp_path,
        "++env.echo={type: 'tests.unit.environments.custom:EchoEnvironment', kwargs: {num_turns: 3}}",
        "data.default.env_name=echo",
        "grpo.max_rollout_turns=3",
        "grpo.num_prompts_per_step=2",
        "grpo.max_num_steps=1",
        "grpo.val_at_start=false",
        "grpo.max_val_samples=4",
        "policy.max_total_sequence_length=120",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = run.metrics()[1]
    assert metrics["train/avg_turns_per_sample"] == metrics["train/reward"] == metrics["validation/reward"] == 3
    assert metrics["train/mean_env_tokens_per_sample"] > 0
    # 1e-5 is rounding; a token of the past that was made anew, or one under a wrong mask, gives tenths.
    assert metrics["train/max_logprob_error"] <= 1e-3
