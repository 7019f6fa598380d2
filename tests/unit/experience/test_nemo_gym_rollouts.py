"""Rollouts by a scripted NeMo Gym stack against a real gateway: what they become, and what goes wrong with them."""

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl import batch as keys
from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.images import to_data_url
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig
from nemo_rl.environments.nemo_gym.failures import CLASS_OF_KIND, CLASS_OF_STAGE
from nemo_rl.environments.nemo_gym.reply import TOKEN_FIELDS
from nemo_rl.errors import RolloutError
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.experience.nemo_gym_rollouts import run_nemo_gym_rollouts
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_dispatch import run_rollouts
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.manager import GatewayManager
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.types import (
    Completion,
    FailureClass,
    GenerationRequest,
    Message,
    Prompt,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    placed_images,
)
from tests.fakes import gym_stack
from tests.fakes.environments import FakeEnvironment
from tests.fakes.gym_stack import FakeGymStack, Script, row_of, script_of_row
from tests.fakes.gym_vocabulary import KINDS, STAGES
from tests.fakes.vision import picture, save_vision_model
from tests.unit.experience.rollout_setup import LIMITS, check_environment
from tests.unit.gateway.engines import DEADLINE_S, SpeakingGeneration, codec_of, encoder_of, rules, tokens_of


def hello(request: GenerationRequest, text: str) -> str:
    return "hello"


@dataclass
class Setup:
    """A running stack, the gateway that it calls, and the dependencies of the rollouts."""

    stack: FakeGymStack
    manager: GatewayManager
    generation: SpeakingGeneration
    dependencies: RolloutDependencies
    options: RolloutOptions
    client: GymClient

    def run(self, *rows: Any, count: int = 1, **changes: Any) -> Awaitable[tuple[Trajectory, ...]]:
        return run_nemo_gym_rollouts(jobs_of(*rows, count=count), self.dependencies, replace(self.options, **changes))


def jobs_of(*rows: Any, count: int = 1) -> list[RolloutJob]:
    """`count` rollouts of each row; a text is the row that asks it."""
    jobs = []
    for number, row in enumerate(rows):
        row = row_of(row) if isinstance(row, str) else row
        message = Message("user", str(number))
        prompt = Prompt(f"p{number}", "gym", (message,), {"row": row}, agent_name=row["agent_ref"]["name"])
        jobs += [RolloutJob(prompt, f"0:{number}", index) for index in range(count)]
    return jobs


def use(
    body: Callable[[Setup], Awaitable[None]],
    *,
    generation: SpeakingGeneration | None = None,
    codec: Codec | None = None,
    script: Callable[..., Script] = script_of_row,
    max_model_len: int = 4096,
    stall_timeout_s: float = DEADLINE_S,
    trajectory_selection: Any = "all",
    front: str | None = None,
    **section: Any,
) -> None:
    """Run `body`; whatever happened, neither a session nor a call may be left in the gateway."""

    async def main() -> None:
        engine = generation or SpeakingGeneration("chatml", hello)
        the_rules = rules(max_model_len=max_model_len)
        section_of_gateway = GatewayConfig(num_servers=2, max_captured_mib=1)
        spoken = codec or codec_of("chatml")
        manager = await GatewayManager.start(engine, spoken, the_rules, section_of_gateway)
        policy = {"policy_base_url": manager.default_base_url, "policy_api_key": manager.api_key}
        async with FakeGymStack(script=script, front=front, **policy) as stack:
            settings: dict[str, Any] = {"timeout_s": DEADLINE_S, "retry_backoff_s": 0.01} | section
            client = GymClient(NemoGymConfig(head_url=stack.head_url, **settings))
            await client.connect(["agent"])
            runtime = GymRuntime(client, manager, settings.get("max_concurrency", 64), trajectory_selection)
            dependencies = RolloutDependencies(
                engine,
                {"game": check_environment(FakeEnvironment())},
                spoken.encoder,
                replace(LIMITS, max_total_length=max_model_len, stall_timeout_s=stall_timeout_s),
                gyms={"gym": runtime},
            )
            options = RolloutOptions(the_rules.sampling, seed=7)
            try:
                await asyncio.wait_for(body(Setup(stack, manager, engine, dependencies, options, client)), DEADLINE_S)
                assert manager.num_sessions == (0, 0)
                assert manager.num_echoed_calls == 0
            finally:
                await client.close()
                await manager.close()

    asyncio.run(main())


