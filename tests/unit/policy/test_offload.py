"""Moving a policy off its device and back: the code of a GPU, on a CPU whose memory is not pinned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.errors import PolicyError
from nemo_rl.policy.batch_transfer import merge_rows
from nemo_rl.policy.fsdp2.worker import FSDP2PolicyWorker
from nemo_rl.policy.offload import Offloader
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.policy.worker import OFFLOAD_PARTS
from tests.contracts.policies import make_policy
from tests.unit.policy.tiny import WeightedNLL, make_batch, saved_model

CPU = torch.device("cpu")


class Synchronizations:
    """Counts the calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def make_mover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Any, Synchronizations]]:
    """Return a factory of policies that move as on a GPU, and of the count of their synchronizations."""
    path = saved_model("qwen2", tmp_path)

    def make() -> tuple[Any, Synchronizations]:
        policy: Any = make_policy(SINGLE_RANK, path, needs_reference=True)
        synchronizations = Synchronizations()
        monkeypatch.setattr(FSDP2PolicyWorker, "_has_own_memory", True)
        policy._offloader = Offloader(CPU, frozen=("reference",), chunk_bytes=4096, synchronize_device=synchronizations)
        return policy, synchronizations

    return make


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    return policy.run_with_weights(lambda weights: {name: tensor.clone() for name, tensor in weights})


def test_memory_of_the_device_is_told_without_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = make_policy(SINGLE_RANK, saved_model("qwen2", tmp_path))
    monkeypatch.setattr("nemo_rl.policy.worker.memory_of_device", lambda: (1, 7))
    monkeypatch.setattr(policy, "_named_weights", None)
    assert policy.device_bytes() == 7


def test_three_steps_with_moves_are_bit_equal_and_reuse_their_buffers(
    make_mover: Callable[[], tuple[Any, Synchronizations]],
) -> None:
    (moved, synchronizations), (kept, _) = make_mover(), make_mover()
    buffers: list[Any] = []
    for seed in range(3):
        batch = make_batch([9, 5, 12, 3, 7, 12, 2, 6], seed=seed)
        assert moved.train_step(batch, WeightedNLL()) == kept.train_step(batch, WeightedNLL())
        before = synchronizations.count
        moved.offload()
        assert synchronizations.count == before + 1
        assert all(t.untyped_storage().nbytes() == 0 for part in OFFLOAD_PARTS for t in moved._part_tensors(part))
        buffers.append([chunk.data_ptr() for part in OFFLOAD_PARTS for chunk in moved._offloader.buffers(part)])
        moved.onload()
        assert synchronizations.count == before + 1  # the return is awaited by streams alone
        for name in ("logprobs", "reference_logprobs"):
            found, expected = (merge_rows([getattr(policy, name)(batch)], batch)[0] for policy in (moved, kept))
            assert torch.equal(found, expected)
    assert buffers[0] == buffers[1] == buffers[2]
    expected = weights_of(kept)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(moved).items())


def test_parts_leave_in_stages_for_a_refit(make_mover: Callable[[], tuple[Any, Synchronizations]]) -> None:
    policy, synchronizations = make_mover()
    batch = make_batch([9, 5, 12, 3, 7, 12, 2, 6])
    policy.train_step(batch, WeightedNLL())
    expected = weights_of(policy)
    policy.offload("optimizer", "reference")
    assert synchronizations.count == 1
    published = weights_of(policy)  # the weights are still there
    assert all(torch.equal(published[name], expected[name]) for name in expected)
    with pytest.raises(PolicyError, match="reference of rank 0 are offloaded; call onload first"):
        policy.reference_logprobs(batch)
    with pytest.raises(PolicyError, match="optimizer of rank 0 are offloaded"):
        policy.train_step(batch, WeightedNLL())
    policy.offload()  # the rest
    assert synchronizations.count == 2
    policy.offload()
    assert synchronizations.count == 2  # nothing is left to move
    with pytest.raises(PolicyError, match="weights of rank 0 are offloaded"):
        weights_of(policy)
    policy.onload("weights")
    assert merge_rows([policy.logprobs(batch)], batch)[0].shape == batch["token_ids"].shape
    policy.onload()
    policy.train_step(batch, WeightedNLL())


