import asyncio
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import torch

from nemo_rl.generation.weight_reading import map_weights
from nemo_rl.weight_sync.cuda_ipc import FreeWeights, HoldWeights
from nemo_rl.weight_sync.object_store import PutWeights
from nemo_rl.weight_sync.shared_memory import SharedMemory, WriteWeightFile, close_weight_file

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
    for use in (WriteWeightFile(), PutWeights("name", 3), HoldWeights(), FreeWeights("key")):
        assert pickle.loads(pickle.dumps(use)) == use
