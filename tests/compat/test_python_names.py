"""NeMo-RL's Python names: its users' environments run unchanged; a missing name says what replaces it."""

import asyncio
import importlib
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.cluster import connect
from nemo_rl.environments.metrics import calculate_pass_rate_per_prompt
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.utils import chunk_list_to_workers
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, Message

CLASSES = "tests.compat.environments"


def run_turns(
    cls: str, cfg: dict[str, Any] | None, turns: list[list[str]], states: list[dict[str, Any]]
) -> list[list[EnvStep]]:
    """Return the results of each turn, with one response a conversation; states go from each turn to the next."""
    kwargs = {} if cfg is None else {"cfg": cfg}
    section = ENVIRONMENTS.read({"type": f"{CLASSES}.{cls}", "kwargs": kwargs}, "user", key="env.user")

    async def run() -> list[list[EnvStep]]:
        environment, results, current = make_environment("user", section), [], states
        for responses in turns:
            conversations = [[Message("user", "?"), Message("assistant", response)] for response in responses]
            results.append(list(await environment.step(conversations, current)))
            assert all(isinstance(step, EnvStep) for step in results[-1]), results[-1]
            current = [dict(step.state) for step in results[-1]]
        await environment.close()
        return results

    return asyncio.run(run())  # pyright: ignore[reportReturnType]


def test_a_math_environment_with_ray_workers_runs_in_an_actor() -> None:
    connect(num_cpus=2)  # the session's local Ray: one without its token would leave none to later tests
    states = [{"ground_truth": "7"}, {"ground_truth": "8"}, {"ground_truth": "9"}]
    ((right, wrong, also),) = run_turns("MathEnvironment", {"num_workers": 2}, [["3+4=7", "=7", "= 9"]], states)
    assert right == EnvStep(
        (Message("user", "Environment: correct"),),
        {"user": 1.0},
        done=True,
        state={"ground_truth": "7"},
        answer="3+4=7",
    )
    assert [wrong.rewards, also.rewards] == [{"user": 0.0}, {"user": 1.0}]


def test_a_code_environment_keeps_its_variables_through_the_turns() -> None:
    first, second = run_turns(
        "CodeEnvironment",
        {"terminate_on_evaluation": False},
        [["<code>x = 6; print(x)</code>"], ["<code>print(7 * x)</code>"]],
        [{"context": {}}],
    )
    assert first[0].observation == (Message("user", "<result>6</result>"),)
    assert first[0].stop_strings == ("</code>",)
    assert second[0].observation == (Message("user", "<result>42</result>"),)
    assert not second[0].done


def test_a_puzzle_keeps_its_state_through_an_invalid_move() -> None:
    turns = [["up", "up"], ["sideways", "down"], ["up", "up"]]
    states = [{"value": 0, "goal": 2, "num_moves": 0}, {"value": 0, "goal": 1, "num_moves": 0}]
    one, two, three = run_turns("PuzzleEnvironment", None, turns[:1] + turns[1:], [states[0], {**states[1], "goal": 5}])
    assert one[0].state == {"value": 1, "goal": 2, "num_moves": 1}
    assert two[0].observation == (Message("user", "Invalid move. Say up or down."),)
    assert two[0].state == one[0].state
    assert (three[0].done, three[0].rewards, three[0].state) == (True, {"user": 1.0}, {})
    assert three[1].state == {"value": 1, "goal": 5, "num_moves": 3}


def test_rewards_by_name_are_kept_apart() -> None:
    states = [{"ground_truth": "7"}, {"ground_truth": "8"}]
    ((number, text),) = run_turns("MultiRewardEnvironment", None, [["7", "it is 8"]], states)
    assert number.rewards == {"correctness": 1.0, "integer": 1.0}
    assert text.rewards == {"correctness": 1.0, "integer": 0.0}
    assert number.observation == ()


def test_a_batch_is_columns_of_rows() -> None:
    batch = BatchedDataDict({"reward": torch.tensor([1.0, 2.0, 3.0]), "text": ["a", "b", "c"]})
    assert batch.size == 3
    chosen = batch.select_indices([2, 0])
    assert (chosen["reward"].tolist(), chosen["text"]) == ([3.0, 1.0], ["c", "a"])
    assert batch.slice(1, 3)["text"] == ["b", "c"]
    assert batch.chunk(2, 3)["reward"].tolist() == [3.0]
    assert batch.repeat_interleave(2)["text"] == ["a", "a", "b", "b", "c", "c"]
    ids = BatchedDataDict.from_batches(
        [{"ids": torch.tensor([[1, 2]]), "idx": [0]}, {"ids": torch.tensor([[3]]), "idx": [1]}], {"ids": 9}
    )
    assert (ids["ids"].tolist(), ids["idx"]) == ([[1, 2], [3, 9]], [0, 1])
    assert BatchedDataDict().size == 0


