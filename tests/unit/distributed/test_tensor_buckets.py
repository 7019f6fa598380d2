"""Tensors go from process to process through one bucket, bit by bit, on a CPU by the descriptor of its memory."""

import gc
import multiprocessing
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nemo_rl.distributed import tensor_transfer
from nemo_rl.distributed.tensor_transfer import Piece, device_name, fill, new_token, receive_tensors, send_tensors
from nemo_rl.errors import WorkerError
from tests.unit.distributed.test_tensor_stream import tensors

CPU = torch.device("cpu")
DEADLINE_S = 120.0


def test_pieces_fill_the_bucket_and_a_large_tensor_is_cut():
    bucket = torch.zeros(256, dtype=torch.uint8)
    large = torch.arange(150, dtype=torch.int16)  # 300 bytes
    made = list(
        fill(bucket, [("a", torch.ones(3)), ("large", large), ("b", torch.ones(2, 2)), ("none", torch.ones(0))])
    )
    assert made == [
        (Piece("a", "float32", (3,), 0, 0, 12), Piece("large", "int16", (150,), 0, 64, 192)),
        (
            Piece("large", "int16", (150,), 192, 0, 108),
            Piece("b", "float32", (2, 2), 0, 128, 16),
            Piece("none", "float32", (0,), 0, 192, 0),
        ),
    ]
    assert bucket[:108].view(torch.int16).tolist() == list(range(96, 150))


def own_tensors(rank: int) -> list[tuple[str, torch.Tensor]]:
    return tensors(seed=rank)


def receive_in_a_process(token: str, results: Any, rank: int) -> None:
    """Act as the worker of an engine on the device of policy rank `rank`."""
    try:
        received = list(receive_tensors(token, device=CPU, timeout_s=DEADLINE_S))
        for (name, got), (expected, sent) in zip(received, own_tensors(rank), strict=True):
            assert (name, got.dtype, got.shape) == (expected, sent.dtype, sent.shape)
            assert torch.equal(got, sent)
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


def test_two_ranks_hand_their_tensors_to_two_other_processes_bit_by_bit():
    context = multiprocessing.get_context("spawn")
    results, tokens = context.Queue(), [new_token(), new_token()]  # in place of two devices
    workers = [context.Process(target=receive_in_a_process, args=(t, results, rank)) for rank, t in enumerate(tokens)]
    for worker in workers:
        worker.start()
    with ThreadPoolExecutor(2) as ranks:

        def send(rank: int) -> None:
            send_tensors(own_tensors(rank), tokens[rank], device=CPU, timeout_s=DEADLINE_S, bucket_bytes=1000)

        list(ranks.map(send, range(2)))
    outcomes = [results.get(timeout=DEADLINE_S) for _ in workers]
    for worker in workers:
        worker.join(DEADLINE_S)
    assert outcomes == ["", ""], outcomes


class Ledger:
    """The bytes of gathered tensors that are alive, and the most that ever were."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def gather(self, count: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(count):
            tensor = torch.full((size,), index, dtype=torch.uint8)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(tensor, self._freed, size)
            yield f"weight {index}", tensor
            del tensor

    def _freed(self, size: int) -> None:
        self.now -= size


def test_sender_holds_one_bucket_and_at_most_two_tensors_whatever_the_model_has(monkeypatch: pytest.MonkeyPatch):
    allocated: list[int] = []
    empty = torch.empty

    def recorded(*size: Any, **options: Any) -> torch.Tensor:
        allocated.append(size[0])
        return empty(*size, **options)

    ledger, token, sizes = Ledger(), new_token(), []
    with ThreadPoolExecutor(1) as worker:
        received = worker.submit(
            lambda: [
                (name, int(tensor[0]), len(tensor))
                for name, tensor in receive_tensors(token, device=CPU, timeout_s=DEADLINE_S)
            ]
        )
        monkeypatch.setattr(tensor_transfer.torch, "empty", recorded)
        send_tensors(ledger.gather(40, 300), token, device=CPU, timeout_s=DEADLINE_S, bucket_bytes=1024)
        monkeypatch.undo()
        assert received.result(DEADLINE_S) == [(f"weight {index}", index, 300) for index in range(40)]
    gc.collect()
    sizes = [size for size in allocated if size == 1024]
    assert (len(sizes), ledger.now) == (1, 0)
    assert ledger.peak <= 600


def test_several_workers_of_one_device_receive_the_same():
    token = new_token()
    with ThreadPoolExecutor(2) as workers:
        received = [
            workers.submit(lambda: dict(receive_tensors(token, device=CPU, timeout_s=DEADLINE_S))) for _ in range(2)
        ]
        send_tensors(tensors(1), token, device=CPU, num_receivers=2, timeout_s=DEADLINE_S, bucket_bytes=500)
        for each in received:
            assert torch.equal(each.result(DEADLINE_S)["large"], dict(tensors(1))["large"])


def test_worker_that_does_not_come_is_an_error_that_names_the_device():
    assert device_name(CPU) == "cpu"
    with pytest.raises(WorkerError, match=r"engine on device cpu: 0 of 1 engine workers came within 0\.1 s"):
        send_tensors(tensors(1), new_token(), device=CPU, timeout_s=0.1, bucket_bytes=500)


def test_rank_that_does_not_come_is_an_error_that_names_the_device():
    with pytest.raises(WorkerError, match=r"no policy rank handed over weights on device cpu: .* within 0\.1 s"):
        list(receive_tensors(new_token(), device=CPU, timeout_s=0.1))


def test_rank_that_fails_halfway_fails_its_worker_too():
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        raise KeyError("no such weight")

    token = new_token()
    with ThreadPoolExecutor(1) as worker:
        received = worker.submit(lambda: list(receive_tensors(token, device=CPU, timeout_s=DEADLINE_S)))
        with pytest.raises(KeyError, match="no such weight"):
            send_tensors(failing(), token, device=CPU, timeout_s=DEADLINE_S, bucket_bytes=500)
        with pytest.raises(WorkerError, match="stopped handing over"):
            received.result(DEADLINE_S)
