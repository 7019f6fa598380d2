import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from nemo_rl.config.policy import ChunkSize, PolicyConfig, resolve_chunk_size
from nemo_rl.loss_types import RequiredScores, TokenScores
from nemo_rl.policy import attention, log_softmax
from nemo_rl.policy import logprobs as token_scores
from nemo_rl.policy.fsdp2.worker import make_module
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.log_softmax import logprobs_and_entropy
from nemo_rl.policy.logprobs import (
    CausalLogprobs,
    LogitsHead,
    ScoreQuery,
    call_with_recompute,
    score_logits,
)
from tests.unit.policy import tiny
from tests.unit.policy.tiny import MODELS, SIZES, make_batch, over_shards, plain_logprobs

VOCABULARY = 4096


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest floating-point tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.numel())
        return result


def wide_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "hidden_size": 16, "vocab_size": VOCABULARY}))


def largest_tensor(chunk_size: int | None) -> int:
    """Over a forward and backward on 8 x 40 tokens; the weights are made before."""
    module = CausalLogprobs(wide_model(), temperature=1.0, chunk_size=chunk_size)
    token_ids = torch.randint(0, VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as seen:
        module(token_ids, torch.ones_like(token_ids, dtype=torch.bool)).logprobs.sum().backward()
    return seen.numel


def test_logits_of_more_than_a_chunk_never_exist() -> None:
    table = 16 * VOCABULARY  # the gradient of the embedding
    assert largest_tensor(None) == 8 * 39 * VOCABULARY
    assert largest_tensor(16) == table
    assert largest_tensor(32) == 32 * VOCABULARY


@pytest.mark.parametrize(
    ("size", "vocab_size", "expected"),
    [("auto", 151_936, 1024), ("auto", 2**14, 1024), ("auto", 128, 2**17), (256, 128, 256), (None, 128, None)],
)
def test_automatic_chunk_is_of_1024_tokens_or_of_64_mib_of_logits(
    size: ChunkSize, vocab_size: int, expected: int | None
) -> None:
    assert resolve_chunk_size(size, vocab_size) == expected


class CountLogits(TorchDispatchMode):
    """Counts matrix products with VOCABULARY columns."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[1] == tiny.VOCABULARY:
            self.number += 1
        return result


def test_output_layer_of_a_small_vocabulary_is_not_computed_again() -> None:
    """2 x 700 tokens with 37 logits each are two chunks of 1024 tokens, but 0.2 MiB."""
    numbers = {}
    for size in ("auto", 1024):
        config = PolicyConfig(model_name="tiny", precision="float32", logprob_chunk_size=size)
        module = make_module(MODELS["qwen2"](), config, section="policy", temperature=1.0, device=torch.device("cpu"))
        token_ids = torch.zeros(2, 700, dtype=torch.int64)
        with CountLogits() as seen:
            module(token_ids, torch.ones_like(token_ids, dtype=torch.bool)).logprobs.sum().backward()
        numbers[size] = seen.number
    assert numbers == {"auto": 1, 1024: 4}


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_chunks_change_neither_values_nor_gradients(chunk_size: int) -> None:
    batch = make_batch([7, 12, 4])
    results = []
    for size in (None, chunk_size):
        torch.manual_seed(0)
        model = MODELS["gemma2"]()
        module = CausalLogprobs(model, temperature=0.5, chunk_size=size)
        logprobs = module(batch["token_ids"], batch["token_mask"] > 0).logprobs
        (logprobs * batch["advantages"]).sum().backward()
        results.append((logprobs, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_only_needed_positions_are_filled_and_never_the_first() -> None:
    batch = make_batch([5, 5])
    module = CausalLogprobs(MODELS["llama"](), temperature=1.0, chunk_size=None)
    needed = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    logprobs = module(batch["token_ids"], needed).logprobs
    assert (logprobs != 0).tolist() == [[False, False, True, False, False], [False, False, False, False, True]]
    assert needed[0, 0]  # the caller's mask is left alone


def test_nothing_needed_gives_zeros_and_zero_gradients() -> None:
    batch = make_batch([5, 5])
    model = MODELS["llama"]()
    module = CausalLogprobs(model, temperature=1.0, chunk_size=2)
    logprobs = module(batch["token_ids"], torch.zeros(2, 5, dtype=torch.bool)).logprobs
    logprobs.sum().backward()
    assert logprobs.count_nonzero() == 0
    assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_output_head_of_known_families_is_chunked(name: str) -> None:
    assert CausalLogprobs(MODELS[name](), temperature=1.0, chunk_size=4).is_chunked


def test_padding_does_not_change_what_comes_before_it() -> None:
    torch.manual_seed(0)
    module = CausalLogprobs(MODELS["qwen2"](), temperature=1.0, chunk_size=None)
    batch = make_batch([6, 11])
    padded = module(batch["token_ids"], batch["token_mask"] > 0).logprobs
    alone = module(batch["token_ids"][:1, :6], batch["token_mask"][:1, :6] > 0).logprobs
    torch.testing.assert_close(padded[:1, :6], alone, rtol=0, atol=1e-5)


def test_unknown_output_head_falls_back_to_whole_logits(caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(Qwen2ForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    torch.manual_seed(0)
    model = Doubled(Qwen2Config(**SIZES))
    batch = make_batch([6, 11])
    module = CausalLogprobs(model, temperature=1.0, chunk_size=2)
    assert not module.is_chunked
    assert "Doubled" in caplog.text
    logprobs = module(batch["token_ids"], batch["token_mask"] > 0).logprobs
    torch.testing.assert_close(logprobs, plain_logprobs(model, batch), rtol=0, atol=1e-5)


def test_dropout_stays_off_with_recomputed_layers() -> None:
    torch.manual_seed(0)
    model = MODELS["gpt2"]()  # its configuration has a dropout of 0.1
    module = CausalLogprobs(model, temperature=1.0, chunk_size=None)
    recompute_activations(decoder_layers(model))
    batch = make_batch([6, 11])
    first, second = (module(batch["token_ids"], batch["token_mask"] > 0).logprobs for _ in range(2))
    assert torch.equal(first, second)


def asked(name: str = "llama", **options: Any) -> tuple[PreTrainedModel, TokenScores, torch.Tensor]:
    """A model, everything that can be asked of it, and the whole log-softmax [B, T, V] that answers it."""
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = make_batch([6, 11])
    candidates = torch.tensor([3, -1, 7]).expand(2, 11, 3)
    module = CausalLogprobs(model, temperature=0.5, **options)
    wanted = RequiredScores(candidates="c", entropy=True, topk=4)
    scores = module(batch["token_ids"], batch["token_mask"] > 0, wanted, candidates)
    whole = (model(input_ids=batch["token_ids"]).logits / 0.5).log_softmax(-1)
    whole = torch.cat([whole[:, :1] * 0, whole[:, :-1]], dim=1) * batch["token_mask"][..., None]
    return model, scores, whole


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_candidates_entropy_and_most_likely_tokens_are_those_of_the_whole_distribution(chunk_size: int | None) -> None:
    _, scores, whole = asked(chunk_size=chunk_size)
    assert scores.candidates is not None
    assert scores.entropy is not None
    assert scores.topk is not None
    torch.testing.assert_close(scores.candidates[..., 0], whole[..., 3], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.candidates[..., 2], whole[..., 7], rtol=0, atol=1e-5)
    assert scores.candidates[..., 1].count_nonzero() == 0
    torch.testing.assert_close(scores.entropy, -(whole.exp() * whole).sum(-1), rtol=0, atol=1e-5)
    needed = whole.abs().sum(-1) > 0
    values, ids = whole.topk(4)
    torch.testing.assert_close(scores.topk.logprobs[needed], values[needed], rtol=0, atol=1e-5)
    assert torch.equal(scores.topk.ids[needed], ids[needed])
    assert scores.topk.logprobs[~needed].count_nonzero() == 0


def test_chunks_change_no_gradient_of_candidates_and_entropy() -> None:
    gradients = []
    for size in (None, 3):
        model, scores, _ = asked(chunk_size=size)
        assert scores.candidates is not None
        assert scores.entropy is not None
        (scores.logprobs.sum() + (scores.candidates**2).sum() + scores.entropy.sum()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for whole, chunked in zip(*gradients, strict=True):  # sums over 17 tokens: rounded relative to the largest entry
        torch.testing.assert_close(whole, chunked, rtol=0, atol=1e-5 * whole.abs().max().item())


@pytest.fixture(params=[1, 40, 2**22], ids=["row by row", "in blocks", "at once"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_softmax, "CPU_BLOCK", request.param)


def test_values_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([[0, 1], [1, 1]]), entropy=True)
    expected = [[math.log(0.25), math.log(0.75)], [math.log(0.5)] * 2]
    torch.testing.assert_close(logprobs, torch.tensor(expected))
    of_the_first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(entropy, torch.tensor([of_the_first, math.log(2.0)]))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_are_those_of_log_softmax(entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(7, 13, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(13, (7, 4), generator=generator)
    ids[2] = 5  # the same token twice
    grad_logprobs = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    grad_entropy = torch.randn(7, generator=generator, dtype=torch.float64)
    results = []
    for own in (True, False):
        leaf = weights.clone().requires_grad_()
        logits = leaf * 1.5
        if own:
            logprobs, entropies = logprobs_and_entropy(logits, ids, entropy=entropy)
        else:
            everything = logits.log_softmax(-1)
            logprobs, entropies = everything.gather(1, ids), -(everything.exp() * everything).sum(-1) * entropy
        ((logprobs * grad_logprobs).sum() + (entropies * grad_entropy).sum()).backward()
        results.append((logprobs, entropies, leaf.grad))
    torch.testing.assert_close(results[0], results[1])


def test_second_backward_pass_is_refused() -> None:
    """The first has written over the logits."""
    logits = torch.randn(2, 3, requires_grad=True) * 2
    logprobs, _ = logprobs_and_entropy(logits, torch.zeros(2, 1, dtype=torch.int64))
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def all_scores_and_gradient(
    logits: torch.Tensor, shard: Any = None
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    candidates = torch.randint(-2, 13, (6, 3), generator=generator)
    targets = torch.tensor([0, 4, 5, 12, 4, 9])
    leaf = logits.clone().requires_grad_()
    scores = score_logits(leaf * 1.0, ScoreQuery(targets, candidates, entropy=True, topk=5), shard)
    assert scores.candidates is not None
    assert scores.entropy is not None
    assert scores.topk is not None
    loss = scores.logprobs.sum() + (scores.candidates**2).sum() + (scores.entropy * torch.arange(6)).sum()
    (loss + (scores.topk.logprobs * torch.arange(5)).sum()).backward()
    assert leaf.grad is not None
    values = [scores.logprobs, scores.candidates, scores.entropy, scores.topk.logprobs]
    return values, scores.topk.ids, leaf.grad


@pytest.mark.parametrize("sizes", [(5, 8), (3, 6, 4)])  # 3 and 4 are fewer than the 5 most likely
def test_scores_and_gradients_of_a_split_vocabulary_are_those_of_the_whole(sizes: tuple[int, ...]) -> None:
    logits = torch.randn(6, 13, generator=torch.Generator().manual_seed(0)) * 3
    values, ids, gradient = all_scores_and_gradient(logits)
    results = over_shards(all_scores_and_gradient, logits, sizes)
    for own_values, own_ids, _ in results:
        torch.testing.assert_close(own_values, values, rtol=0, atol=1e-6)
        assert torch.equal(own_ids, ids)
    torch.testing.assert_close(torch.cat([g for *_, g in results], dim=1), gradient, rtol=1e-6, atol=1e-6)


def logits_and_gradients(head: torch.nn.Linear, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    states = hidden.clone().requires_grad_()
    logits = LogitsHead()(head, states)
    found = torch.autograd.grad(logits.square().sum(), [states, head.weight])
    return logits.detach(), *found


def test_logits_of_bfloat16_are_summed_and_kept_in_float32_where_the_engine_has_them_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 64).bfloat16(), torch.nn.Linear(64, 37, bias=False).bfloat16()
    exact = hidden.double() @ head.weight.double().T
    logits, *gradients = logits_and_gradients(head, hidden)
    monkeypatch.setattr(token_scores, "KEEPS_FLOAT32_LOGITS", False)
    rounded, *_ = logits_and_gradients(head, hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=0)
    assert (rounded - exact).abs().max() > 1e-3
    expected = torch.autograd.grad(  # of the same logits, rounded only in the backward pass
        (hidden.float() @ head.weight.float().T).square().sum(), [head.weight]
    )
    torch.testing.assert_close(gradients[1].float(), expected[0].float(), rtol=2e-2, atol=1e-1)
    torch.testing.assert_close(gradients[0].double(), 2 * exact @ head.weight.double(), rtol=2e-2, atol=1e-1,
                               check_dtype=False)  # fmt: skip
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
    biased = torch.nn.Linear(64, 37).bfloat16()
    assert torch.equal(LogitsHead()(biased, hidden), biased(hidden).float())


class CountCalls(TorchDispatchMode):
    """Counts dispatched operations, most of which are a launch each on an accelerator."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


QWEN_1_5B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}


