"""Extension kit: the contracts of interfaces.py as functions that a test of your own package calls.

`check_loss`, `check_estimator` and `check_environment` take an `Entry`, a class, a function or a dotted path, with keys
of its section; `check_engine` takes a running engine. Each raises AssertionError with the broken claim. The tests of
this project call them for all built-in parts. Nothing of the program imports this module.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from nemo_rl import batch as keys
from nemo_rl.config.kinds import Kind
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS, ENVIRONMENTS, LOSSES
from nemo_rl.interfaces import Generation, LossFn
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores, TopK
from nemo_rl.types import Completion, EnvStep, GenerationRequest, Message, SamplingParams, TrainingBatch

if TYPE_CHECKING:
    import torch

NAME = "checked"  # name of the part while it is checked
OPTIONAL_KEYS = frozenset(  # present in a batch only if a loss or an estimator requires them
    {keys.PREV_LOGPROBS, keys.REFERENCE_LOGPROBS, keys.TEACHER_LOGPROBS, keys.BASELINE_REWARD}
)
TRAJECTORIES = [0, 0, 1, 2, 2, 3, 4, 4]  # by sample
GROUPS = [0, 0, 0, 1, 1, 1, 1, 1]
NUM_TOKENS = 7
NUM_CANDIDATES = 4
Item = tuple[tuple[Message, ...], Mapping[str, Any]]  # a conversation and its state
PROMPTS = ((5, 6, 7), (100,), tuple(range(40, 90)), (5, 6, 8), (7, 7, 7, 7, 7))


@contextmanager
def _registered(kind: Kind, target: Any) -> Iterator[str]:
    """Make `target` known under a name inside the block; a dotted path or a known name is its own."""
    if isinstance(target, str):
        yield target
        return
    kind.register(NAME)(target)
    try:
        yield NAME
    finally:
        del kind.registered[NAME]


def make_batch(seed: int = 0) -> TrainingBatch:
    """Return a random batch of eight samples of five trajectories in two groups; the last sample has no gradient."""
    import torch
    from tensordict import TensorDict

    generator = torch.Generator().manual_seed(seed)
    size = (len(TRAJECTORIES), NUM_TOKENS)

    def logprobs() -> "torch.Tensor":
        return -torch.rand(size, generator=generator) * 2 - 0.1

    mask = (torch.rand(size, generator=generator) < 0.7).float()
    mask[:, 0], mask[:, 3] = 0, 1
    ids = torch.tensor(TRAJECTORIES)
    by_trajectory = torch.rand(2, int(ids.max()) + 1, generator=generator)
    correct, form = by_trajectory[:, ids]
    values = {
        keys.TOKEN_IDS: torch.randint(0, 50, size, generator=generator),
        keys.TOKEN_MASK: mask,
        keys.LENGTHS: torch.full(size[:1], NUM_TOKENS),
        keys.SAMPLE_MASK: torch.tensor([1.0] * (size[0] - 1) + [0.0]),
        keys.TRAJECTORY_ID: ids,
        keys.GROUP_ID: torch.tensor(GROUPS),
        keys.TRAJECTORY_TOKENS: torch.zeros(int(ids.max()) + 1).index_add_(0, ids, mask.sum(-1))[ids],
        keys.REWARD: correct + form,
        keys.BASELINE_REWARD: torch.tensor([0.5, 1.25])[torch.tensor(GROUPS)],
        keys.REWARD_COMPONENTS: TensorDict({"correct": correct, "form": form}, batch_size=size[:1]),
        keys.TRUNCATED: torch.zeros(size[0], dtype=torch.bool),
        keys.ADVANTAGES: torch.randn(size, generator=generator),
    }
    names = (keys.GENERATION_LOGPROBS, keys.PREV_LOGPROBS, keys.REFERENCE_LOGPROBS, keys.TEACHER_LOGPROBS)
    values |= {name: logprobs() * mask for name in names}
    return TensorDict(values, batch_size=size[:1])


def count_tokens(batch: TrainingBatch) -> Normalizer:
    """Return the divisors of an optimizer step that consists of this batch."""
    trained = batch[keys.SAMPLE_MASK] > 0
    tokens = (batch[keys.TOKEN_MASK][:, 1:] * batch[keys.SAMPLE_MASK][:, None]).sum(-1)
    num_trajectories = float(len(batch[keys.TRAJECTORY_ID][trained].unique()))
    return Normalizer(float(tokens.sum()), num_trajectories, float(tokens[batch[keys.REWARD] > 0].sum()))


def _without_undeclared(batch: TrainingBatch, required: frozenset[str]) -> TrainingBatch:
    return batch.exclude(*(OPTIONAL_KEYS - required))


def _spoil(batch: TrainingBatch, masked_value: float) -> TrainingBatch:
    """Return the batch with `masked_value` for every number that belongs to no trained token."""
    masked = batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK][:, None] == 0
    names = {keys.GENERATION_LOGPROBS, keys.ADVANTAGES, *OPTIONAL_KEYS} & set(batch.keys())
    return batch.clone().update({name: batch[name].masked_fill(masked, masked_value) for name in names})


# ---- losses ----


def check_loss(target: Any, *, seed: int = 0, masked_value: float = 1e4, adds_up: bool = True, **section: Any) -> None:
    """Check a loss: the claims of `interfaces.LossFn`, on a random batch of the policy's own samples.

    It reads only the optional keys that it declares; is finite; any split into micro-batches adds up, in loss, gradient
    and metrics; neither the first token of a sample nor what is under the mask (`masked_value`, which may be NaN)
    changes it; a micro-batch without a trained token gives 0. `target` may be a loss, made already. Set `adds_up` to
    False for a loss that compares the tokens of a micro-batch with each other: splits differ.

    Example: `check_loss("my_lab.losses:Reinforce", kwargs={"entropy_weight": 0.1})`
    """
    import torch

    loss_fn = _open_loss(target, section)
    batch = _without_undeclared(make_batch(seed), loss_fn.required_keys)
    normalizer, scores = count_tokens(batch), _random_scores(loss_fn.required_scores, batch, seed)
    whole = _evaluate(loss_fn, scores, batch, normalizer)
    _assert_finite(whole)
    for split in ([1] * len(batch), [5, 3], [2, len(batch) - 2]) if adds_up else ():
        _check_split(loss_fn, scores, batch, split, whole)

    masked = batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK][:, None] == 0
    spoilt_scores = {name: _fill(values, masked, -1e30) for name, values in scores.items()}
    spoilt = _evaluate(loss_fn, spoilt_scores, _spoil(batch, masked_value), normalizer)
    problem = "values where token_mask * sample_mask is 0 change"
    assert spoilt[0] == whole[0], f"{problem} the loss: {float(spoilt[0])}, not {float(whole[0])}"
    for name, gradient in whole[1].items():
        assert torch.equal(spoilt[1][name], gradient), f"{problem} the gradient of scores.{name}"
    for name, metric in whole[2].items():
        assert spoilt[2][name].value == metric.value, f"{problem} the metric {name!r}"

    with_first = batch.clone()
    with_first[keys.TOKEN_MASK][:, 0] = 1
    gradients = _evaluate(loss_fn, scores, with_first, normalizer)[1]
    assert not gradients["logprobs"][:, 0].any(), "entry 0 of a sample has a gradient; use micro_batches.loss_mask"

    untrained = batch.clone()
    untrained[keys.SAMPLE_MASK] = torch.zeros(len(batch))
    loss, gradients, _ = _evaluate(loss_fn, scores, untrained, Normalizer(0.0, 0.0))
    assert loss == 0, f"the loss of a micro-batch without a trained token is {float(loss)}, not 0"
    assert not any(gradient.any() for gradient in gradients.values()), "a sample whose sample_mask is 0 has a gradient"


Evaluation = tuple["torch.Tensor", "dict[str, torch.Tensor]", dict[str, Metric]]  # loss, gradients by score, metrics


def _open_loss(target: Any, section: Mapping[str, Any]) -> LossFn:
    from nemo_rl.losses.make import make_loss

    if isinstance(target, LossFn) and not isinstance(target, type):
        return target
    with _registered(LOSSES, target) as name:
        return make_loss(LOSSES.read({"type": name, **section}))


def _random_scores(required: RequiredScores, batch: TrainingBatch, seed: int) -> "dict[str, torch.Tensor]":
    """Return a tensor for each score that the loss requires; log-probs are near those of the batch's policy."""
    import torch

    generator = torch.Generator().manual_seed(seed + 1)
    size = tuple(batch[keys.TOKEN_MASK].shape)
    near = batch[keys.GENERATION_LOGPROBS] + 0.3 * torch.randn(size, generator=generator)
    scores = {"logprobs": near * batch[keys.TOKEN_MASK]}
    if required.entropy:
        scores["entropy"] = torch.rand(size, generator=generator)
    if required.topk:
        logits = torch.randn(*size, required.topk + 3, generator=generator)
        scores["topk"] = logits.log_softmax(-1).topk(required.topk).values
    if required.candidates:
        ids = torch.arange(NUM_CANDIDATES).expand(*size, NUM_CANDIDATES)
        logits = torch.randn(2, *size, NUM_CANDIDATES + 3, generator=generator)
        ours, teachers = logits.log_softmax(-1)[..., :NUM_CANDIDATES]
        batch[required.candidates] = ids.contiguous()
        batch[keys.TEACHER_TOPK_LOGPROBS] = teachers.contiguous()
        scores["candidates"] = ours
    return scores


