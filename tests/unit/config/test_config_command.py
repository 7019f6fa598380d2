"""`nemo-rl config`: what it lists, shows and explains is what the schema and the packaged recipes say."""

from pathlib import Path

import pytest
import yaml

from nemo_rl.command_line import run_command
from nemo_rl.config import keys, reference
from nemo_rl.config.config_command import CONFIG, verb_of
from nemo_rl.config.kinds import Section
from nemo_rl.config.loading import load_config
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.recipe_files import COMMANDS
from nemo_rl.errors import ConfigError
from nemo_rl.losses.surrogates import PPOConfig
from nemo_rl.recipes import find_recipe, recipe_names


def config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(CONFIG, arguments) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(CONFIG, arguments) == 2
    return capsys.readouterr().err


def test_every_packaged_recipe_is_listed_with_a_command_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split(maxsplit=2) for line in config(capsys, "list").splitlines()]
    assert [name for name, _, _ in rows] == recipe_names()
    assert {verb for _, verb, _ in rows} <= set(COMMANDS.values())
    assert all(len(sentence) > 5 for _, _, sentence in rows)
    assert ["dapo", "grpo"] in [row[:2] for row in rows]  # its section stands in the recipe below it


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("defaults: recipe.yaml", "has none of the sections"),
        ("grpo: {", "malformed YAML"),
        ("- grpo", "must be a mapping"),
        ("policy: {}", "has none of the sections"),
    ],
)
def test_a_recipe_of_no_command_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        verb_of(tmp_path / "recipe.yaml")


def test_any_of_the_recipes_below_says_the_command(tmp_path: Path) -> None:
    (tmp_path / "fragment.yaml").write_text("policy: {}")
    (tmp_path / "recipe.yaml").write_text("defaults: [fragment.yaml, quickstart]")
    assert verb_of(tmp_path / "recipe.yaml") == "grpo"


def test_show_prints_what_the_command_would_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from the repository
    shown = config(capsys, "show", "gspo", "grpo.seed=7")
    assert yaml.safe_load(shown)["grpo"]["seed"] == 7
    (tmp_path / "shown.yaml").write_text(shown)
    assert load_config(tmp_path / "shown.yaml") == load_config(find_recipe("gspo"), ["grpo.seed=7"])


def test_show_of_a_recipe_that_is_none_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'quickstart'?" in refusal(capsys, "show", "quickstrat")


@pytest.mark.parametrize("command", reference.SCHEMAS)
def test_schema_lists_the_sections_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {line.split()[0] for line in config(capsys, "schema", command).splitlines()}
    assert set(reference.find_schema(command).model_fields) <= keys


def test_explain_says_type_default_meaning_and_owners(capsys: pytest.CaptureFixture[str]) -> None:
    assert config(capsys, "explain", "rm.max_num_steps").splitlines() == [
        "rm.max_num_steps",
        "  optimizer steps",
        "  type: int",
        "  default: 1000",
        "  of: rm",
    ]


def test_explain_names_the_entries_that_have_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    shown = config(capsys, "explain", "loss_fn.kl_type")
    assert "  type: forward | reverse | mixed\n" in shown
    assert "distill (a loss of type distillation)" in shown


