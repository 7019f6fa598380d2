from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from nemo_rl.interfaces import RequiredScores, TokenScores
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from tests.unit.policy.tiny import MODELS, SIZES, make_batch, plain_logprobs

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