def _evaluate(
    loss_fn: LossFn, scores: "Mapping[str, torch.Tensor]", batch: TrainingBatch, normalizer: Normalizer
) -> Evaluation:
    import torch

    leaves = {name: values.detach().clone().requires_grad_() for name, values in scores.items()}
    topk = leaves.get("topk")
    given = TokenScores(
        leaves["logprobs"],
        leaves.get("candidates"),
        leaves.get("entropy"),
        None if topk is None else TopK(torch.arange(topk.shape[-1]).expand(topk.shape), topk),
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # some losses draw tokens
            loss, metrics = loss_fn(given, batch, normalizer)
    except KeyError as error:
        raise AssertionError(f"the loss reads {error} of the batch, which required_keys does not name") from error
    assert loss.shape == (), f"the loss must be a scalar; its shape is {tuple(loss.shape)}"
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else ()
    assert found, "the loss has no gradient"
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return loss.detach(), gradients, metrics


def _fill(values: "torch.Tensor", masked: "torch.Tensor", value: float) -> "torch.Tensor":
    return values.masked_fill(masked if values.dim() == masked.dim() else masked[..., None], value)


def _assert_finite(found: Evaluation) -> None:
    loss, gradients, metrics = found
    assert loss.isfinite(), f"the loss is {float(loss)}"
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), f"the gradient of scores.{name} is not finite"
    for name, metric in metrics.items():
        assert isinstance(metric, Metric), f"metric {name!r} is a {type(metric).__name__}, not an interfaces.Metric"
        assert not metric.value.requires_grad, f"metric {name!r} has a gradient: detach() it"
        assert math.isfinite(float(metric.value)), f"metric {name!r} is {float(metric.value)}"


