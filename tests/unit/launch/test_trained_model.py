"""Which checkpoint a path and a step mean, and what is refused."""

import shutil
from pathlib import Path

import pytest
import yaml

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.launch.trained_model import find_trained_model
from tests.trained_runs import write_policies_run, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with the checkpoints 3 (accuracy .5), 6 (.75) and 9 (.625); read it only."""
    return write_run(tmp_path_factory.mktemp("runs") / "exp_001", {3: 0.5, 6: 0.75, 9: 0.625})


def test_a_run_means_its_best_checkpoint(run: Path) -> None:
    trained = find_trained_model(run)
    assert (trained.checkpoint.step, trained.name, trained.run_dir) == (6, "exp_001-step_6", run)
    assert trained.weights == run / "checkpoints/step_6/policy/weights"
    assert trained.policy["model_name"] == "nemo_rl/quickstart"


def test_a_step_a_directory_of_checkpoints_and_a_checkpoint_are_found(run: Path) -> None:
    assert find_trained_model(run, step=9).checkpoint.step == 9
    assert find_trained_model(run / "checkpoints").checkpoint.step == 6
    alone = find_trained_model(run / "checkpoints" / "step_3")
    assert (alone.checkpoint.step, alone.run_dir) == (3, run)


def test_a_checkpoint_that_was_copied_away_has_no_run(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step_3", tmp_path / "kept" / "step_3")
    trained = find_trained_model(tmp_path / "kept" / "step_3")
    assert (trained.run_dir, trained.name) == (None, "kept-step_3")


@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("exp_001", 7, "no such checkpoint .* known: 3, 6, 9"),
        ("exp_001/checkpoints/step_3", 3, "is a checkpoint itself"),
        ("exp_001/rollouts", None, "has no checkpoint"),
        ("nowhere", None, "has no checkpoint"),
    ],
)
def test_what_is_not_there_is_a_config_error(run: Path, name: str, step: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_trained_model(run.parent / name, step=step)


def test_damaged_files_are_refused_and_adapters_alone_have_no_weights(run: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "checkpoints/step_6/policy/weights/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json has 2 bytes"):
        find_trained_model(damaged)
    from nemo_rl.checkpoint import write_manifest

    adapters = shutil.copytree(run / "checkpoints" / "step_3", tmp_path / "step_3")
    shutil.move(adapters / "policy" / "weights", adapters / "policy" / "adapter")
    write_manifest(adapters, 3)
    trained = find_trained_model(adapters)
    assert trained.adapters == {trained.name: trained.adapter}
    with pytest.raises(CheckpointError, match="save_merged=true"):
        _ = trained.weights


def test_one_of_several_policies_is_chosen_by_name(run: Path, tmp_path: Path) -> None:
    several = find_trained_model(write_policies_run(tmp_path / "exp_004", [2]))
    chosen = several.of_policy("second")
    assert chosen.adapter == several.checkpoint.path / "policy/adapters/second"
    assert chosen.own_adapters == {chosen.name: chosen.adapter}
    assert chosen.name == "exp_004-step_2-second"
    assert list(several.own_adapters) == [f"exp_004-step_2-{name}" for name in ("first", "second", "start")]
    single = find_trained_model(run)
    assert single.of_policy(None) is single
    for trained, name, said in (
        (several, None, "several policies: choose one.*known: first, second, start"),
        (several, "secnod", "did you mean 'second'"),
        (single, "first", "has a single policy"),
    ):
        with pytest.raises(ConfigError, match=said):
            trained.of_policy(name)


def test_a_directory_of_checkpoints_may_name_a_variable(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "scratch" / "ck")
    moved = tmp_path / "exp"
    moved.mkdir()
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["checkpointing"]["checkpoint_dir"] = "${oc.env:SCRATCH_OF_TEST}/ck"
    (moved / "config.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setenv("SCRATCH_OF_TEST", str(tmp_path / "scratch"))
    assert find_trained_model(moved).checkpoint.path == tmp_path / "scratch" / "ck" / "step_6"
    values["policy"]["model_name"] = "another/model"
    (moved / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="another model"):
        find_trained_model(moved)


@pytest.mark.parametrize("text", ["[1]", "a: [", "a: !!python/object/apply:os.system ['false']", "checkpointing: 5"])
def test_a_configuration_that_is_none_is_refused(run: Path, tmp_path: Path, text: str) -> None:
    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        find_trained_model(copied)