def rollouts_of(*rows: Any, count: int = 1, **how: Any) -> tuple[Trajectory, ...]:
    seen: list[Trajectory] = []

    async def body(setup: Setup) -> None:
        seen.extend(await setup.run(*rows, count=count))

    use(body, **how)
    return tuple(seen)


def rollout_of(row: Any, **how: Any) -> Trajectory:
    (trajectory,) = rollouts_of(row, **how)
    return trajectory


def scripted(**script: Any) -> Callable[..., Script]:
    return lambda agent, row: Script(**script)


def texts_of(trajectory: Trajectory) -> list[str]:
    return [message.message.content for message in trajectory.message_log]


# ---- what a rollout becomes


def test_turns_become_one_chain_of_the_tokens_that_were_sampled() -> None:
    trajectory = rollout_of("one", script=scripted(turns=3, reward=0.5))
    assert texts_of(trajectory) == ["one", "hello", "go on, 1", "hello", "go on, 2", "hello"]
    sampled = [m for m in trajectory.message_log if m.is_generated]
    assert [m.token_ids for m in sampled] == [tokens_of("chatml", "hello")] * 3
    assert all(m.generation_logprobs == (-0.25,) * 6 for m in sampled)
    assert (trajectory.rewards, trajectory.stop_reason) == ({"gym": 0.5}, StopReason.DONE)
    assert (trajectory.num_turns, trajectory.weight_versions, trajectory.other_chains) == (3, (3, 4), ())
    assert trajectory.loss_weight == 1.0
    assert trajectory.timings.total_s > 0


def test_results_come_in_the_order_of_the_jobs_whatever_order_they_end_in() -> None:
    ended = [asyncio.Event() for _ in range(5)]
    ended[4].set()

    def script(agent: str, row: Any) -> Script:
        place = row["place"]

        def note(body: Any) -> None:
            ended[place - 1].set()

        return Script(before=ended[place].wait, reward=float(place), alter=note)

    seen: list[Trajectory] = []
    rows = [row_of(f"row {i}", place=i) for i in range(5)]

    async def body(setup: Setup) -> None:
        reported: list[Trajectory] = []
        seen.extend(await setup.run(*rows, progress=reported.append))
        assert [t.reward for t in reported] == [4, 3, 2, 1, 0]

    use(body, script=script)
    assert [t.reward for t in seen] == [0, 1, 2, 3, 4]
    assert [texts_of(t)[0] for t in seen] == [f"row {i}" for i in range(5)]


def test_tools_and_their_results_are_context_and_what_was_sampled_is_trained() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
    engine = SpeakingGeneration("qwen3", lambda request, text: "It is 7." if "add is done" in text else call)
    row = row_of("sum")
    row["responses_create_params"]["tools"] = [{"type": "function", "name": "add", "parameters": {}, "strict": True}]
    seen: list[Trajectory] = []

    async def main() -> None:
        the_rules = rules("qwen3")
        manager = await GatewayManager.start(engine, codec_of("qwen3"), the_rules, GatewayConfig())
        async with FakeGymStack(script=scripted(turns=2), policy_base_url=manager.default_base_url) as stack:
            client = GymClient(NemoGymConfig(head_url=stack.head_url))
            await client.connect(["agent"])
            runtime = GymRuntime(client, manager, 1)
            encoder = encoder_of("qwen3")
            dependencies = RolloutDependencies(engine, {}, encoder, LIMITS, gyms={"gym": runtime})
            options = RolloutOptions(the_rules.sampling, seed=7)
            seen.extend(await run_nemo_gym_rollouts(jobs_of(row), dependencies, options))
            await client.close()
        await manager.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    (trajectory,) = seen
    assert [m.message.role for m in trajectory.message_log] == ["user", "assistant", "tool", "user", "assistant"]
    sampled = [m.token_ids for m in trajectory.message_log if m.is_generated]
    assert sampled == [tokens_of("qwen3", call), tokens_of("qwen3", "It is 7.")]
    assert trajectory.failure is None