def _check_split(
    loss_fn: LossFn, scores: "Mapping[str, torch.Tensor]", batch: TrainingBatch, split: list[int], whole: Evaluation
) -> None:
    """Check that micro-batches of these sizes have together the loss, the gradient and the metrics of the batch."""
    import torch

    normalizer = count_tokens(batch)
    pieces = [
        dict(zip(scores, each, strict=True)) for each in zip(*(v.split(split) for v in scores.values()), strict=True)
    ]
    parts = [_evaluate(loss_fn, *each, normalizer) for each in zip(pieces, batch.split(split), strict=True)]
    loss, gradients, metrics = whole
    problem = f"micro-batches of {split} samples do not add up to the batch (divide by the normalizer's counts):"
    total = sum(float(part[0]) for part in parts)
    assert math.isclose(total, float(loss), rel_tol=1e-6, abs_tol=1e-6), f"{problem} loss {total}, not {float(loss)}"
    for name, gradient in gradients.items():
        joined = torch.cat([part[1][name] for part in parts])
        assert torch.allclose(joined, gradient, rtol=1.3e-6, atol=1e-5), (
            f"{problem} the gradient of scores.{name} differs"
        )
    for name, metric in metrics.items():
        reduce = {"min": min, "max": max}.get(metric.reduction, sum)
        value = reduce(float(part[2][name].value) for part in parts)
        is_same = math.isclose(value, float(metric.value), rel_tol=1e-6, abs_tol=1e-5)
        assert is_same, f"{problem} metric {name!r} ({metric.reduction}) {value}, not {float(metric.value)}"


# ---- advantage estimators ----


