"""Tensors that one member sends are bit by bit what the others receive, over gloo and several processes."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nemo_rl.distributed import tensor_transfer
from nemo_rl.distributed.tensor_transfer import Rendezvous, TensorStream, member_name
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