class SeeingEngine(SpeakingGeneration):
    """Says the same of every picture, with log-probs that the pictures decide."""

    def _answer_to(self, request: GenerationRequest) -> Completion:
        ids = (*b"hello", *request.sampling.stop_token_ids)
        draws = random.Random(f"{request.seed}{[placed.features.digest for placed in request.images]}")
        return Completion(request.request_id, ids, tuple(-draws.random() for _ in ids), "stop")


def test_rows_with_images_are_rollouts_of_their_own_pictures(tmp_path: Path) -> None:
    """The tokens of all rollouts are equal, so that Gym's echoes tell them apart by their pictures alone."""
    save_vision_model("idefics3", tmp_path)
    images = ImageEncoder.load(str(tmp_path))
    codec = Codec(ChatEncoder(images._processor.tokenizer, images=images))
    pictures = [picture(seed) for seed in range(6)]
    rows = []
    for each in pictures:
        shown = {"type": "input_image", "image_url": to_data_url(each), "detail": "auto"}
        rows.append(row_of([shown, {"type": "input_text", "text": "what?"}]))  # type: ignore[arg-type]
    rollouts = rollouts_of(*rows, codec=codec, generation=SeeingEngine("chatml", hello), script=scripted(turns=2))
    assert [rollout.failure for rollout in rollouts] == [None] * 6
    assert len({flat_token_ids(rollout.message_log) for rollout in rollouts}) == 1
    for rollout, own in zip(rollouts, pictures, strict=True):
        assert [placed.features.digest for placed in placed_images(rollout.message_log)] == [own.digest]
        assert sum(message.is_generated for message in rollout.message_log) == 2


def test_equal_samples_of_a_group_stay_rollouts_of_their_own() -> None:
    rollouts = rollouts_of("same", count=8)
    assert [t.failure for t in rollouts] == [None] * 8
    assert len({flat_token_ids(t.message_log) for t in rollouts}) == 1
    assert [t.generation_index for t in rollouts] == list(range(8))


def test_an_answer_that_gym_drops_from_its_history_begins_a_chain_of_its_own() -> None:
    answers = iter(["", "hello"])
    engine = SpeakingGeneration("chatml", lambda request, text: next(answers))
    trajectory = rollout_of("one", script=scripted(turns=2), generation=engine)
    assert trajectory.failure is None
    assert texts_of(trajectory) == ["one", "go on, 1", "hello"]
    (other,) = trajectory.other_chains
    assert [m.message.content for m in other] == ["one", ""]
    answers = iter(["", "hello"])
    longest = rollout_of("one", script=scripted(turns=2), generation=engine, trajectory_selection="longest")
    assert longest.other_chains == ()


def test_a_masked_rollout_counts_in_the_baseline_and_has_no_gradient() -> None:
    def script(agent: str, row: Any) -> Script:
        return Script(reward=row["place"], alter=gym_stack.masked if row["place"] else None)

    rollouts = rollouts_of(row_of("one", place=0), row_of("one", place=2), script=script)
    assert [t.loss_weight for t in rollouts] == [1.0, 0.0]
    assert [t.reward for t in rollouts] == [0.0, 2.0]
    group = TrajectoryGroup("g", rollouts[0].prompt, tuple(replace(t, group_id="g") for t in rollouts))
    batch, _ = assemble_batch([group], min_group_size=2)
    assert batch[keys.SAMPLE_MASK].tolist() == [1.0, 0.0]
    assert batch[keys.REWARD].tolist() == [0.0, 2.0]


def test_the_answer_that_an_environment_understood_is_kept() -> None:
    def script(agent: str, row: Any) -> Script:
        return Script(alter=lambda body: body.update({row["field"]: "B"}))

    for field in ("extracted_answer", "extracted_model_code"):
        assert rollout_of(row_of("one", field=field), script=script).answer == "B"


