from pathlib import Path

import pytest

from nemo_rl.config.loading import load_reward_model_config
from nemo_rl.errors import ConfigError

SMALLEST = """
policy: {model_name: m}
data: {train: {dataset_name: spell_backward}}
"""


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("rm.max_num_step=3", "rm.max_num_step", "did you mean rm.max_num_steps"),
        ("grpo.max_num_steps=3", "grpo", "unknown key"),
        ("++policy.optimizer.kwargs=3", "policy.optimizer.kwargs", "must be a mapping"),
        ("policy.train_micro_batch_size=48", "policy.train_micro_batch_size", "must divide .* = 64"),
        ("data.train.dataset_name=jsonl", "data.train.data_path", "required"),
        ("data.train={dataset_name: jsonl, data_path: absent.jsonl}", "data.train.data_path", "no such file"),
        ("data.train.dataset_name=spel_backward", "data.train.dataset_name", "spell_backward"),
        ("rm.val_period=0", "rm.val_period", "greater than 0"),
    ],
)
def test_bad_input_is_refused_by_its_key(tmp_path: Path, override: str, key: str, said: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SMALLEST)
    with pytest.raises(ConfigError, match=said) as caught:
        load_reward_model_config(recipe, [override])
    assert caught.value.key == key