def test_explain_finds_keys_below_names_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert config(capsys, "explain", "teachers.algebra.model_name").startswith("teachers.<name>.model_name\n")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("num_prompts_per_step", "grpo.num_prompts_per_step"),  # the last part of a name here
        ("learning_rate", "policy.optimizer.kwargs.lr"),
        ("lr", "policy.optimizer.kwargs.lr"),
        ("beta", "loss_fn.reference_policy_kl_penalty"),
        ("batch_size", "policy.train_global_batch_size"),
        ("kl", "loss_fn.reference_policy_kl_penalty"),
        ("clip", "loss_fn.ratio_clip_min"),
        ("temperature", "policy.generation.temperature"),
        ("epochs", "grpo.max_num_epochs"),
        ("actor_rollout_ref.rollout.n", "grpo.num_generations_per_prompt"),  # verl's, in full
        ("run_name", "logger.run_name"),
        ("group_size", "grpo.num_generations_per_prompt"),
    ],
)
def test_explain_finds_a_key_by_the_word_that_people_have_for_it(
    word: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *found = config(capsys, "explain", word).splitlines()
    assert first == f"{word} is the name of no key here; it may mean"
    assert any(line.startswith(key) for line in found), found
    assert len([line for line in found if not line.startswith(" ")]) <= 12


def test_explain_knows_nemo_rls_other_names_and_what_becomes_of_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  NeMo-RL: policy.generation.val_top_p\n" in config(capsys, "explain", "grpo.val_top_p")
    assert "a name of NeMo-RL for grpo.adv_estimator" in config(capsys, "explain", "grpo.use_leave_one_out_baseline")
    assert "  a key of NeMo-RL, " in config(capsys, "explain", "policy.draft.enabled")


def test_the_reference_agrees_with_the_schema() -> None:
    found = {key.key: key for key in reference.walk_keys(GRPORunConfig)}
    assert (found["grpo.num_prompts_per_step"].type, found["grpo.num_prompts_per_step"].default) == ("int", "32")
    assert found["policy.model_name"].default == "required"
    assert found["policy.device"].type == "auto | cpu | cuda"
    assert found["checkpointing"].is_section
    assert not found["checkpointing.enabled"].is_section


def test_names_of_recipes_are_found_anywhere_and_files_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = find_recipe("quickstart").parent / "dapo.yaml"
    assert find_recipe("dapo") == find_recipe("dapo.yaml") == packaged
    (tmp_path / "dapo.yaml").write_text("")
    assert find_recipe("dapo.yaml") == Path("dapo.yaml")


@pytest.mark.parametrize("path", ["examples/configs/dapo.yaml", "somewhere/dapo", "/dapo.yaml"])
def test_a_path_that_does_not_exist_is_an_error_that_names_the_packaged_recipe(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refusal = r"no such file.*; a packaged recipe is named dapo \(nemo-rl config list\)$"
    with pytest.raises(ConfigError, match=rf"^config = '{path}': {refusal}"):
        find_recipe(path)
    with pytest.raises(ConfigError, match=r"^config = 'somewhere/none.yaml': no such file.*and no packaged recipe"):
        find_recipe("somewhere/none.yaml")
    (tmp_path / "mine.yaml").write_text(f"defaults: {path}\n")
    with pytest.raises(ConfigError, match=rf"^defaults of .*mine.yaml = '{path}': {refusal}"):
        load_config(tmp_path / "mine.yaml")


def test_recipes_of_the_repository_are_those_of_examples() -> None:
    assert find_recipe("dapo") == Path(__file__).parents[3] / "examples" / "configs" / "dapo.yaml"


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml"])
def test_a_recipe_of_ones_own_may_stand_on_a_packaged_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: {name}\ngrpo: {{seed: 9}}\n")
    assert load_config(tmp_path / "mine.yaml") == load_config(find_recipe("quickstart"), ["grpo.seed=9"])


def test_a_file_beside_the_recipe_comes_before_a_packaged_one(tmp_path: Path) -> None:
    (tmp_path / "dapo.yaml").write_text("defaults: quickstart\ngrpo: {seed: 9}\n")
    (tmp_path / "mine.yaml").write_text("defaults: dapo.yaml\n")
    assert load_config(tmp_path / "mine.yaml") == load_config(find_recipe("quickstart"), ["grpo.seed=9"])


def test_the_defaults_of_every_section_are_valid() -> None:
    sections = [GRPORunConfig]
    for section in sections:
        for info in section.model_fields.values():
            value = info.get_default(call_default_factory=True, validated_data={})
            if isinstance(value, Section):
                assert type(value).model_validate(value.model_dump()) == value
            sections += [inner for inner in keys.sections_in(info.annotation) if inner not in sections]
    assert len(sections) > 30


def test_explain_says_what_the_best_known_key_means(capsys: pytest.CaptureFixture[str]) -> None:
    shown = config(capsys, "explain", "grpo.num_prompts_per_step").splitlines()
    assert shown[1:4] == ["  prompts whose rollouts a step trains on", "  type: int", "  default: 32"]


def test_every_key_has_a_meaning() -> None:
    keys = {key for name in reference.SCHEMAS for key in reference.walk_keys(reference.find_schema(name))}
    assert len({key.key for key in keys}) > 500
    assert sorted({key.key for key in keys if not key.meaning}) == []


def test_a_field_without_a_comment_has_the_meaning_of_the_one_that_it_overrides() -> None:
    own = reference.meaning(LossConfig, "type")
    assert own
    assert reference.meaning(PPOConfig, "type") == own


def test_show_finds_the_command_of_a_recipe_on_a_packaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: quickstart\n")
    assert config(capsys, "show", str(tmp_path / "mine.yaml")).startswith("grpo:\n")