def calls_of_a_head_chunk(*, entropy: bool) -> int:
    """Forward, and the backward pass that computes the chunk again; on no device at all."""
    hidden = torch.empty(1024, 1536, device="meta", dtype=torch.bfloat16, requires_grad=True)
    head = torch.nn.Linear(1536, 151936, bias=False, device="meta", dtype=torch.bfloat16)

    def score(states: torch.Tensor, query: ScoreQuery) -> TokenScores:
        return score_logits(LogitsHead()(head, states) / 0.7, query)

    with CountCalls() as seen:
        query = ScoreQuery(torch.empty(1024, dtype=torch.int64, device="meta"), entropy=entropy)
        scores = call_with_recompute(score, hidden, query)
        (scores.logprobs.sum() + (0 if scores.entropy is None else scores.entropy.sum())).backward()
    return seen.number


def test_head_chunk_of_a_large_vocabulary_is_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three blocks of rows; in those of a CPU's cache there are 38."""
    assert calls_of_a_head_chunk(entropy=False) <= 120
    assert calls_of_a_head_chunk(entropy=True) <= 200
    monkeypatch.setattr(log_softmax, "ACCELERATOR_BLOCK", log_softmax.CPU_BLOCK)
    assert calls_of_a_head_chunk(entropy=True) > 1000


def calls_of_layers(number: int) -> tuple[int, int]:
    """Forward and backward on a pack of 8,192 tokens, with the kernel for variable lengths."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_1_5B, num_hidden_layers=number)).bfloat16().eval()
        token_ids = torch.empty(1, 8192, dtype=torch.int64)
        bounds, is_not_padding = torch.empty(3, dtype=torch.int32), torch.ones(2, 4096, dtype=torch.bool)
    model.set_attn_implementation(attention.PACKED_ATTENTION)
    pack = attention.PackedSequences((4096, 4096), bounds, is_not_padding, token_ids)
    with CountCalls() as forward:
        hidden = model.base_model(input_ids=token_ids, position_ids=token_ids, pack=pack, use_cache=False)
    with CountCalls() as backward:
        hidden.last_hidden_state.sum().backward()
    return forward.number, backward.number


def test_decoder_layer_of_a_pack_is_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not grow with the number of sequences, as they do in the loop over them."""
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value: True)
    one, two = calls_of_layers(1), calls_of_layers(2)
    assert two[0] - one[0] <= 90
    assert two[1] - one[1] <= 170
