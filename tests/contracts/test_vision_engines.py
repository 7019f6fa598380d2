"""Engines and policy see the same pictures: log-probs of both before and after a refit of all weights."""

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.errors import WeightSyncError
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.rollout_dependencies import RolloutLimits, RolloutOptions
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.hf import HFGeneration
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.policy.driver import LocalPolicy
from nemo_rl.types import (
    EnvStep,
    GenerationRequest,
    Message,
    Prompt,
    SamplingParams,
    TextPart,
    TokenizedMessage,
    ToolResult,
    TrajectoryGroup,
    placed_images,
)
from nemo_rl.weight_sync.refit import TransportWeightSync
from nemo_rl.weight_sync.verification import Probe, collect_completions, to_logprob_batch
from tests.contracts.engines import section
from tests.contracts.policies import SETTINGS
from tests.fakes.environments import Conversation, FakeEnvironment, State
from tests.fakes.vision import KINDS, picture, save_vision_model
from tests.support.quick import quick
from tests.unit.experience.rollout_setup import dependencies
from tests.unit.policy.tiny import WeightedNLL, make_batch

CASES = [((kind, engine),) for kind in KINDS for engine in ("hf", "vllm in process")]
SLOW_CASES = [(("smolvlm", "hf"),), (("smolvlm", "vllm in process"),), (("qwen3_vl", "hf"),)]
QUESTIONS = (
    Message("user", (picture(1, 84, 56), TextPart("and"), picture(2), TextPart("are?"))),
    Message("user", "no image"),
    Message("user", (TextPart("what is "), picture(3))),
    Message("user", (picture(2), TextPart("?"))),
)
MAX_LENGTH = 256
NUM_TRIES, PACE_S = 10, 0.02  # until updates cut requests, which end at their own pace


class Seeing:
    """A policy and an engine of the same tiny model."""

    def __init__(self, runner: asyncio.Runner, kind: str, engine: str, path: Path) -> None:
        self.runner = runner
        self.path = path
        model, _ = save_vision_model(kind, path)
        self.model_type = model.config.model_type
        self.class_name = type(model).__name__
        images = ImageEncoder.load(str(path))
        self.encoder = ChatEncoder(images._processor.tokenizer, images=images)
        logs = [self.encoder.encode_prompt((message,)) for message in QUESTIONS]
        self.probes = [Probe(flat_token_ids(log), placed_images(log)) for log in logs]
        self.policy = LocalPolicy(
            PolicyConfig.model_validate({"model_name": str(path), **SETTINGS}),
            model_path=str(path), temperature=1.0, needs_reference=False, num_samples_per_step=4, seed=0,
        )  # fmt: skip
        if engine == "hf":
            self.engine: Any = HFGeneration(str(path), max_batch_size=4, max_model_len=MAX_LENGTH)
            return
        engine_model = EngineModel(str(path), "float32", MAX_LENGTH, "cpu", vision_type=self.model_type)
        self.engine = runner.run(VllmGeneration.create(section(in_process=True), engine_model))

    def worst_difference(self, *, seed: int = 0) -> float:
        """Return the largest difference of log-probs of sampled tokens, each prompt sampled twice."""
        sampling = SamplingParams(16, stop_token_ids=())
        requests = [
            GenerationRequest(f"{seed}-{i}-{k}", p.token_ids, sampling, seed + k, f"{i}-{k}", images=p.images)
            for i, p in enumerate(self.probes)
            for k in range(2)
        ]
        completions = self.runner.run(collect_completions(self.engine, requests))
        batch = to_logprob_batch(requests, completions)
        scored = self.runner.run(self.policy.logprobs(batch))
        mask = batch["token_mask"]
        return float(((scored - batch["generation_logprobs"]) * mask).abs().max())

    def training_batch(self) -> TensorDict:
        """Return the probes as samples whose second half is trained on."""
        logs = [TokenizedMessage(Message("user", ""), p.token_ids, images=p.images) for p in self.probes]
        batch = make_batch([len(log.token_ids) for log in logs])
        for index, log in enumerate(logs):
            batch["token_ids"][index, : len(log.token_ids)] = torch.tensor(log.token_ids)
        keys.add_images(batch, [log.images for log in logs])
        return batch

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.run(self.policy.close())


