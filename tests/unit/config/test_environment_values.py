"""Values that a recipe reads from the environment: used, and shown nowhere."""

import io
import json
import logging
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl import errors
from nemo_rl.config.loading import load_config, resolved_yaml, shown_values
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.launch.training import open_records
from nemo_rl.observability.console import configure_logging
from nemo_rl.observability.lost_records import LostRecords
from tests.unit.config.conftest import SMALLEST, Load

SECRET = "hf_0123'secret\\456"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(errors, "_interpolations", {})
    monkeypatch.setenv("THE_SECRET", SECRET)
    monkeypatch.setenv("THE_NUMBER", "7654321")
    return SECRET


RECIPE = """
grpo: {seed: "${oc.decode:${oc.env:THE_NUMBER}}"}
policy:
  tokenizer: {name: "${policy.model_name}"}
  model_name: name-${oc.env:THE_SECRET}
  hf_config_overrides: {a: ["${oc.env:THE_SECRET}", "${grpo.seed}"], b: "${logger.wandb.tags}"}
logger: {log_dir: LOGS, tensorboard_enabled: true, wandb: {tags: ["${oc.env:THE_SECRET}"]}}
"""


def test_run_directory_and_loggers_get_the_unresolved_form(load: Load, tmp_path: Path) -> None:
    config = load(RECIPE.replace("LOGS", str(tmp_path / "runs")))
    assert config.policy.model_name == config.policy.tokenizer.name == f"name-{SECRET}"
    assert config.grpo.seed == 7654321
    assert config.policy.hf_config_overrides == {"a": [SECRET, 7654321], "b": [SECRET]}
    with ExitStack() as stack:
        run_dir, _ = open_records(config, stack, LostRecords())
    shown = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    shown += [json.dumps(shown_values(config)).encode()]
    assert any(b"oc.env:THE_SECRET" in one for one in shown)
    for one in shown:
        assert not any(part in one for part in (b"hf_0123", b"secret", b"7654321")), one
    assert load_config(run_dir / "config.yaml") == config
    values = shown_values(config)
    assert values["policy"]["model_name"] == values["policy"]["tokenizer"]["name"] == "name-${oc.env:THE_SECRET}"
    assert values["grpo"]["seed"] == "${oc.decode:${oc.env:THE_NUMBER}}"


def test_a_stored_configuration_resolves_again_from_the_environment(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "stored.yaml"
    stored.write_text(resolved_yaml(load(RECIPE)))
    monkeypatch.setenv("THE_SECRET", "another")
    assert load_config(stored).policy.model_name == "name-another"
    monkeypatch.delenv("THE_SECRET")
    with pytest.raises(ConfigError, match="'THE_SECRET' not found"):
        load_config(stored)


@pytest.mark.parametrize(
    "text",
    [
        "grpo: {seed: '${oc.env:THE_SECRET}'}",
        "grpo: {max_num_steps: '${grpo.seed}', seed: '${oc.env:THE_SECRET}'}",
        "policy: {optimizer: {kwargs: '${oc.env:THE_SECRET}'}}",
        "loss_fn: {type: '${oc.env:THE_SECRET}'}",
        "data: {train: {data_path: 'x/${oc.env:THE_SECRET}', dataset_name: jsonl}}",
        "cluster: {env_vars: {A_TOKEN: '${oc.env:THE_SECRET}'}}",
        "sft: {a: {b: '${oc.env:THE_SECRET}'}}",
        "grpo: {val_period: {a: '${oc.env:THE_SECRET}'}, seed: -1}",
    ],
)
def test_an_error_names_the_interpolation_in_place_of_the_value(load: Load, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(text)
    assert "hf_0123" not in str(error.value)
    assert "'secret" not in str(error.value)
    assert "${oc.env:THE_SECRET}" in str(error.value) or "env_vars" in str(error.value)


def test_later_errors_and_log_lines_show_the_interpolation(recipe: Path) -> None:
    recipe.write_text(SMALLEST + "logger: {log_dir: '${oc.env:THE_SECRET}'}")
    load_config(recipe)
    assert str(ConfigError("a", {"b": SECRET}, f"{SECRET} is missing")).count("${oc.env:THE_SECRET}") == 2
    assert "hf_0123" not in str(DataError(f"{SECRET}:3: damaged"))
    file = io.StringIO()
    configure_logging(console=Console(file=file))
    logging.getLogger("nemo_rl.test").warning("cannot reach %s", SECRET)
    assert "cannot reach ${oc.env:THE_SECRET}" in file.getvalue()


def test_a_default_and_a_path_that_exists_stay_readable_in_texts(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_SECRET", "/usr/bin")
    config = load("logger: {log_dir: '${oc.env:NOT_SET_HERE,some_runs}', wandb: {name: '${oc.env:THE_SECRET}'}}")
    assert str(DataError("/usr/bin/a:3 and some_runs")) == "/usr/bin/a:3 and some_runs"
    assert "log_dir: ${oc.env:NOT_SET_HERE,some_runs}" in resolved_yaml(config)