def test_lists_are_spread_over_workers_in_order() -> None:
    assert chunk_list_to_workers([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert chunk_list_to_workers([1], 3) == [[1], [], []]
    assert chunk_list_to_workers([], 2) == [[], []]


def test_the_pass_rate_counts_prompts() -> None:
    prompts = torch.tensor([[1, 2], [1, 2], [3, 4]])
    assert calculate_pass_rate_per_prompt(prompts, torch.tensor([0.0, 1.0, 0.0])) == 0.5


def test_prompts_of_a_task_are_read_from_files(tmp_path: Any) -> None:
    (tmp_path / "prompt.txt").write_text("Solve {}")
    task = TaskDataSpec("math", prompt_file=tmp_path / "prompt.txt")
    other = TaskDataSpec("other")
    other.copy_defaults(task)
    assert (task.prompt, task.system_prompt, other.prompt) == ("Solve {}", None, "Solve {}")
    with pytest.raises(FileNotFoundError):
        TaskDataSpec(system_prompt_file=tmp_path / "missing.txt")


def refusal(statement: str, directory: Path) -> str:
    """Return the error of a class, named by its dotted path, whose module has this statement."""
    name = f"users_{uuid4().hex}"
    (directory / f"{name}.py").write_text(f"{statement}\n\nclass Environment: ...\n")
    with pytest.raises(ConfigError) as error:
        ENVIRONMENTS.entry(f"{name}.Environment", key="env.user.type")
    assert error.value.problem.startswith(f"module '{name}' cannot be imported: ")
    return error.value.problem


@pytest.fixture
def user_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import nemo_rl.utils.checkpoint", r"nemo_rl\.config\.loading"),
        ("from nemo_rl.utils.nsys import wrap_with_nvtx_name", r"nemo_rl\.config\.loading"),
        ("import nemo_rl.models.generation.vllm", r"nemo_rl\.generation"),
        ("from nemo_rl.models.policy import PolicyConfig", r"nemo_rl\.policy"),
        ("import nemo_rl.environments.code_environment", "type: tools"),
        ("import nemo_rl.evals.eval", "run_eval.py"),
        ("import nemo_rl.algorithms.sft", "script in examples"),
        ("import nemo_rl.algorithms.dpo", "script in examples"),
        ("import nemo_rl.algorithms.loss.interfaces", r"nemo_rl\.losses"),
        ("from nemo_rl.algorithms.distillation import distillation_train", "script in examples"),
    ],
)
def test_a_missing_module_or_name_of_nemo_rl_says_what_replaces_it(
    statement: str, said: str, user_directory: Path
) -> None:
    assert re.search(
        rf"\(a (module|name) of NeMo-RL; here: .*{said}.*docs/from_nemo_rl\.md\)$", refusal(statement, user_directory)
    )


def test_a_class_of_nemo_rl_that_is_named_in_a_recipe_says_what_replaces_it() -> None:
    with pytest.raises(ConfigError, match=r"a module of NeMo-RL; here: env\.<name>\.type: tools"):
        ENVIRONMENTS.entry("nemo_rl.environments.code_environment.CodeEnvironment", key="env.user.type")


def test_other_missing_modules_and_names_are_pythons_own_error(user_directory: Path) -> None:
    assert refusal("import nemo_rl.nothing", user_directory).endswith("No module named 'nemo_rl.nothing'")
    assert re.search(
        r"'nothing' from 'nemo_rl\.algorithms\.grpo' \(\S+\)$",
        refusal("from nemo_rl.algorithms.grpo import nothing", user_directory),
    )


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("nemo_rl.distributed.virtual_cluster", "RayVirtualCluster", "section `cluster`"),
        ("nemo_rl.environments.utils", "SlicedDataDict", "BatchedDataDict"),
    ],
)
def test_a_name_that_does_not_exist_says_what_replaces_it(module: str, name: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = importlib.import_module(module).nothing


def test_the_three_schedulers_have_their_names() -> None:
    rollouts = importlib.import_module("nemo_rl.experience.rollouts")
    for name in (
        "run_multi_turn_rollout",
        "run_async_multi_turn_rollout",
        "run_multi_turn_rollout_async_generation",
    ):
        assert asyncio.iscoroutinefunction(getattr(rollouts, name))
