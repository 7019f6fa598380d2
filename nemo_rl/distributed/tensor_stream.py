"""Named tensors from one process to many at once: chunks that are broadcast in a process group of their own."""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.distributed.machine import listen_on
from nemo_rl.errors import WorkerError

CHUNK_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes
ABORTED = -1

Header = list[tuple[str, torch.dtype, torch.Size, int]]  # name, dtype, shape, offset in the chunk


def member_name(engine: str, worker: int) -> str:
    """Return the name of one worker of an engine among the members of a stream."""
    return f"{engine} worker {worker}"


class Rendezvous:
    """The store that the members of tensor streams find each other by; it lives in one process, e.g. the driver, and
    listens at `host` alone."""

    def __init__(self, host: str) -> None:
        self.host = host
        listener, port = listen_on(host)
        self._store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)

    @property
    def port(self) -> int:
        return self._store.port


class TensorStream:
    """The member `name` of the group `members`; the constructor waits for all of them, at most `timeout_s`.

    The first member sends, the others receive. `device` is where tensors are received; with backend "nccl" it is a CUDA
    device of the member's own. Groups of one store differ in their number. Raises WorkerError naming the members that
    did not come: NCCL itself would wait for them without a limit.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        group: int,
        members: Sequence[str],
        name: str,
        backend: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        self.group = group
        self._device = device
        timeout, size = timedelta(seconds=timeout_s), len(members)
        try:
            rank = members.index(name)
            store = dist.PrefixStore(f"group{group}", dist.TCPStore(host, port, is_master=False, timeout=timeout))
            _meet(store, members, name, timeout)
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._members: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._members = dist.ProcessGroupGloo(store, rank, size, timeout)
            self._broadcast(torch.zeros(1, device=device))  # connects: a barrier for all members
        except (RuntimeError, ValueError) as error:
            raise WorkerError(
                f"{name} could not join the {size} members of a tensor stream at {host}:{port}: {error}"
            ) from error

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcast all tensors; when iterating fails, the receivers' iteration fails too."""
        finished = False
        try:
            chunk: list[tuple[str, torch.Tensor]] = []
            num_bytes = 0
            for name, tensor in tensors:
                chunk.append((name, tensor.detach()))
                num_bytes += tensor.numel() * tensor.element_size()
                if num_bytes >= CHUNK_BYTES:
                    self._send_chunk(chunk)
                    chunk, num_bytes = [], 0
            if chunk:
                self._send_chunk(chunk)
            finished = True
        finally:
            self._broadcast(torch.tensor([0 if finished else ABORTED, 0], device=self._device))

    def _send_chunk(self, chunk: list[tuple[str, torch.Tensor]]) -> None:
        header: Header = []
        end = 0
        for name, tensor in chunk:
            header.append((name, tensor.dtype, tensor.shape, end))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        payload = torch.empty(end, dtype=torch.uint8, device=self._device)
        for (_, tensor), entry in zip(chunk, header, strict=True):
            view_tensor(payload, entry).copy_(tensor)
        pickled = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8).to(self._device)
        self._broadcast(torch.tensor([pickled.numel(), end], device=self._device))
        self._broadcast(pickled)
        self._broadcast(payload)

    def receive(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is sent, chunk by chunk; iterate to the end, since all members take part in every broadcast."""
        while True:
            header_bytes, payload_bytes = self._broadcast(
                torch.zeros(2, dtype=torch.int64, device=self._device)
            ).tolist()
            if header_bytes == ABORTED:
                raise WorkerError("the sender of a tensor stream failed")
            if header_bytes == 0:
                return
            pickled = self._broadcast(torch.empty(header_bytes, dtype=torch.uint8, device=self._device))
            payload = self._broadcast(torch.empty(payload_bytes, dtype=torch.uint8, device=self._device))
            header: Header = pickle.loads(pickled.cpu().numpy().tobytes())
            for entry in header:
                yield entry[0], view_tensor(payload, entry)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._members.broadcast([tensor], options).wait()
        return tensor


def _meet(store: dist.Store, members: Sequence[str], name: str, timeout: timedelta) -> None:
    """Wait until all members are there; raises RuntimeError naming those that are not within `timeout`."""
    store.set(f"member/{name}", "here")
    try:
        store.wait([f"member/{member}" for member in members], timeout)
    except RuntimeError as error:  # torch's DistStoreError
        absent = [member for member in members if not store.check([f"member/{member}"])]
        raise RuntimeError(f"{', '.join(absent)} did not join within {timeout.total_seconds():g} s") from error


def view_tensor(payload: torch.Tensor, entry: tuple[str, torch.dtype, torch.Size, int]) -> torch.Tensor:
    _, dtype, shape, offset = entry
    num_bytes = shape.numel() * dtype.itemsize
    return payload[offset : offset + num_bytes].view(dtype).view(shape)