def test_a_response_cut_by_its_limit_is_truncated_and_scored() -> None:
    row = row_of("one")
    row["responses_create_params"]["max_output_tokens"] = 3
    trajectory = rollout_of(row)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TRUNCATED, 1.0)
    assert trajectory.num_generated_tokens == 3


def test_a_conversation_that_runs_out_of_room_is_truncated_with_what_it_has() -> None:
    trajectory = rollout_of("one", script=scripted(turns=9), max_model_len=60)
    assert trajectory.failure is None
    assert trajectory.stop_reason is StopReason.TRUNCATED
    assert 1 <= trajectory.num_turns < 9


# ---- how it is sampled


def seeds(engine: SpeakingGeneration) -> list[int]:
    return sorted(request.seed for request in engine.requests)


def test_rollouts_sample_from_seeds_of_their_own_that_another_run_repeats() -> None:
    engines = [SpeakingGeneration("chatml", hello) for _ in range(2)]
    for engine in engines:
        rollouts_of("one", "two", count=3, generation=engine, script=scripted(turns=2))
    assert len(set(seeds(engines[0]))) == 2 * 3 * 2
    assert seeds(engines[0]) == seeds(engines[1])


def test_sampling_is_that_of_the_call_whatever_the_row_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="nemo_rl")
    engine = SpeakingGeneration("chatml", hello)
    row = row_of("one", own={"kept": 1})
    row["responses_create_params"] |= {
        "temperature": 0.9,
        "top_p": 0.5,
        "metadata": {"own": "kept", "extra_body": '{"temperature": 2}', "chat_template_kwargs": '{"x": 1}'},
    }

    async def body(setup: Setup) -> None:
        for temperature in (1.0, 0.0):
            sampling = SamplingParams(8, temperature=temperature)
            (trajectory,) = await setup.run(row, sampling=sampling)
            assert trajectory.failure is None
        sent = [row for _, row in setup.stack.rows]
        assert all(each["own"] == {"kept": 1} for each in sent)
        metadata = [each["responses_create_params"]["metadata"] for each in sent]
        assert all(each.keys() == {"own", "nemo_rl_session"} for each in metadata)
        assert len({each["nemo_rl_session"] for each in metadata}) == 2

    use(body, generation=engine)
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 0.0]
    assert row["responses_create_params"]["temperature"] == 0.9
    notes = [r.getMessage() for r in caplog.records if "NeMo Gym's rows" in r.getMessage()]
    assert notes == [
        "metadata.chat_template_kwargs, metadata.extra_body, temperature, top_p of NeMo Gym's rows are ignored: "
        "the run decides how tokens are sampled"
    ]


def test_where_an_agent_drops_the_session_calls_are_found_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym_stack, "PASSED_ON", ("user",))
    rollouts = rollouts_of("same", "other", count=4, script=scripted(turns=2))
    assert [t.failure for t in rollouts] == [None] * 8
    assert {t.num_turns for t in rollouts} == {2}


def captured_rollout(**losses: Any) -> Trajectory:
    """A rollout of two turns whose reply names no call: its records are in the gateway's store, as Gym puts them."""
    managers: list[GatewayManager] = []

    def capture(body: Any) -> None:
        store, key = managers[0]._servers[0].captures, body["_ng_rollout_id"]
        for index, item in enumerate(gym_stack.calls_of(body)):
            record = {name: item.pop(name) for name in TOKEN_FIELDS} | {"model_call_id": f"c{index}", **losses}
            store.put(key, f"c{index}", json.dumps(record).encode())
        if "lost" in losses:
            store.mark_incomplete(key, "c9")
        if "full" in losses:
            with pytest.raises(RequestError):
                store.put(key, "c9", b" " * (2**20))
            store.mark_incomplete(key, "c9")

    seen: list[Trajectory] = []

    async def body(setup: Setup) -> None:
        managers.append(setup.manager)
        seen.extend(await setup.run("one"))
        assert len(setup.manager._servers[0].captures) == 0

    use(body, script=scripted(turns=2, reward=0.5, alter=capture), front="legacy_agent")
    return seen[0]


