"""An exported directory holds the checkpoint's weights, loads without this project, and says where it comes from."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from nemo_rl.cli import run as run_cli
from nemo_rl.errors import ConfigError
from nemo_rl.launch.trained_model import find_trained_model
from nemo_rl.trained import export_command
from nemo_rl.trained.export_command import export
from tests.trained_runs import write_policies_run


def test_weights_are_the_checkpoints_in_the_asked_precision(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = find_trained_model(run)
    exact, small = export(trained, tmp_path / "exact"), export(trained, tmp_path / "small", dtype="bfloat16")
    expected = load_file(trained.weights / "model.safetensors")
    for directory, dtype in ((exact, torch.float32), (small, torch.bfloat16)):
        found = load_file(directory / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in expected.items())
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    tokenizer = AutoTokenizer.from_pretrained(exact)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert isinstance(text, str)
    assert "ab" in text


def test_the_card_tells_origin_evaluation_and_curves(run: Path, tmp_path: Path) -> None:
    directory = export(find_trained_model(run), tmp_path / "speller")
    _, head, text = (directory / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["tags"] == ["reinforcement-learning", "nemo-rl", "grpo"]
    assert "# speller\n\n`nemo_rl/quickstart` after 6 steps of grpo" in text
    assert "| accuracy | 0.75 |" in text
    assert (
        "| 0 |  | 0.25 | 0.25 |\n| 3 | 0.25 | 0.5 | 0.5 |\n| 6 | 0.375 | 0.75 | 0.75 |\n" in text
    )  # nothing of step 9


def test_the_adapter_of_one_policy_is_a_directory_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = write_policies_run(tmp_path / "exp_005", [2])
    assert run_cli(["export", str(run), "--to", str(tmp_path / "second"), "--policy", "second"]) == 0
    found = load_file(tmp_path / "second/adapter_model.safetensors")
    expected = load_file(run / "checkpoints/step_2/policy/adapters/second/adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapter = PeftModel.from_pretrained(base, tmp_path / "second").peft_config["default"]
    assert isinstance(adapter, LoraConfig)
    assert adapter.r == 16
    AutoTokenizer.from_pretrained(tmp_path / "second")
    _, head, text = (tmp_path / "second/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "peft"
    assert "LoRA adapter of the policy `second` on `base` after 2 steps of grpo" in text


PRIVATE = ("/home/me/base", "acme/patients.jsonl", "s3://acme/x", "cd /home/me && ./run", "http://10.1.2.3", "sk-123")


def test_the_recipe_is_published_without_data_environments_and_places(run: Path, tmp_path: Path) -> None:
    trained = find_trained_model(run)
    base, data_path, source, command, address, key = PRIVATE
    generation = {**trained.policy["generation"], "vllm_kwargs": {"download_dir": source, "hf_token": key}}
    config = {
        **trained.config,
        "policy": {**trained.policy, "model_name": base, "generation": generation},
        "data": {"train": {"dataset_name": "jsonl", "data_path": data_path}},
        "env": {"agent": {"command": [command, f"--key={key}"]}},
        "scorers": {"judge": {"address": address}},
        "weights_of_mine": key,
    }
    directory = export(replace(trained, config=config), tmp_path / "m")
    recipe = yaml.safe_load((directory / "training_recipe.yaml").read_text())
    assert recipe["policy"]["model_name"] == "base"
    assert recipe["grpo"] == trained.config["grpo"]
    assert recipe["policy"]["optimizer"] == trained.policy["optimizer"]
    published = "".join(file.read_text() for file in directory.iterdir() if file.suffix in (".md", ".yaml"))
    assert not [text for text in (*PRIVATE, str(run.parent)) if text in published]


def test_an_export_is_complete_or_absent(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trained: Any, name: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_command, "format_card", full)
    with pytest.raises(OSError, match="No space"):
        export(find_trained_model(run), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export(find_trained_model(run), tmp_path / "m")


def test_links_of_a_checkpoint_are_not_followed(run: Path, tmp_path: Path) -> None:
    trained = find_trained_model(run)
    copied = shutil.copytree(trained.checkpoint.path, tmp_path / "step_6")
    (tmp_path / "secret").write_text("secret")
    (copied / "policy" / "weights" / "more.json").symlink_to(tmp_path / "secret")
    moved = replace(trained, checkpoint=replace(trained.checkpoint, path=copied))
    assert not (export(moved, tmp_path / "m") / "more.json").exists()


def test_publishing_needs_a_name_and_a_token_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    words = ["export", str(run), "--to", str(tmp_path / "m")]
    assert run_cli([*words, "--push", "me/speller"]) == 2
    assert "needs a token of the hub" in capsys.readouterr().err
    assert run_cli([*words, "--push", "a/b/c"]) == 2
    assert run_cli([*words, "--public"]) == 2
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("is_public", [False, True])
def test_publishing_uploads_the_exported_directory_to_a_private_repository(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_public: bool
) -> None:
    calls: list[tuple[str, Any]] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> Any:
            calls.append((name, options))
            from huggingface_hub import RepoUrl

            return RepoUrl(f"https://huggingface.co/{name}")

        def repo_info(self, name: str) -> Any:
            assert name == "me/speller"
            return SimpleNamespace(private=not is_public)

        def upload_folder(self, **options: Any) -> None:
            assert (options["folder_path"] / "README.md").is_file()
            calls.append((options["repo_id"], options["folder_path"]))

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    code = run_cli(["export", str(run), "--to", str(tmp_path / "m"), "--push", "me/speller"])
    created, uploaded = ("me/speller", {"private": True, "exist_ok": True}), ("me/speller", tmp_path / "m")
    assert (code, calls) == ((2, [created]) if is_public else (0, [created, uploaded]))