def check_estimator(target: Any, *, loss: Any = None, seed: int = 0, **section: Any) -> None:
    """Check an advantage estimator: the claims of `interfaces.AdvantageEstimator`, on a random batch of two groups.

    It reads only the optional keys that it declares, and changes none; returns [B, T] float32, finite at sampled
    tokens; the order of samples and the numbers of groups do not matter. `loss`: the section of the loss (None: ppo's).

    Example: `check_estimator("my_lab.estimators:BestOfGroup", kwargs={"others": -0.05})`
    """
    import torch

    from nemo_rl.algorithms.estimators import make_advantage_estimator

    with _registered(ADVANTAGE_ESTIMATORS, target) as name:
        own = ADVANTAGE_ESTIMATORS.read({"name": name, **section})
        estimator = make_advantage_estimator(own, LOSSES.new() if loss is None else loss)
    batch = _without_undeclared(make_batch(seed), estimator.required_keys).exclude(keys.ADVANTAGES)
    before = batch.clone()
    try:
        advantages = estimator(batch)
    except KeyError as error:
        raise AssertionError(f"the estimator reads {error} of the batch, which required_keys does not name") from error
    assert all((batch[key] == before[key]).all() for key in before.keys()), "the estimator changes the batch"  # noqa: SIM118
    mask = batch[keys.TOKEN_MASK]
    assert advantages.shape == mask.shape, f"advantages are {tuple(advantages.shape)}, not [B, T] {tuple(mask.shape)}"
    assert advantages.dtype == torch.float32, f"advantages are {advantages.dtype}, not float32"
    assert advantages[mask > 0].isfinite().all(), "advantages of sampled tokens are not finite"
    turned = before[torch.arange(len(batch) - 1, -1, -1)]
    turned[keys.TRAJECTORY_ID] = max(TRAJECTORIES) - turned[keys.TRAJECTORY_ID]
    turned[keys.GROUP_ID] = 7 + turned[keys.GROUP_ID]
    again = estimator(turned).flip(0)
    difference = float((again - advantages)[mask > 0].abs().max())
    assert difference < 1e-4, f"advantages change by {difference:.3g} with the order of samples and numbers of groups"


# ---- environments ----


def check_environment(
    target: Any,
    *,
    state: Mapping[str, Any],
    final: str,
    other: str = "zzz",
    question: str = "?",
    batching: bool = False,
    **section: Any,
) -> None:
    """Check an environment: the claims of `interfaces.Environment`, called as rollouts call it.

    One result per item, in order, from calls that overlap and with no items; the caller's state is not changed; the
    answer `final` to `question` ends the conversation with finite rewards whose sum is above 0; `other` is any other
    answer. With `batching`, items of several calls share a call.

    Example: `check_environment(SecondTry, state={"answer": "cba"}, final="cba")`
    """
    entry = {"batching": {"enabled": batching, "max_batch_size": 2, "max_wait_ms": 1}, **section}
    state = {**state, "response_truncated": False}
    good, bad = (((Message("user", question), Message("assistant", answer)), state) for answer in (final, other))
    asyncio.run(_check_environment(target, entry, good, bad))


async def _check_environment(target: Any, entry: dict[str, Any], good: Item, other: Item) -> None:
    _, state = good
    before = repr(state)
    async with _opened_environment(target, entry) as environment:
        assert list(await environment.step([], [])) == [], "a call without items has results"
        calls = [environment.step(*zip(*items, strict=True)) for items in ([good, other, good], [other], [good])]
        mixed, others, goods = await asyncio.gather(*calls)
    assert [len(mixed), len(others), len(goods)] == [3, 1, 1], "one result per item"
    ended = goods[0]
    assert isinstance(ended, EnvStep), f"the final answer has failed: {ended}"
    assert mixed[0] == mixed[2] == ended, f"results are in another order, or differ between calls: {mixed}, {ended}"
    assert mixed[1] == others[0], f"results are in another order, or differ between calls: {mixed}, {others[0]}"
    assert repr(state) == before, f"the caller's state was changed: {state}, not {before}; return a new one"
    assert ended.done, "the final answer does not end the conversation"
    assert all(math.isfinite(reward) for reward in ended.rewards.values()), f"rewards are not finite: {ended.rewards}"
    assert sum(ended.rewards.values()) > 0, f"the final answer has no reward: {ended.rewards}"


@asynccontextmanager
async def _opened_environment(target: Any, entry: dict[str, Any]) -> AsyncIterator[Any]:
    from nemo_rl.environments.registry import make_environment

    with _registered(ENVIRONMENTS, target) as name:
        section = ENVIRONMENTS.read({"type": name, **entry}, key=f"env.{NAME}")
        environment = make_environment(NAME, section)
        try:
            yield environment
        finally:
            await environment.close()


# ---- engines ----


async def check_engine(engine: Generation, model: Any, *, tolerance: float = 1e-4) -> None:
    """Check a running engine: the claims of `interfaces.Generation` about what it samples.

    `model` is a transformers model with the engine's weights, in float32. Log-probs must be the model's within
    `tolerance`, at any temperature; temperature 0 takes the likeliest token; seed and prompt decide the sample,
    whatever else is asked at the time; a stop token ends the completion and belongs to it. The vocabulary needs 101
    tokens.

    Example: `asyncio.run(check_engine(OneByOne(path, "float32", "cpu"), AutoModelForCausalLM.from_pretrained(path)))`
    """
    for claim in ENGINE_CLAIMS:
        await claim(engine, model, tolerance)