def test_calls_that_gym_captured_are_trained_where_the_reply_names_none() -> None:
    trajectory = captured_rollout()
    assert trajectory.failure is None
    assert (trajectory.num_turns, trajectory.reward, trajectory.other_chains) == (2, 0.5, ())
    assert texts_of(trajectory) == ["one", "hello", "go on, 1", "hello"]


@pytest.mark.parametrize(
    ("losses", "cause"),
    [
        ({"lost": True}, "failed to capture a call"),
        ({"full": True}, "call of the model (captured records fill 1048576 bytes; raise gateway.max_captured_mib)"),
        ({"prompt_is_delta": True}, "delta_records must be off"),
        ({"generation_token_ids": [7]}, "1 tokens with"),
        (dict.fromkeys(TOKEN_FIELDS), "captured record 0 has no tokens"),
    ],
)
def test_a_rollout_whose_capture_is_not_whole_fails(losses: dict[str, Any], cause: str) -> None:
    trajectory = captured_rollout(**losses)
    assert trajectory.failure is not None
    assert trajectory.failure.failure_class is FailureClass.AGENT
    assert cause in trajectory.failure.cause


@pytest.mark.parametrize(
    ("script", "front"),
    [
        ({"status": 500}, "legacy_agent"),
        (
            {"failure": {"failure_kind": "judge_failed", "failure_reason": "away", "terminal": True}},
            "single_agent_turn",
        ),
        ({"before": asyncio.Event().wait}, "legacy_agent"),  # until the deadline, or the end of the run
    ],
)
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_gym_captured_of_a_rollout_that_fails_or_is_cancelled_is_forgotten(
    script: dict[str, Any], front: str, is_cancelled: bool
) -> None:
    async def body(setup: Setup) -> None:
        store, identities = setup.manager._servers[0].captures, []
        run = setup.client.run

        async def captured_run(agent: str, row: Any, identity: Any) -> Any:
            identities.append(identity)
            for attempt in (0, 1):
                store.put(identity.capture_key(attempt), "c0", b"{}")
            return await run(agent, row, identity)

        setup.client.run = captured_run  # type: ignore[method-assign]
        running = asyncio.ensure_future(setup.run("one"))
        if is_cancelled:
            while not identities:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            running.cancel()
        await asyncio.wait([running])
        assert running.cancelled() or running.result()[0].failure is not None
        (identity,) = identities
        assert [store.list_calls(identity.capture_key(attempt)).records for attempt in (0, 1)] == [(), ()]

    use(body, script=scripted(**script), front=front, timeout_s=0.5)


# ---- what goes wrong


def failure_of(row: Any, **how: Any) -> tuple[FailureClass, str]:
    trajectory = rollout_of(row, **how)
    assert trajectory.failure is not None
    assert not trajectory.rewards
    return trajectory.failure.failure_class, trajectory.failure.cause


@pytest.mark.parametrize(
    ("script", "failure_class", "cause"),
    [
        ({"status": 500, "text": "tools are down"}, FailureClass.ENVIRONMENT, "HTTP 500: tools are down"),
        ({"status": 422, "text": "no such field"}, FailureClass.ENVIRONMENT, "HTTP 422: no such field"),
        ({"status": 504, "text": "late"}, FailureClass.INFRA, "HTTP 504: late"),
        ({"raw": b"<html>"}, FailureClass.ENVIRONMENT, "not JSON"),
        ({"alter": gym_stack.without_reward}, FailureClass.ENVIRONMENT, "reward must be a finite number"),
        ({"alter": gym_stack.without_response}, FailureClass.ENVIRONMENT, "response must be an object"),
        ({"alter": gym_stack.with_nan_log_prob}, FailureClass.ENVIRONMENT, "no finite log-prob"),
        ({"alter": gym_stack.with_token_missing}, FailureClass.ENVIRONMENT, "5 tokens with 6 log-probs"),
        ({"alter": gym_stack.with_other_token}, FailureClass.AGENT, "the tokens were changed"),
        ({"alter": gym_stack.with_broken_prefix}, FailureClass.AGENT, "the tokens were changed"),
        ({"turns": 0}, FailureClass.AGENT, "names no call of the model"),
    ],
)
def test_what_gym_does_wrong_fails_one_rollout_with_its_class(
    script: dict[str, Any], failure_class: FailureClass, cause: str
) -> None:
    def one_of_three(agent: str, row: Any) -> Script:
        return Script(**script) if row["place"] == 1 else Script(turns=2)

    rollouts = rollouts_of(*(row_of("one", place=i) for i in range(3)), script=one_of_three)
    assert [t.failure is None for t in rollouts] == [True, False, True]
    failure = rollouts[1].failure
    assert failure is not None
    assert failure.failure_class is failure_class
    assert cause in failure.cause
    assert not rollouts[1].rewards


