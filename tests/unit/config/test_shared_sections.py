"""The time that a process may take to start grows with its model's files, unless the section names one."""

from pathlib import Path

import pytest

from nemo_rl.config.loading import load_config
from nemo_rl.config.shared_sections import ClusterConfig, start_limit_s, weight_bytes
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe


def sparse(path: Path, size: int) -> None:
    """Create a file of that size that takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def test_a_start_has_a_second_more_for_each_100_mb_of_weights(tmp_path: Path) -> None:
    for part in range(4):
        sparse(tmp_path / f"model-{part}.safetensors", 7_500_000_000)
    sparse(tmp_path / "optimizer.pt", 10**9)
    assert weight_bytes(str(tmp_path)) == 30_000_000_000
    assert start_limit_s(str(tmp_path)) == 600.0  # 14B parameters in bfloat16
    assert ClusterConfig().start_limit_s(str(tmp_path)) == 600.0


def test_the_configured_limit_wins(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", 10**12)
    section = ClusterConfig(start_timeout_s=20.0)
    assert (section.start_limit_s(str(tmp_path)), section.placement_limit_s) == (20.0, 20.0)
    assert ClusterConfig().placement_limit_s == 300.0


def test_a_model_of_the_hub_is_measured_in_the_cache_and_else_has_time_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert start_limit_s("lab/model") == 300.0 + 3600.0
    sparse(tmp_path / "models--lab--model" / "blobs" / "abc", 10**9)
    assert start_limit_s("lab/model") == 310.0


def test_a_secret_of_the_environment_is_never_part_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "aws_secret", "DB_PASSWORD"):
        with pytest.raises(ValueError, match=f"the value of {name} is a secret.*allowed: null"):
            ClusterConfig(env_vars={name: "abc"})
    with pytest.raises(ConfigError) as caught:
        load_config(find_recipe("quickstart"), ["++cluster.env_vars.HF_TOKEN=hf_abcdef"])
    assert "hf_abcdef" not in str(caught.value)
    section = ClusterConfig(env_vars={"HF_TOKEN": None, "UNSET_KEY": None, "TOKENIZERS_PARALLELISM": "false"})
    monkeypatch.setenv("HF_TOKEN", "from outside")
    assert section.environment == {"HF_TOKEN": "from outside", "TOKENIZERS_PARALLELISM": "false"}
    assert section.env_vars["HF_TOKEN"] is None
