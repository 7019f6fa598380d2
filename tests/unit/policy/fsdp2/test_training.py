import pytest
import torch

from nemo_rl.policy.fsdp2.training import clip_grad_norm


@pytest.mark.parametrize(("max_norm", "expected"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_gradients_are_scaled_to_the_largest_norm_allowed(max_norm: float | None, expected: list[float]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, gradient in zip(parameters[:2], (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    assert clip_grad_norm(parameters, max_norm) == pytest.approx(5.0)
    assert [float(p.grad) for p in parameters[:2] if p.grad is not None] == pytest.approx(expected, rel=1e-4)
