"""Copies of a checkpoint: where they lie, how often the device is awaited, and that saves reuse their memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.policy.host_copies import ALIGNMENT, BLOCK_BYTES, HostCopies
from nemo_rl.policy.ranks import RankLayout
from tests.contracts.policies import make_policy
from tests.unit.policy.tiny import WeightedNLL, make_batch, saved_model

CPU = torch.device("cpu")


class Calls:
    """Counts the calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_copies_fill_blocks_in_order_and_each_has_its_own_storage() -> None:
    memory = HostCopies(CPU, block_bytes=4 * ALIGNMENT)
    sources = [torch.arange(3.0), torch.arange(7, dtype=torch.bfloat16), torch.rand(40, 5), torch.tensor(2.5),
               torch.empty(0, 3)]  # fmt: skip
    copies = [memory.copy(source) for source in sources]
    assert all(torch.equal(found, source) and found.dtype == source.dtype
               for found, source in zip(copies, sources, strict=True))  # fmt: skip
    first, second, large, scalar, _ = (copy.untyped_storage() for copy in copies)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    assert (first.nbytes(), second.nbytes(), large.nbytes(), scalar.nbytes()) == (12, 14, 800, 4)
    assert memory.num_bytes == 4 * ALIGNMENT + 1024  # 800 bytes have a block of their own
    assert scalar.data_ptr() - second.data_ptr() == ALIGNMENT  # the last one goes where the first block has room


def test_matrices_of_a_7b_model_fill_their_blocks() -> None:
    """28 layers of Qwen2.5-7B in float32, four matrices of attention and three of 272 MB each, all by 64."""
    memory, taken = HostCopies(CPU, block_bytes=BLOCK_BYTES // 64), 0
    for _ in range(28):
        for width in (3584, 512, 512, 3584, 18944, 18944, 18944):
            memory._take(4 * 3584 * width // 64)
            taken += 4 * 3584 * width // 64
    assert memory.num_bytes < 1.2 * taken


def test_a_save_of_many_tensors_waits_once() -> None:
    wait = Calls()
    memory = HostCopies(CPU, synchronize_device=wait)
    for _ in range(10):
        memory.copy(torch.ones(5))
    assert wait.count == 0
    memory.wait()
    assert wait.count == 1


def test_the_next_copies_lie_where_those_before_lay() -> None:
    memory = HostCopies(CPU, block_bytes=256)
    places = []
    for value in (1.0, 2.0):
        copies = [memory.copy(torch.full((size,), value)) for size in (10, 100, 3)]
        assert all(bool((copy == value).all()) for copy in copies)
        places.append([copy.data_ptr() for copy in copies])
        memory.restart()
    assert places[0] == places[1]


@pytest.mark.parametrize("options", [{}, {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 2}}}])
def test_saves_reuse_their_memory_and_hold_what_the_policy_holds(tmp_path: Path, options: dict[str, Any]) -> None:
    """The second save's files are the second step's weights, and a policy that loads them goes on as the first does."""
    layout = RankLayout(init_method=f"file:///{tmp_path}/group")
    path = saved_model("qwen2", tmp_path)
    policy: Any = make_policy(layout, path, **options)
    batch = make_batch([9, 5, 12, 3, 7, 12, 2, 6])
    kept = []
    for step in (1, 2):
        policy.train_step(batch, WeightedNLL())
        policy.save(tmp_path / f"step_{step}", save_optimizer=True)
        expected = policy.run_with_weights(lambda weights: {name: tensor.clone() for name, tensor in weights})
        policy.finish_save()
        found = load_file(tmp_path / f"step_{step}/weights/model.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in found)
        blocks = [block.data_ptr() for block in policy._saving.memory._blocks]
        staged = policy._saving._stager._state_dict_stager._cached_storage_mapping
        kept.append((blocks, sorted(copy.data_ptr() for copy in staged.values())))
    assert kept[0] == kept[1]
    assert kept[0][0]
    assert kept[0][1]
    resumed = make_policy(layout, path, **options)
    resumed.load(tmp_path / "step_2")
    assert resumed.train_step(batch, WeightedNLL()) == policy.train_step(batch, WeightedNLL())
    policy.close()
    resumed.close()
