from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.errors import WeightSyncError
from nemo_rl.generation import node_file
from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.weight_manifests import DeviceWeights, LocalWeights, WeightChunks
from nemo_rl.weight_sync import object_store
from nemo_rl.weight_sync.object_store import PutWeights


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The object store is a list, a reference an index."""
    stored: list[np.ndarray] = []

    def put(content: np.ndarray) -> int:
        stored.append(content)
        return len(stored) - 1

    monkeypatch.setattr(object_store, "put_bytes", put)
    monkeypatch.setattr(node_file, "get_bytes", lambda reference, timeout_s: stored[reference])
    monkeypatch.setattr(node_file, "default_directory", lambda: tmp_path)
    return stored


def tensors(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((5, 7), value)), ("b", torch.full((3,), value).to(torch.bfloat16)), ("c", torch.eye(20))]


def staged(transfer: int, value: float, **put: Any) -> WeightChunks:
    return PutWeights("weights.bin", transfer, **put)(tensors(value))


def test_weights_of_this_process_are_the_tensors_themselves_and_others_are_refused():
    weights = LocalWeights(tuple(tensors(2.5)))
    assert all(got is given for (_, got), (_, given) in zip(map_weights(weights), weights.tensors, strict=True))
    with pytest.raises(WeightSyncError, match="from a file or from this process, not as DeviceWeights"):
        dict(map_weights(DeviceWeights("token", 1.0)))


@pytest.mark.parametrize("chunk_bytes", [1, 200, 10_000])
def test_weights_come_back_bit_by_bit_however_they_are_cut(chunk_bytes):
    manifest = node_file.write_node_file(staged(1, 2.5, chunk_bytes=chunk_bytes))
    for (name, got), (expected_name, expected) in zip(map_weights(manifest), tensors(2.5), strict=True):
        assert (name, got.dtype) == (expected_name, expected.dtype)
        assert torch.equal(got, expected)
    node_file.release()


def test_each_transfer_is_written_once(store):
    weights = staged(1, 1.0)
    node_file.write_node_file(weights)
    store.clear()  # another engine of this machine asks for nothing
    assert dict(map_weights(node_file.write_node_file(weights)))["a"][0, 0] == 1.0
    again = staged(2, 3.0)
    assert dict(map_weights(node_file.write_node_file(again)))["a"][0, 0] == 3.0
    node_file.release()


def test_files_of_killed_runs_are_removed_and_those_in_use_stay(tmp_path: Path):
    left, used = (tmp_path / f"nemo_rl_weights_node_{name}.bin" for name in ("left", "used"))
    left.write_bytes(b"weights")
    with used.open("wb") as other:
        node_file.fcntl.flock(other, node_file.fcntl.LOCK_SH)
        node_file.write_node_file(staged(1, 1.0))
        assert not left.exists()
        assert used.exists()
    node_file.release()


def test_a_file_that_is_taken_for_a_leftover_while_it_is_written_is_written_again(monkeypatch: pytest.MonkeyPatch):
    whole, removed = node_file.write, []

    def write(file: int, weights: WeightChunks) -> None:
        whole(file, weights)
        if not removed:
            removed.append(file)
            (node_file.default_directory() / weights.name).unlink()

    monkeypatch.setattr(node_file, "write", write)
    assert dict(map_weights(node_file.write_node_file(staged(1, 6.0))))["a"][0, 0] == 6.0
    node_file.release()


def test_the_last_reader_removes_the_file(tmp_path: Path):
    manifest = node_file.write_node_file(staged(1, 1.0))
    with open(manifest.path) as other:
        node_file.fcntl.flock(other, node_file.fcntl.LOCK_SH)
        node_file.release()
        assert Path(manifest.path).exists()
    node_file.write_node_file(staged(2, 1.0))
    Path(manifest.path).unlink()  # by another run that took it for a leftover
    assert dict(map_weights(node_file.write_node_file(staged(3, 4.0))))["a"][0, 0] == 4.0
    node_file.release("weights.bin")
    assert not Path(manifest.path).exists()


def test_a_chunk_ends_with_the_tensor_that_fills_it(store):
    five = [(str(index), torch.ones(16)) for index in range(5)]  # 64 bytes each
    PutWeights("weights.bin", 1, chunk_bytes=128)(five)
    assert [len(chunk) for chunk in store] == [128, 128, 64]