@pytest.fixture(scope="module", params=quick(CASES, [case for case in CASES if case not in SLOW_CASES]), ids="-".join)
def seeing(
    request: pytest.FixtureRequest, engine_loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    kind, engine = request.param
    made = Seeing(engine_loop, kind, engine, tmp_path_factory.mktemp(kind))
    yield made
    made.close()


def test_logprobs_agree_before_and_after_a_refit_of_all_weights(seeing: Seeing) -> None:
    assert seeing.worst_difference() < 1e-4
    metrics = seeing.runner.run(seeing.policy.train_step(seeing.training_batch(), WeightedNLL()))
    assert metrics["grad_norm"] > 0
    assert seeing.worst_difference(seed=7) > 1e-3  # the engine has the weights before the step
    sync = TransportWeightSync(seeing.probes, WeightSyncConfig(verify=True), "float32")
    for version in (1, 2):  # the second repeats recorded copies
        seeing.runner.run(sync.publish(seeing.policy, seeing.engine, weight_version=version))
    sync.close()
    assert seeing.worst_difference(seed=9) < 1e-4


def test_weights_that_images_alone_reach_are_verified(seeing: Seeing) -> None:
    sync = TransportWeightSync(seeing.probes, WeightSyncConfig(verify=True), "float32")
    with pytest.raises(WeightSyncError, match="log-probs differ"):
        seeing.runner.run(sync.publish(FalseTower(seeing.policy), seeing.engine, weight_version=3))  # type: ignore[arg-type]
    seeing.runner.run(sync.publish(seeing.policy, seeing.engine, weight_version=4))
    sync.close()


def next_screen(conversation: Conversation, state: State) -> EnvStep:
    """Answer two actions with screens, the second of which shows the first picture again."""
    turn = state.get("turn", 0)
    screen = ToolResult(f"c{turn}", (TextPart("screen:"), picture((5, 4)[turn] if turn < 2 else 0, 84)))
    return EnvStep((Message("tool", (screen,)),), done=turn == 2, state={"turn": turn + 1})


def test_rollouts_with_screens_of_an_environment_are_exact(seeing: Seeing) -> None:
    task = Prompt("p", "screens", (Message("user", (picture(4, 84), TextPart("close it"))),))
    setup = dependencies(
        seeing.engine,
        {"screens": FakeEnvironment(next_screen)},
        limits=RolloutLimits(max_turns=3, max_total_length=MAX_LENGTH),
        encoder=seeing.encoder,
    )
    options = RolloutOptions(SamplingParams(6, stop_token_ids=tuple(range(0, 256, 3))), seed=1)
    jobs = [RolloutJob(task, "g", index) for index in range(6)]
    rollouts = seeing.runner.run(run_async_multi_turn_rollout(jobs, setup, options))
    shown = [len(placed_images(rollout.message_log)) for rollout in rollouts]
    assert max(shown) == 3, "no rollout came to its third turn"
    batch, _ = assemble_batch([TrajectoryGroup("g", task, rollouts)], min_group_size=1)
    scored = seeing.runner.run(seeing.policy.logprobs(batch))
    assert float(((scored - batch["generation_logprobs"]) * batch["token_mask"]).abs().max()) < 1e-4
    assert sum(shown) > len(batch[keys.IMAGES].images) == 2  # a picture is in the batch once


def test_an_image_of_a_group_is_encoded_once(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples of one prompt, then eight of one that goes on with a second picture, counted in vLLM's model."""
    if isinstance(seeing.engine, HFGeneration):
        pytest.skip("the engine hf keeps no features between calls")
    encoded: list[int] = []
    first, second = picture(31), picture(32)
    model_class = getattr(importlib.import_module(f"vllm.model_executor.models.{seeing.model_type}"), seeing.class_name)
    monkeypatch.setattr(model_class, "embed_multimodal", counting(model_class.embed_multimodal, encoded))
    messages = (
        Message("user", (first, TextPart("?"))),
        Message("user", (first, TextPart("?"), second, TextPart("and?"), first)),
    )
    for message, num_encoded in zip(messages, (1, 2), strict=True):
        log = seeing.encoder.encode_prompt((message,))
        sampling = SamplingParams(8, stop_token_ids=())
        ids, images = flat_token_ids(log), placed_images(log)
        group = [GenerationRequest(f"{num_encoded}-{k}", ids, sampling, k, f"{k}", images=images) for k in range(8)]
        completions = seeing.runner.run(collect_completions(seeing.engine, group))
        assert len({completion.token_ids for completion in completions}) > 1
        assert sum(encoded) == num_encoded


def counting(embed: Any, counts: list[int]) -> Any:
    """Return vLLM's function that encodes images, which then notes how many it was given."""

    def embed_and_count(self: Any, **kwargs: Any) -> Any:
        found = embed(self, **kwargs)
        counts.append(len(found))
        return found

    return embed_and_count


async def sampled_through_updates(seeing: Seeing) -> tuple[list[GenerationRequest], Any]:
    """Return requests, and completions during which weights alternate; those of odd versions are false."""
    sync = TransportWeightSync(seeing.probes, WeightSyncConfig(), "float32")
    sync._num_verified[seeing.engine] = 2  # not verified: probes would wait for the requests
    sampling = SamplingParams(120, stop_token_ids=())
    for attempt in range(NUM_TRIES):
        requests = [
            GenerationRequest(f"through-{attempt}-{i}", p.token_ids, sampling, i, f"{attempt}-{i}", images=p.images)
            for i, p in enumerate(seeing.probes)
        ]
        running = asyncio.create_task(collect_completions(seeing.engine, requests))
        for number in range(1, 7):
            await asyncio.sleep(PACE_S)
            policy: Any = FalseTower(seeing.policy) if number % 2 else seeing.policy
            await sync.publish(policy, seeing.engine, weight_version=100 + 6 * attempt + number)
        completions = await running
        if sum(len(each.weight_spans) > 2 for each in completions) > len(requests) // 2:
            sync.close()
            return requests, completions
    raise AssertionError(f"updates cut too few requests in {NUM_TRIES} tries")


def test_requests_go_on_through_updates_and_see_with_the_new_tower(seeing: Seeing) -> None:
    requests, completions = seeing.runner.run(sampled_through_updates(seeing))
    batch = to_logprob_batch(requests, completions)
    difference = (seeing.runner.run(seeing.policy.logprobs(batch)) - batch["generation_logprobs"]).abs()
    true, false = [], []
    for row, request, completion in zip(difference, requests, completions, strict=True):
        for span in completion.weight_spans:
            own = row[len(request.token_ids) + span.start : len(request.token_ids) + span.end].max()
            if request.images:
                (false if span.version % 2 else true).append(float(own))
    assert max(true) < 1e-4
    assert max(false) > 1e-3


def test_merged_adapters_are_refitted(seeing: Seeing) -> None:
    """The last test of an engine: it leaves other weights there."""
    path = str(seeing.path)
    adapters = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}}
    seeing.runner.run(seeing.policy.close())
    seeing.policy = LocalPolicy(
        PolicyConfig.model_validate({"model_name": path, **SETTINGS, **adapters}),
        model_path=path, temperature=1.0, needs_reference=False, num_samples_per_step=4, seed=0,
    )  # fmt: skip
    sync = TransportWeightSync(seeing.probes, WeightSyncConfig(verify=True, adapter="merged"), "float32")
    for version in (11, 12):
        seeing.runner.run(seeing.policy.train_step(seeing.training_batch(), WeightedNLL()))
        assert seeing.worst_difference(seed=version) > 1e-3
        seeing.runner.run(sync.publish(seeing.policy, seeing.engine, weight_version=version))
        assert seeing.worst_difference(seed=version + 10) < 1e-4
    sync.close()


class FalseTower:
    """A policy that publishes other embeddings of patches than it has."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    async def run_with_weights(self, use: Any) -> Any:
        def falsified(weights: Any) -> Any:
            return use((name, tensor * 1.5 if "patch_embed" in name else tensor) for name, tensor in weights)

        return await self._policy.run_with_weights(falsified)