def check_failures(rows: Sequence[Any], front: str, expected: Sequence[FailureClass]) -> None:
    """Run the rows: none has a reward, and all keep the tokens that were sampled for them."""
    trajectories = rollouts_of(*rows, front=front)
    assert [t.failure.failure_class if t.failure else None for t in trajectories] == list(expected)
    assert all(t.stop_reason is StopReason.FAILED and not t.rewards for t in trajectories)
    assert all(t.num_turns == 1 for t in trajectories)


def test_each_failure_of_an_episode_has_the_class_of_its_kind_and_no_reward() -> None:
    failures = [{"failure_kind": kind, "failure_reason": "broke", "terminal": True} for kind in sorted(KINDS)]
    failures += [{"stage": stage, "failure_reason": "broke", "terminal": True} for stage in sorted(STAGES)]
    expected = [CLASS_OF_KIND[kind] for kind in sorted(KINDS)] + [CLASS_OF_STAGE[stage] for stage in sorted(STAGES)]
    check_failures([row_of("?", script={"failure": failure}) for failure in failures], "single_agent_turn", expected)


def test_each_failure_that_a_relayed_reply_reports_has_the_class_of_its_kind_and_no_reward() -> None:
    marks: list[dict[str, Any]] = [{"mask_sample": True, "failure_kind": kind} for kind in sorted(KINDS)]
    marks += [{"_ng_failure_class": kind} for kind in sorted(KINDS)]
    rows = [row_of("?", script={"reward": 0.0, "adds": each}) for each in marks]
    check_failures(rows, "legacy_agent", [CLASS_OF_KIND[kind] for kind in sorted(KINDS)] * 2)


def test_a_failure_says_its_kind_stage_and_reason() -> None:
    failure = {"failure_kind": "judge_failed", "stage": "verification", "failure_reason": "away", "terminal": False}
    _, cause = failure_of(row_of("?", script={"failure": failure}), front="single_agent_turn")
    assert cause.endswith("/run: judge_failed at stage verification: away")


def test_other_log_probs_than_were_sampled_are_refused() -> None:
    def script(agent: str, row: Any) -> Script:
        return Script(alter=lambda body: gym_stack.calls_of(body)[0].update(generation_log_probs=[-0.5] * 6))

    failure_class, cause = failure_of("one", script=script)
    assert failure_class is FailureClass.AGENT
    assert "differ by 0.25" in cause


def test_an_answer_that_was_given_before_is_of_another_rollout() -> None:
    scripts = iter([Script(), Script(repeats=True)])

    async def body(setup: Setup) -> None:
        (first,), (second,) = await setup.run("one"), await setup.run("one")
        assert first.failure is None
        assert second.failure is not None
        assert second.failure.failure_class is FailureClass.AGENT

    use(body, script=lambda agent, row: next(scripts))


def test_an_agent_that_hangs_is_infra_and_its_session_is_gone() -> None:
    failure_class, cause = failure_of("one", script=scripted(before=asyncio.Event().wait), timeout_s=0.2)
    assert failure_class is FailureClass.INFRA
    assert "no reply within" in cause


def test_a_rollout_past_its_deadline_ends_what_the_engine_still_does_for_it() -> None:
    async def never(request: GenerationRequest) -> None:
        await asyncio.Event().wait()

    engine = SpeakingGeneration("chatml", hello, before=never)

    async def body(setup: Setup) -> None:
        (trajectory,) = await setup.run("one")
        assert trajectory.failure is not None
        assert trajectory.failure.failure_class is FailureClass.INFRA
        while not engine.num_cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    use(body, generation=engine, timeout_s=2.0)