def make_request(
    name: str, *, tokens: tuple[int, ...] = (5, 6, 7), seed: int = 0, **sampling: Any
) -> GenerationRequest:
    """Return a request for 12 tokens, unless `sampling` says otherwise."""
    return GenerationRequest(name, tokens, SamplingParams(**{"max_new_tokens": 12, **sampling}), seed, name)


async def _answers(engine: Generation, requests: list[GenerationRequest]) -> dict[str, Completion]:
    """Return the completions by request id."""
    results = [result async for result in engine.generate(requests)]
    asked, answered = sorted(each.request_id for each in requests), sorted(each.request_id for each in results)
    assert answered == asked, f"results of {answered} for requests {asked}: one per request"
    completions = {}
    for result in results:
        assert isinstance(result, Completion), f"request {result.request_id} has failed: {result}"
        completions[result.request_id] = result
        counts = len(result.token_ids), len(result.logprobs)
        assert counts[0] == counts[1], f"{counts[0]} tokens with {counts[1]} log-probs"
    return completions


async def check_tempered_logprobs(engine: Generation, model: Any, tolerance: float) -> None:
    """Check that log-probs are those of log_softmax(logits / temperature)."""
    import torch

    for temperature in (1.0, 0.7):
        sampling: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 20}
        requests = [make_request(str(i), tokens=tokens, seed=i, **sampling) for i, tokens in enumerate(PROMPTS)]
        completions = await _answers(engine, requests)
        for request in requests:
            completion = completions[request.request_id]
            count = len(completion.token_ids)
            assert count == 20, f"{count} tokens without a stop token, not max_new_tokens = 20"
            ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(request.token_ids) - 1 : -1].float() / temperature
            exact = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            error = float((torch.tensor(completion.logprobs) - exact).abs().max())
            assert error <= tolerance, f"log-probs differ from the model's by {error:.3g} at temperature {temperature}"


async def check_greedy(engine: Generation, model: Any, tolerance: float) -> None:
    """Check that temperature 0 takes the likeliest token."""
    import torch

    ids = [5, 6, 7]
    request = make_request("greedy", tokens=tuple(ids), temperature=0.0, max_new_tokens=5)
    for token in (await _answers(engine, [request]))["greedy"].token_ids:
        with torch.no_grad():
            likeliest = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        assert token == likeliest, f"temperature 0 takes token {token}; the likeliest is {likeliest}"
        ids.append(token)


async def check_seeds(engine: Generation, model: Any, tolerance: float) -> None:
    """Check that seed and prompt decide the sample, whatever else is asked, and that other seeds give others."""
    requests = [make_request(str(i), tokens=tokens, seed=i) for i, tokens in enumerate(PROMPTS)]
    together = await _answers(engine, requests)
    for others in (requests[::-1], requests[2:3]):
        for name, completion in (await _answers(engine, others)).items():
            is_same = completion.token_ids == together[name].token_ids
            assert is_same, f"request {name} has another sample among {len(others)} requests; the seed must decide it"
    seeds = await _answers(engine, [make_request(str(i), seed=seed) for i, seed in enumerate((1, 2, 3, 2**64 - 1, -3))])
    assert len({each.token_ids for each in seeds.values()}) > 1, "all seeds give the same sample"


async def check_stop_tokens(engine: Generation, model: Any, tolerance: float) -> None:
    """Check that a stop token ends the completion and belongs to it, and that a call without requests has no result."""
    free = (await _answers(engine, [make_request("free")]))["free"]
    assert free.finish_reason == "length", f"12 tokens without a stop token finish with {free.finish_reason!r}"
    stop = free.token_ids[5]
    stopped = (await _answers(engine, [make_request("stopped", stop_token_ids=(stop,))]))["stopped"]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.token_ids == expected, f"with stop token {stop}: {stopped.token_ids}, not {expected}"
    assert stopped.finish_reason == "stop", f"a stopped completion finishes with {stopped.finish_reason!r}"
    await _answers(engine, [])


EngineClaim = Callable[[Generation, Any, float], Awaitable[None]]
ENGINE_CLAIMS: tuple[EngineClaim, ...] = (check_tempered_logprobs, check_greedy, check_seeds, check_stop_tokens)
