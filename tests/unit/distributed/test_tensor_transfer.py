"""Named tensors between processes: a bucket on a shared device, and a broadcast stream."""

import gc
import multiprocessing
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.distributed import tensor_transfer
from nemo_rl.distributed.tensor_transfer import (
    Piece,
    Rendezvous,
    StreamBroken,
    TensorStream,
    device_name,
    fill,
    member_name,
    new_token,
    receive_tensors,
    send_tensors,
)
from nemo_rl.errors import WorkerError

DEADLINE_S = 120.0


def tensors(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("a.weight", torch.randn(5, 7, generator=generator)),
        ("b.weight", torch.randn(3, 4, 2, generator=generator).to(torch.bfloat16)),
        ("transposed", torch.randn(6, 3, generator=generator).T),
        ("scalar", torch.tensor(2.5 + seed, dtype=torch.float64)),
        ("empty", torch.empty(0, 4)),
        ("flags", torch.tensor([True, False, True])),
        ("large", torch.randn(300, 300, generator=generator)),
    ]


MEMBERS = ("the sender", member_name("engine 0", 0), member_name("engine 0", 1))


def join(port: int, name: str, *, group: int = 0, timeout_s: float = DEADLINE_S) -> TensorStream:
    return TensorStream(
        "127.0.0.1",
        port,
        group=group,
        members=MEMBERS,
        name=name,
        backend="gloo",
        timeout_s=timeout_s,
        device=torch.device("cpu"),
    )


def receive_twice(port: int, name: str) -> None:
    stream = join(port, name)
    for seed in (1, 2):
        received = list(stream.receive())
        assert [name for name, _ in received] == [name for name, _ in tensors(seed)]
        for (_, got), (_, sent) in zip(received, tensors(seed), strict=True):
            assert got.dtype == sent.dtype
            assert torch.equal(got, sent)
    with pytest.raises(WorkerError, match="the sender of a tensor stream failed"):
        list(stream.receive())
    later = dict(join(port, name, group=1).receive())  # another group of the same members
    assert later["scalar"] == 5.5


def reporting(function: Callable[..., None], results: Any, *args: Any) -> None:
    try:
        function(*args)
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())


def failing() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(2)
    raise KeyError("no such weight")


def test_all_members_receive_what_is_sent_and_learn_of_a_failure(monkeypatch):
    monkeypatch.setattr(tensor_transfer, "CHUNK_BYTES", 100)  # several chunks, of one tensor and of more
    context = multiprocessing.get_context("spawn")
    meeting, results = Rendezvous("127.0.0.1"), context.Queue()
    members = [context.Process(target=reporting, args=(receive_twice, results, meeting.port, n)) for n in MEMBERS[1:]]
    for member in members:
        member.start()
    stream = join(meeting.port, MEMBERS[0])
    stream.send(tensors(1))
    stream.send(iter(tensors(2)))
    with pytest.raises(KeyError, match="no such weight"):
        stream.send(failing())
    join(meeting.port, MEMBERS[0], group=1).send(tensors(3))
    outcomes = [results.get(timeout=DEADLINE_S) for _ in members]
    for member in members:
        member.join(DEADLINE_S)
    assert outcomes == ["", ""], outcomes


def test_members_that_do_not_come_are_named_before_the_group_is_made():
    """NCCL's own initialisation would wait for them without a limit."""
    meeting = Rendezvous("127.0.0.1")
    absent = "engine 0 worker 0, engine 0 worker 1 did not join within 0.5 s"
    with pytest.raises(WorkerError, match=f"the sender could not join the 3 members .*{absent}"):
        join(meeting.port, MEMBERS[0], timeout_s=0.5)


def test_receiver_whose_sender_does_not_come_names_it():
    meeting = Rendezvous("127.0.0.1")
    with pytest.raises(WorkerError, match="the sender, engine 0 worker 0 did not join"):
        join(meeting.port, MEMBERS[2], timeout_s=0.5)


@pytest.mark.parametrize("hung", [MEMBERS[1:2], pytest.param(MEMBERS[2:], marks=pytest.mark.slow), MEMBERS[1:]])
def test_a_member_that_hangs_in_a_broadcast_is_named_with_the_time_and_the_others_are_told(
    hung: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_transfer, "CHUNK_BYTES", 100)
    meeting, is_over = Rendezvous("127.0.0.1"), threading.Event()

    def take_part(name: str) -> None:
        received = join(meeting.port, name, timeout_s=2.0).receive()
        for index, _ in enumerate(received):
            if name in hung and index == 1:
                is_over.wait(DEADLINE_S)
                return

    with ThreadPoolExecutor(2) as threads:
        members = {name: threads.submit(take_part, name) for name in MEMBERS[1:]}
        stream = join(meeting.port, MEMBERS[0], timeout_s=2.0)
        try:
            with pytest.raises(StreamBroken, match=f"^{', '.join(hung)} took no part in a broadcast within 2 s: "):
                stream.send(tensors(1))
            for name in set(members) - set(hung):
                with pytest.raises(StreamBroken, match=f"^{name} saw no end of a broadcast within 2 s: "):
                    members[name].result(DEADLINE_S)
        finally:
            is_over.set()


def test_nccl_groups_raise_errors_in_place_of_ending_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group itself needs a GPU; torch reads the variable in its constructor."""
    seen: list[str | None] = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments: Any) -> None:
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
            raise ValueError("no GPUs found")

    monkeypatch.setattr(tensor_transfer.dist, "ProcessGroupNCCL", Group)
    meeting = Rendezvous("127.0.0.1")
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        with pytest.raises(StreamBroken, match="no GPUs found"):
            TensorStream(
                "127.0.0.1", meeting.port, group=0, members=("alone",), name="alone", backend="nccl", timeout_s=5.0,
                device=torch.device("cpu"),
            )  # fmt: skip
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert seen == ["1", "1"]


CPU = torch.device("cpu")


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
