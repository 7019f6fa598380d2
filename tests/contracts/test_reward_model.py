"""Reward models against a plain forward pass of transformers: padded and packed, on a thread and in actors."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from nemo_rl.distributed.cluster import connect
from nemo_rl.environments.scorers.reward_model import RewardModelScorerConfig
from nemo_rl.environments.scorers.reward_model_replicas import RewardModelScorer
from nemo_rl.errors import ConfigError
from nemo_rl.types import Failure, FailureClass, Message, ResponseFault, ScoreRequest
from tests.fakes.chat_tokenizer import chat_tokenizer

TOLERANCE = 1e-5
LETTERS = "abcdefghij"
TALKS = [(Message("user", "ab"), Message("assistant", LETTERS[: 1 + n * 7 % 10] * (1 + n % 3))) for n in range(9)]


def save(directory: Path, model_type: str = "llama", *, labels: int = 1, padding: bool = False) -> PreTrainedModel:
    """A small classifier whose scores are far apart, with its tokenizer."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(directory)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "num_labels": labels, "hidden_size": 32}
    llama: dict[str, Any] = {
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    pad: Any = tokenizer.eos_token_id if padding else None
    torch.manual_seed(0)
    if model_type == "llama":
        config = LlamaConfig(**sizes, **llama, max_position_embeddings=128, pad_token_id=pad)
        model: PreTrainedModel = LlamaForSequenceClassification(config)
    elif model_type == "gpt2":
        sizes["n_embd"] = sizes.pop("hidden_size")
        model = GPT2ForSequenceClassification(GPT2Config(**sizes, n_layer=2, n_head=4, n_positions=128))
    else:
        llama.pop("num_key_value_heads")
        model = BertForSequenceClassification(BertConfig(**sizes, **llama, max_position_embeddings=128))
    model = model.float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    return model


def plain_scores(model: PreTrainedModel) -> list[float]:
    """One conversation at a time, without padding or mask."""
    tokenizer = chat_tokenizer()
    texts = ["".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in talk) for talk in TALKS]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]


@contextmanager
def scorer_of(directory: Path, runner: asyncio.Runner, **keys: Any) -> Iterator[RewardModelScorer]:
    connect(num_cpus=2)
    scorer = RewardModelScorer("rm", RewardModelScorerConfig(model_name=str(directory), device="cpu", **keys))
    try:
        yield scorer
    finally:
        runner.run(scorer.close())


def scores_of(
    runner: asyncio.Runner, scorer: RewardModelScorer, talks: Any = TALKS
) -> list[float | Failure | ResponseFault]:
    return runner.run(scorer.score([ScoreRequest(talk, {}) for talk in talks]))


@pytest.mark.parametrize("in_actor", [False, True], ids=["thread", "actor"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_scores_are_those_of_a_plain_forward_pass(tmp_path: Path, packing: bool, in_actor: bool) -> None:
    model = save(tmp_path)
    keys: dict[str, Any] = {"packing": packing, "in_actor": in_actor, "micro_batch_size": 4}
    with asyncio.Runner() as runner, scorer_of(tmp_path, runner, **keys) as scorer:
        scores = scores_of(runner, scorer)
        assert scores_of(runner, scorer, []) == []
    expected = plain_scores(model)
    assert max(expected) - min(expected) > 0.1
    assert scores == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(("model_type", "padding"), [("llama", True), ("gpt2", False), ("bert", False)])
def test_other_models_and_paddings_score_as_a_plain_forward_pass(
    tmp_path: Path, model_type: str, padding: bool
) -> None:
    model = save(tmp_path, model_type, padding=padding)
    with asyncio.Runner() as runner, scorer_of(tmp_path, runner, in_actor=False, micro_batch_size=4) as scorer:
        assert scores_of(runner, scorer) == pytest.approx(plain_scores(model), abs=TOLERANCE)


def test_packing_is_refused_where_it_changes_scores(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    with pytest.raises(ConfigError, match="scores a conversation differently when batched with others") as caught:
        RewardModelScorer(
            "rm", RewardModelScorerConfig(model_name=str(tmp_path), device="cpu", packing=True, in_actor=False)
        )
    assert caught.value.key == "scorers.rm.packing"


def test_a_conversation_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    save(tmp_path)
    talks = [TALKS[0], (Message("user", "a" * 100), Message("assistant", "b")), TALKS[1]]
    with asyncio.Runner() as runner, scorer_of(tmp_path, runner, in_actor=False, max_length=90) as scorer:
        first, long, last = scores_of(runner, scorer, talks)
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert isinstance(long, Failure)
    assert long.failure_class is FailureClass.REWARD
    assert "where 90 fit" in long.cause


def test_a_conversation_that_the_template_breaks_on_fails_alone(tmp_path: Path) -> None:
    """With whatever its expressions raise, here a TypeError of Python's."""
    save(tmp_path)
    template = "{{ messages[0]['content'] + (1 if messages[0]['content'] == 'x' else '') }}"
    talks = [TALKS[0], (Message("user", "x"),), TALKS[1]]
    with asyncio.Runner() as runner, scorer_of(tmp_path, runner, in_actor=False, chat_template=template) as scorer:
        first, broken, last = scores_of(runner, scorer, talks)
    assert isinstance(first, float)
    assert isinstance(last, float)
    assert isinstance(broken, Failure)
    assert "TypeError" in broken.cause


@pytest.mark.parametrize("in_actor", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["thread", "actor"])
def test_a_model_of_several_labels_is_refused(tmp_path: Path, in_actor: bool) -> None:
    connect(num_cpus=2)
    save(tmp_path, labels=3)
    with pytest.raises(ConfigError, match="this one has 3") as caught:
        RewardModelScorer("rm", RewardModelScorerConfig(model_name=str(tmp_path), in_actor=in_actor))
    assert caught.value.key == "scorers.rm.model_name"


def test_a_model_that_is_not_there_or_lacks_its_head_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "whole")
    body: Any = model.base_model
    body.config.num_labels = 1
    body.save_pretrained(tmp_path / "headless")
    for name, said in (("nowhere", "no Hugging Face model"), ("headless", "lack 1 weights")):
        with pytest.raises(ConfigError, match=said) as caught:
            RewardModelScorer("rm", RewardModelScorerConfig(model_name=str(tmp_path / name), in_actor=False))
        assert caught.value.key == "scorers.rm.model_name"


@pytest.mark.slow  # starts two actors
def test_a_dead_actor_fails_what_it_holds_and_is_replaced(tmp_path: Path) -> None:
    model = save(tmp_path)
    with asyncio.Runner() as runner, scorer_of(tmp_path, runner, num_replicas=2) as scorer:
        scorer._replicas[0].kill()
        scores = scores_of(runner, scorer)
        expected = plain_scores(model)
        assert all(isinstance(s, Failure) and s.failure_class is FailureClass.REWARD for s in scores[:5])
        assert scores[5:] == pytest.approx(expected[5:], abs=TOLERANCE)
        assert scores_of(runner, scorer) == pytest.approx(expected, abs=TOLERANCE)