def test_a_server_that_dies_fails_what_it_ran_and_runs_rollouts_again_once_it_is_back() -> None:
    scripts = iter([Script(dies=True), Script(), Script()])

    async def body(setup: Setup) -> None:
        (lost,) = await setup.run("one")
        assert lost.failure is not None
        assert (lost.failure.failure_class, "connection lost" in lost.failure.cause) == (
            FailureClass.INFRA,
            True,
        )
        back = asyncio.ensure_future(setup.run("one", "two"))  # finds nobody at first
        await setup.stack.start_agent("agent", elsewhere=True)
        assert [t.failure for t in await back] == [None, None]

    use(body, script=lambda agent, row: next(scripts), max_retries=50)


def test_a_started_stack_that_loses_a_server_ends_the_step_and_fails_no_rollout() -> None:
    def script(agent: str, row: Any) -> Script:
        return Script(dies=True) if row["place"] == 1 else Script(before=asyncio.Event().wait)

    async def body(setup: Setup) -> None:
        setup.client.watch(lambda: None)
        with pytest.raises(RolloutError, match="server 'agent' has ended"):
            await setup.run(*(row_of("one", place=i) for i in range(3)))

    use(body, script=script)


def test_a_call_that_the_engine_fails_is_infra_whatever_gym_makes_of_it() -> None:
    failure_class, cause = failure_of("one", generation=SpeakingGeneration("chatml", lambda request, text: None))
    assert failure_class is FailureClass.INFRA
    assert cause.startswith("the engine failed: it was made to fail (")


def test_a_prompt_without_room_is_the_rows_fault() -> None:
    failure_class, cause = failure_of("a long question", max_model_len=24)
    assert failure_class is FailureClass.ENVIRONMENT
    assert "no room" in cause


def test_a_row_that_is_none_fails_alone() -> None:
    async def body(setup: Setup) -> None:
        jobs = jobs_of("one", "two")
        jobs[0] = replace(jobs[0], prompt=replace(jobs[0].prompt, env_state={}))
        first, second = await run_nemo_gym_rollouts(jobs, setup.dependencies, setup.options)
        assert first.failure is not None
        assert first.failure.failure_class is FailureClass.ENVIRONMENT
        assert second.failure is None

    use(body)


def test_a_gateway_that_is_full_is_infra() -> None:
    async def body(setup: Setup) -> None:
        for server in setup.manager._servers:
            server._sessions._max_sessions = 0
        (trajectory,) = await setup.run("one")
        assert trajectory.failure is not None
        assert trajectory.failure.failure_class is FailureClass.INFRA

    use(body)


def test_a_stall_ends_all_and_leaves_nothing() -> None:
    async def body(setup: Setup) -> None:
        with pytest.raises(RolloutError, match=r"waiting for: NeMo Gym's agent \(2\)"):
            await setup.run("one", "two")

    use(body, script=scripted(before=asyncio.Event().wait), stall_timeout_s=0.3)


# ---- beside others


def test_no_more_rollouts_run_at_once_than_were_asked_for() -> None:
    async def body(setup: Setup) -> None:
        rollouts = await setup.run("one", count=12)
        assert [t.failure for t in rollouts] == [None] * 12
        assert setup.stack.most_running <= 3

    use(body, max_concurrency=3)


def test_gyms_prompts_and_an_environments_run_side_by_side_in_order() -> None:
    async def body(setup: Setup) -> None:
        jobs: Sequence[RolloutJob] = jobs_of("one", "two", "three")
        plain = Prompt("e", "game", (Message("user", "question"),), {"number": 0})
        mixed = [jobs[0], RolloutJob(plain, "0:e", 0), jobs[1], jobs[2]]
        rollouts = await run_rollouts(mixed, setup.dependencies, setup.options, run_async_multi_turn_rollout)
        assert [t.prompt.task_name for t in rollouts] == ["gym", "game", "gym", "gym"]
        assert [t.failure for t in rollouts] == [None] * 4

    use(body)
