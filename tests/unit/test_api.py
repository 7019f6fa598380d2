"""The Python interface: rewards of three forms, keywords as keys, rows as files, Ctrl-C beside an event loop."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.api import Trainer, _adapt, _make_reward, _run, load_config
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.errors import ConfigError

MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
ROWS = [{"prompt": "2 + 2?", "answer": "4"}]


def is_right(completion: str, answer: str) -> float:
    return float(completion == answer)


def test_importing_the_package_loads_nothing_and_changes_nothing() -> None:
    code = (
        "import os, sys; before = dict(os.environ), list(sys.meta_path); import nemo_rl\n"
        "assert before == (dict(os.environ), list(sys.meta_path))\n"
        "assert not {'torch', 'ray', 'pydantic', 'transformers'} & sys.modules.keys()\n"
        "assert [name for name in sys.modules if name.startswith('nemo_rl.')] == []\n"
        "assert 'train' in dir(nemo_rl) and callable(nemo_rl.train)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_reward_gets_the_answer_and_the_fields_that_it_names() -> None:
    assert _adapt(is_right)(MESSAGES, {"answer": "4", "prompt": "2 + 2?"}) == 1.0
    assert _adapt(lambda completion, **row: row["level"])(MESSAGES, {"level": 3}) == 3


def test_a_reward_in_trls_form_gets_lists_of_one_item() -> None:
    seen = []

    def reward(prompts: list[str], completions: list[str], answer: list[str], **row: Any) -> list[float]:
        seen.append((prompts, completions, answer, row))
        return [0.5]

    assert _adapt(reward)(MESSAGES, {"prompt": "2 + 2?", "answer": "4", "level": 1}) == 0.5
    assert seen == [(["2 + 2?"], ["4"], ["4"], {"prompt": ["2 + 2?"], "level": [1]})]


def test_a_reward_in_the_projects_own_form_is_taken_as_it_is() -> None:
    def reward(messages: list[Any], metadata: dict[str, Any]) -> float:
        return 1.0

    assert _adapt(reward) is reward


def test_another_signature_is_refused_with_the_three_forms() -> None:
    with pytest.raises(ConfigError, match=r"rewards = '<lambda>': its parameters must be \(completion, \*\*row\)"):
        _adapt(lambda text: 1.0)


def test_several_rewards_stay_apart_by_name() -> None:
    def brief(completion: str) -> float:
        return 0.25

    assert _make_reward([is_right, brief])(MESSAGES, {"answer": "4"}) == {"is_right": 1.0, "brief": 0.25}


def test_async_rewards_are_awaited() -> None:
    async def slow(completion: str) -> float:
        await asyncio.sleep(0)
        return 2.0

    assert asyncio.run(_make_reward([slow, is_right])(MESSAGES, {"answer": "4"})) == {"slow": 2.0, "is_right": 1.0}


def make_trainer(tmp_path: Path, **arguments: Any) -> Trainer:
    return Trainer("nemo_rl/quickstart", is_right, ROWS, output_dir=str(tmp_path), **arguments)


def test_keywords_are_keys_of_the_algorithm_or_trls_names(tmp_path: Path) -> None:
    config = make_trainer(
        tmp_path, max_num_steps=7, learning_rate=0.25, num_generations=4, beta=0.1, overrides={"policy.device": "cpu"}
    ).config
    assert (config.grpo.max_num_steps, config.grpo.num_generations_per_prompt) == (7, 4)
    assert config.policy.optimizer.kwargs["lr"] == 0.25
    assert (config.loss_fn.reference_policy_kl_penalty, config.policy.device) == (0.1, "cpu")
    assert config.logger.log_dir == str(tmp_path)


def test_overrides_in_hydras_grammar_come_last(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, max_num_steps=7, overrides=["grpo.max_num_steps=9"]).config.grpo.max_num_steps == 9


def test_a_mistyped_keyword_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_step = 7: no keyword of grpo.*did you mean '?max_num_steps'?\?"):
        make_trainer(tmp_path, max_num_step=7)


def test_an_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"algorithm = 'grop'.*did you mean 'grpo'\?"):
        Trainer(algorithm="grop")


def test_rows_become_a_file_beside_the_runs_and_their_prompts_messages(tmp_path: Path) -> None:
    data = make_trainer(tmp_path).config.data
    assert (data.train.dataset_name, data.validation) == ("jsonl", None)
    (row,) = map(json.loads, Path(data.train.data_path).read_text().splitlines())
    assert row == {**ROWS[0], "messages": MESSAGES[:1]}


def test_sizes_of_a_step_fit_each_other_for_any_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    trainer = Trainer(str(tmp_path / "model"), is_right, ROWS, output_dir=str(tmp_path), num_prompts_per_step=3)
    assert trainer.config.grpo.num_samples_per_step == trainer.config.policy.train_global_batch_size == 24


def test_the_reward_is_known_only_while_the_trainer_uses_it(tmp_path: Path) -> None:
    make_trainer(tmp_path)
    assert "reward" not in ENVIRONMENTS.registered


def test_a_configuration_loads_as_the_command_reads_it() -> None:
    assert load_config("quickstart", ["grpo.max_num_steps=3"]).grpo.max_num_steps == 3
    with pytest.raises(ConfigError, match=r"command = 'traln': reads no recipe"):
        load_config("quickstart", command="traln")


def run_in_loop(work: Any, stop: Any = None) -> Any:
    async def main() -> Any:
        return _run(work, stop)

    loop = asyncio.new_event_loop()  # as in a notebook: Ctrl-C raises KeyboardInterrupt
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def interrupt_after(seconds: float) -> None:
    import _thread

    def interrupt() -> None:
        time.sleep(seconds)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()


def test_work_beside_a_running_loop_returns_and_raises_as_usual() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> int:
        raise ConfigError("a.b", 1, "wrong")

    assert run_in_loop(answer) == 42
    with pytest.raises(ConfigError, match=r"a\.b"):
        run_in_loop(fail)


def test_the_first_ctrl_c_beside_a_running_loop_asks_the_work_to_stop() -> None:
    asked: list[asyncio.Event] = []

    async def work() -> str:
        asked.append(asyncio.Event())
        interrupt_after(0.3)
        await asyncio.wait_for(asked[0].wait(), timeout=30)
        return "stopped"

    assert run_in_loop(work, lambda: asked[0].set()) == "stopped"


def test_ctrl_c_cancels_work_that_cannot_stop() -> None:
    async def work() -> None:
        interrupt_after(0.3)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        run_in_loop(work)
