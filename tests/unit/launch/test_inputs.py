import json
from pathlib import Path

import pytest

from nemo_rl.config.master import GRPORunConfig
from nemo_rl.data.chat import flat_token_ids
from nemo_rl.errors import ConfigError
from nemo_rl.launch.rollouts import Inputs, load_inputs, load_prompts
from tests.unit.launch.conftest import MAX_LENGTH, Recipe


def loaded(config: GRPORunConfig, model_path: str) -> Inputs:
    return load_inputs(config, model_path, load_prompts(config))


def test_inputs_are_prompts_their_encoder_and_probes_of_the_first_prompts(recipe: Recipe, model_folder: Path) -> None:
    inputs = loaded(recipe("weight_sync.num_probe_prompts=2"), str(model_folder))
    assert [p.messages[0].content for p in inputs.train.prompts] == list("abcdef")
    assert {p.task_name for p in inputs.train.prompts} == {"letters"}
    assert inputs.validation == ()
    assert inputs.probes == tuple(
        flat_token_ids(inputs.encoder.encode_prompt(p.messages)) for p in inputs.train.prompts[:2]
    )
    assert str(inputs.tokenizer.decode(list(inputs.probes[0]))).endswith("<|im_start|>assistant\n")


def test_a_task_without_an_environment_names_entry_and_data_set(recipe: Recipe, model_folder: Path) -> None:
    config = recipe("~env.letters", "data.train.env_name=null", "++env.letter={type: math}")
    with pytest.raises(ConfigError, match=r"env\.math = None: needed by the data set 'train'; known: letter"):
        loaded(config, str(model_folder))


def test_a_validation_sets_task_needs_its_environment_too(recipe: Recipe, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"input": "z", "output": "z"}) + "\n")
    config = recipe(f"++data.validation={{dataset_name: jsonl, data_path: {tmp_path / 'held_out.jsonl'}, name: held}}")
    with pytest.raises(ConfigError, match=r"env\.math = None: needed by the data set 'held'; known: letters"):
        loaded(config, str(model_folder))


def test_a_prompt_needs_room_for_one_sampled_token(recipe: Recipe, model_folder: Path) -> None:
    inputs = loaded(recipe(), str(model_folder))
    longest = max(len(flat_token_ids(inputs.encoder.encode_prompt(p.messages))) for p in inputs.train.prompts)
    small = "policy.generation.max_new_tokens=1"
    loaded(recipe(small, f"policy.max_total_sequence_length={longest + 1}"), str(model_folder))
    with pytest.raises(ConfigError, match=rf"data\.max_input_seq_length = {longest - 1}.*has {longest} tokens"):
        loaded(recipe(small, f"policy.max_total_sequence_length={longest}"), str(model_folder))
    assert longest < MAX_LENGTH


def test_max_input_seq_length_limits_prompts_further(recipe: Recipe, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_input_seq_length = 3"):
        loaded(recipe("data.max_input_seq_length=3"), str(model_folder))


def test_sequences_longer_than_the_model_takes_are_refused(recipe: Recipe, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.max_total_sequence_length = 100000: the model takes \d+ tokens"):
        loaded(recipe("policy.max_total_sequence_length=100000"), str(model_folder))
