import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.errors import WeightSyncError
from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.weight_sync import shared_memory
from nemo_rl.weight_sync.object_store import PutWeights
from nemo_rl.weight_sync.shared_memory import ALIGNMENT, SharedMemory, WeightFile, WriteWeightFile, close_weight_file


def tensors() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        ("a.weight", torch.randn(5, 7)),
        ("b.weight", torch.randn(3, 4, 2).to(torch.bfloat16)),
        ("transposed", torch.randn(6, 3).T),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("empty", torch.empty(0, 4)),
        ("flags", torch.tensor([True, False, True])),
        ("large", torch.randn(300, 300)),
    ]


def test_tensors_come_back_bit_by_bit(tmp_path: Path):
    file = WeightFile(tmp_path)
    manifest = file.write(tensors())
    back = dict(map_weights(manifest))
    assert list(back) == [name for name, _ in tensors()]
    for name, tensor in tensors():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    assert all(entry.offset % ALIGNMENT == 0 for entry in manifest.entries)
    file.close()


def test_second_write_reuses_the_file(tmp_path: Path):
    file = WeightFile(tmp_path)
    first = file.write(tensors())
    second = file.write((name, tensor.clone().fill_(1)) for name, tensor in tensors())
    assert second == first
    assert all(bool((tensor == 1).all()) for _, tensor in map_weights(second))
    assert len(list(tmp_path.iterdir())) == 1
    file.close()


def test_writing_into_mapped_weights_leaves_the_file_alone(tmp_path: Path):
    file = WeightFile(tmp_path)
    manifest = file.write([("a", torch.zeros(4))])
    dict(map_weights(manifest))["a"].fill_(9)
    assert dict(map_weights(manifest))["a"].tolist() == [0.0] * 4
    file.close()


def test_close_removes_the_file(tmp_path: Path):
    file = WeightFile(tmp_path)
    file.write(tensors())
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_killed_runs_are_removed_and_those_in_use_stay(tmp_path: Path):
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from nemo_rl.weight_sync.shared_memory import WeightFile
        WeightFile(Path(sys.argv[1]))
        os._exit(0)  # as if killed: nothing is cleaned up
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)
    assert len(list(tmp_path.iterdir())) == 1
    used = WeightFile(tmp_path)
    other = WeightFile(tmp_path)
    assert set(tmp_path.iterdir()) == {used.path, other.path}
    used.close()
    other.close()


def test_full_memory_falls_back_to_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    allocate = os.posix_fallocate

    def limited(file: int, offset: int, length: int) -> None:
        if str(small) in os.readlink(f"/proc/self/fd/{file}") and length > 4096:
            raise OSError(28, "No space left on device")
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(large))
    file = WeightFile(small)
    manifest = file.write(tensors())
    assert Path(manifest.path).parent == large
    assert all(torch.equal(tensor, dict(tensors())[name]) for name, tensor in map_weights(manifest))
    assert list(small.iterdir()) == []
    file.close()


def test_no_room_at_all_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    file = WeightFile(tmp_path)
    with pytest.raises(WeightSyncError, match="no room for"):
        file.write(tensors())
    file.close()


DEADLINE_S = 120.0


def write_until_told(connection: Any) -> None:
    """A policy rank: what it is handed was pickled, and so is its answer."""
    write: WriteWeightFile = connection.recv()
    for value in (1.0, 2.0):
        connection.send(write([("a", torch.full((3, 2), value))]))
        connection.recv()


def test_the_file_stays_open_in_the_policys_process_and_is_written_again():
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    rank = multiprocessing.get_context("spawn").Process(target=write_until_told, args=(theirs,))
    rank.start()
    ours.send(WriteWeightFile())
    manifests = []
    for value in (1.0, 2.0):
        assert ours.poll(DEADLINE_S)
        manifests.append(ours.recv())
        assert dict(map_weights(manifests[-1]))["a"].tolist() == [[value] * 2] * 3
        ours.send("go on")
    rank.join(DEADLINE_S)
    assert manifests[0] == manifests[1]
    assert not Path(manifests[0].path).exists()  # gone with its process


def test_the_driver_removes_a_file_that_another_process_wrote(tmp_path: Path):
    left = tmp_path / "weights.bin"
    left.touch()
    sync = SharedMemory()
    sync._path = left
    sync.close()
    sync.close()
    assert not left.exists()


def test_the_drivers_own_file_is_removed():
    class Here:
        async def run_with_weights(self, use: Any) -> Any:
            return use([("a", torch.ones(2))])

    sync = SharedMemory()
    manifest = asyncio.run(sync.stage(Here()))  # type: ignore[arg-type]
    assert Path(manifest.path).exists()
    sync.close()
    assert not Path(manifest.path).exists()
    close_weight_file(sync._write.key)  # nothing


def test_what_is_called_in_the_policys_process_can_be_sent_there():
    for use in (WriteWeightFile(), PutWeights("name", 3)):
        assert pickle.loads(pickle.dumps(use)) == use