def test_part_without_tensors_is_not_awaited() -> None:
    synchronizations = Synchronizations()
    offloader = Offloader(CPU, synchronize_device=synchronizations)
    offloader.offload({"reference": []})
    offloader.onload(["reference", "weights"])
    assert synchronizations.count == 0


def test_storages_that_span_chunks_and_are_shared_come_back() -> None:
    whole = torch.arange(1000, dtype=torch.float32)
    view, half = whole[10:20].view(2, 5), torch.arange(7, dtype=torch.bfloat16)
    offloader = Offloader(CPU, chunk_bytes=1024)
    offloader.offload({"weights": [whole, view, half]})
    assert [len(chunk) for chunk in offloader.buffers("weights")] == [1024] * 4  # 4014 bytes, each storage once
    assert whole.untyped_storage().nbytes() == 0
    offloader.onload(["weights"])
    assert torch.equal(whole, torch.arange(1000, dtype=torch.float32))
    assert torch.equal(view, torch.arange(10, 20, dtype=torch.float32).view(2, 5))
    assert torch.equal(half, torch.arange(7, dtype=torch.bfloat16))


def test_frozen_part_is_copied_out_once() -> None:
    frozen = torch.ones(4)
    offloader = Offloader(CPU, frozen=("reference",))
    offloader.offload({"reference": [frozen]})
    offloader.onload(["reference"])
    offloader.buffers("reference")[0][:16].view(torch.float32).fill_(7)  # what a second copy would overwrite
    offloader.offload({"reference": [frozen]})
    offloader.onload(["reference"])
    assert frozen.tolist() == [7, 7, 7, 7]


class RecordedStream:
    """A stream whose copies, events and waits are recorded."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @contextmanager
    def copies(self) -> Iterator[None]:
        self.calls.append("copies")
        yield

    def record(self) -> str:
        self.calls.append("event")
        return f"event {self.calls.count('event')}"

    def let_current_wait(self, event: str) -> None:
        self.calls.append(f"wait for {event}")


def test_a_part_is_awaited_by_its_first_use_while_those_after_it_arrive(
    make_mover: Callable[[], tuple[Any, Synchronizations]],
) -> None:
    policy, synchronizations = make_mover()
    batch = make_batch([9, 5, 12, 3, 7, 12, 2, 6])
    policy.train_step(batch, WeightedNLL())
    stream: Any = RecordedStream()
    policy._offloader._stream = stream
    policy.offload()
    policy.onload()
    assert stream.calls == ["copies", "event"] * len(OFFLOAD_PARTS)
    stream.calls.clear()
    numbers = {part: OFFLOAD_PARTS.index(part) + 1 for part in OFFLOAD_PARTS}
    policy.logprobs(batch)
    assert stream.calls == [f"wait for event {numbers['weights']}"]
    policy.reference_logprobs(batch)
    policy.train_step(batch, WeightedNLL())
    assert stream.calls[1:] == [f"wait for event {numbers[part]}" for part in ("reference", "optimizer")]
    policy.logprobs(batch)
    assert len(stream.calls) == len(OFFLOAD_PARTS)  # each is awaited once
    assert synchronizations.count == 1


def test_a_part_that_leaves_again_has_arrived_first() -> None:
    stream: Any = RecordedStream()
    offloader = Offloader(CPU, stream=stream)
    tensor = torch.ones(3)
    offloader.offload({"weights": [tensor]})
    offloader.onload(["weights"])
    offloader.offload({"weights": [tensor]})
    assert stream.calls == ["copies", "event", "wait for event 1"]


def test_weights_that_are_kept_on_the_cpu_are_published_on_the_device(tmp_path: Path) -> None:
    """With `cpu_offload` a transport between processes of one GPU gets what is on that GPU; meta stands for it here."""
    alone = RankLayout(init_method="file:///nowhere")
    policy = make_policy(alone, saved_model("qwen2", tmp_path), dtensor_cfg={"cpu_offload": True})
    assert {parameter.device for parameter in policy.module.parameters()} == {CPU}
    policy.device = torch.device("meta")
    devices = policy.run_with_weights(lambda weights: {tensor.device.type for _, tensor in weights})
    assert devices == {"meta"}
