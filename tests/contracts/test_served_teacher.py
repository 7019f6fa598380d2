"""A teacher behind a real vLLM server: log-probs and the most likely tokens are those of Hugging Face in float32."""

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaForCausalLM

from nemo_rl.config.policy import EndpointLimitsConfig, ServedModelConfig
from nemo_rl.errors import ConfigError
from nemo_rl.policy.served_teacher import ServedTeacher
from tests.contracts.openai_server import MAX_LOGPROBS, SERVED_NAME

K = 5
LENGTHS = (64, 17, 2, 40)


def make_batch() -> TensorDict:
    torch.manual_seed(0)
    token_ids = torch.randint(4, 110, (len(LENGTHS), max(LENGTHS)))
    at, lengths = torch.arange(max(LENGTHS))[None], torch.tensor(LENGTHS)
    mask = ((at >= lengths[:, None] // 2) & (at < lengths[:, None])).float()
    return TensorDict(
        {"token_ids": token_ids * (at < lengths[:, None]), "token_mask": mask, "lengths": lengths},
        batch_size=[len(LENGTHS)],
    )


def asked(url: str, call: Any) -> Any:
    async def main() -> Any:
        section = ServedModelConfig(
            base_urls=[url], model=SERVED_NAME, limits=EndpointLimitsConfig(request_timeout_s=120.0)
        )
        teacher = ServedTeacher("teacher", section)
        try:
            return await call(teacher)
        finally:
            await teacher.close()

    return asyncio.run(main())


def test_log_probs_are_those_of_hugging_face(served_model, served_url):
    batch = make_batch()
    logprobs = asked(served_url, lambda teacher: teacher.logprobs(batch))
    exact = distributions(served_model[0], batch).gather(-1, batch["token_ids"][..., None])[..., 0]
    torch.testing.assert_close(logprobs, exact * batch["token_mask"], atol=1e-4, rtol=0)


def test_the_most_likely_tokens_are_those_of_hugging_face(served_model, served_url):
    batch = make_batch()
    ids, logprobs = asked(served_url, lambda teacher: teacher.topk_logprobs(batch, K))
    exact = distributions(served_model[0], batch)
    is_asked = batch["token_mask"] > 0
    torch.testing.assert_close(logprobs[is_asked], exact.topk(K).values[is_asked], atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs[is_asked], exact.gather(-1, ids)[is_asked], atol=1e-4, rtol=0)
    assert not logprobs[~is_asked].any()


def test_a_k_above_the_servers_limit_is_told_before_anything_starts(served_url):
    asked(served_url, lambda teacher: teacher.check(MAX_LOGPROBS))
    with pytest.raises(ConfigError, match=r"--max-logprobs"):
        asked(served_url, lambda teacher: teacher.check(MAX_LOGPROBS + 1))


@torch.no_grad()
def distributions(model: LlamaForCausalLM, batch: TensorDict) -> torch.Tensor:
    """[B, T, V]: entry t is the distribution before token t."""
    logprobs = model(batch["token_ids"]).logits.log_softmax(-1)
    return torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs[:, :-1]], dim=1)
