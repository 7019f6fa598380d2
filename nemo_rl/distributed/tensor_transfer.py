"""Named tensors from one process to others: through a bucket on the device that they share, or as a broadcast stream.

Bucket: the sender fills it, the receivers copy it out and acknowledge, repeatedly; either needs no extra memory but the
bucket. It is shared by CUDA IPC handles, on a CPU by a file descriptor. Both meet at a Unix socket of this machine
whose name contains the device.
Stream: chunks that are broadcast to many processes at once, in a process group of their own.
"""

import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl.distributed.devices import shareable_memory
from nemo_rl.distributed.machine import listen_on
from nemo_rl.errors import WorkerError

BUCKET_BYTES = 512 * 2**20
# limit of the meeting, and per tensor or bucket; below that of the policy ranks' collectives, which wait meanwhile
TIMEOUT_S = 120.0
ALIGNMENT = 64  # bytes
CHUNK_BYTES = 64 * 2**20
ABORTED = -1
REPORT_S = 5.0  # time for members to report that a broadcast has failed for them, too
NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"  # torch reads it when a group is made
RETRY_S = 0.05  # between attempts to reach a sender that does not listen yet
DEVICE_ARGUMENT = 6  # position among rebuild_cuda_tensor's arguments, torch 2.13

Header = list[tuple[str, torch.dtype, torch.Size, int]]  # name, dtype, shape, offset in the chunk

_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in the bucket, or the whole tensor if it fits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte of the tensor
    offset: int  # byte of the bucket
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        return self.num_bytes == torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


def new_token() -> str:
    """Return a random token that distinguishes the meetings of one run from all others."""
    return secrets.token_hex(8)


def device_name(device: torch.device) -> str:
    """Return the name of a device that all processes of its machine agree on, whatever they number it."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def send_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
    token: str,
    *,
    device: torch.device,
    num_receivers: int = 1,
    timeout_s: float,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Send all tensors to `num_receivers` processes that call `receive_tensors` for the same device.

    Tensors may be on other devices; each is released before the next one is requested. Raises WorkerError naming the
    device if receivers do not connect or answer within `timeout_s`.
    """
    name = device_name(device)
    peers: list[_Peer] = []
    try:
        peers = _accept(token, name, num_receivers, timeout_s)
        with shareable_memory(device):
            bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        for peer in peers:
            peer.send(None, shared=bucket)
        for pieces in fill(bucket, tensors):
            _synchronize(device)
            for peer in peers:
                peer.send(pieces)
            for peer in peers:
                peer.receive()
        for peer in peers:
            peer.send(())
        for peer in peers:
            peer.receive()  # it no longer has the bucket
    except (OSError, EOFError) as error:
        raise WorkerError(f"weights could not be handed to the engine on device {name}: {error}") from error
    finally:
        for peer in peers:
            peer.close()


def fill(bucket: torch.Tensor, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[Piece, ...]]:
    """Copy tensors into the bucket one after another, and yield its pieces whenever it is full, and at the end."""
    pieces: list[Piece] = []
    end = 0
    for name, tensor in tensors:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype, shape, start, size = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), 0, len(content)
        while start < size or size == 0:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            num_bytes = min(size - start, len(bucket) - offset)
            if num_bytes <= 0 < size:
                yield tuple(pieces)
                pieces, end = [], 0
                continue
            bucket[offset : offset + num_bytes].copy_(content[start : start + num_bytes])
            pieces.append(Piece(name, dtype, shape, start, offset, num_bytes))
            start, end = start + num_bytes, offset + num_bytes
            if size == 0:
                break
        del tensor, content
    if pieces:
        yield tuple(pieces)


def receive_tensors(token: str, *, device: torch.device, timeout_s: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the sender's tensors, each in memory of its own; iterate to the end, since the sender waits.

    Raises WorkerError if no sender answers within `timeout_s`, or if it fails.
    """
    name = device_name(device)
    try:
        peer = _connect(token, name, timeout_s)
    except OSError as error:
        raise WorkerError(f"no policy rank handed over weights on device {name}: {error}") from error
    try:
        shared = peer.receive(device)
        partial: dict[str, torch.Tensor] = {}
        while pieces := peer.receive():
            own = shared[: max(piece.offset + piece.num_bytes for piece in pieces)].clone()
            _synchronize(device)
            peer.send(None)
            yield from _assemble(pieces, own, partial)
            del own
        del shared
        peer.send(None)
    except (OSError, EOFError) as error:
        raise WorkerError(f"the policy rank on device {name} stopped handing over weights: {error!r}") from error
    finally:
        peer.close()


def _assemble(
    pieces: Iterable[Piece], own: torch.Tensor, partial: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield complete tensors; `partial` keeps the others, by name."""
    for piece in pieces:
        dtype = getattr(torch, piece.dtype)
        content = own[piece.offset : piece.offset + piece.num_bytes]
        if not piece.is_whole:
            size = torch.Size(piece.shape).numel() * dtype.itemsize
            if piece.name not in partial:
                partial[piece.name] = torch.empty(size, dtype=torch.uint8, device=own.device)
            whole = partial[piece.name]
            whole[piece.start : piece.start + piece.num_bytes].copy_(content)
            if piece.start + piece.num_bytes < size:
                continue
            content = partial.pop(piece.name)
        yield piece.name, content.view(dtype).view(piece.shape)


class _Peer:
    """The other end of a connection, a process of the same user."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():  # messages are pickled
            connection.close()
            raise ConnectionError("a process of another user answered")

    def send(self, message: Any, *, shared: torch.Tensor | None = None) -> None:
        """Send a message, or in its place access to a tensor's memory."""
        descriptors: list[int] = []
        if shared is not None and shared.device.type == "cuda":
            message = bytes(ForkingPickler.dumps(reduce_tensor(shared)[1]))
        elif shared is not None:
            descriptor, message = shared.untyped_storage()._share_fd_cpu_()
            descriptors = [descriptor]
        payload = pickle.dumps(message)
        socket.send_fds(self._socket, [_LENGTH.pack(len(payload))], descriptors)
        self._socket.sendall(payload)

    def receive(self, device: torch.device | None = None) -> Any:
        """Return a message, or with a `device` the tensor over the memory that it gives access to."""
        header, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1, socket.MSG_WAITALL)
        if len(header) < _LENGTH.size:
            raise EOFError("the connection was closed")
        (remaining,) = _LENGTH.unpack(header)
        payload = bytearray()
        while len(payload) < remaining:
            part = self._socket.recv(remaining - len(payload))
            if not part:
                raise EOFError("the connection was closed")
            payload += part
        message = pickle.loads(bytes(payload))
        if device is None:
            return message
        if device.type == "cuda":
            arguments = list(pickle.loads(message))
            arguments[DEVICE_ARGUMENT] = device.index  # processes may number the same device differently
            return rebuild_cuda_tensor(*arguments)
        storage_type: Any = torch.UntypedStorage  # private API that torch.multiprocessing uses too
        storage = storage_type._new_shared_fd_cpu(descriptors[0], message)
        os.close(descriptors[0])
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def close(self) -> None:
        self._socket.close()


def _address(token: str, name: str) -> str:
    return f"\0nemo_rl_{token}_{name}"


def _accept(token: str, name: str, count: int, timeout_s: float) -> list[_Peer]:
    """Return `count` peers that connect to this device's address within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    peers: list[_Peer] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(_address(token, name))
        listener.listen(count)
        while len(peers) < count:
            listener.settimeout(max(deadline - time.monotonic(), RETRY_S))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                for peer in peers:
                    peer.close()
                problem = f"{len(peers)} of {count} engine workers came within {timeout_s:g} s"
                raise TimeoutError(problem) from error
            connection.settimeout(timeout_s)
            peers.append(_Peer(connection))
    return peers


def _connect(token: str, name: str, timeout_s: float) -> _Peer:
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(_address(token, name))
            return _Peer(connection)
        except ConnectionRefusedError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing listened within {timeout_s:g} s") from error
            time.sleep(RETRY_S)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


class StreamBroken(WorkerError):
    """A member of a tensor stream did not come, or took no part in a broadcast; the stream is unusable."""


class TensorStream:
    """The member `name` of the group `members`; the constructor waits for all of them, at most `timeout_s`.

    The first member sends, the others receive. `device` is where tensors are received; with backend "nccl" it is a CUDA
    device of the member's own. Groups of one store differ in their number. Raises StreamBroken naming the members that
    did not come, for which NCCL itself would wait without a limit, or that took no part in a broadcast.
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
        self._name = name
        self._peers = [member for member in members if member != name]
        self._timeout_s = timeout_s
        self._is_broken = False
        timeout, size = timedelta(seconds=timeout_s), len(members)
        try:
            rank = members.index(name)
            self._is_sender = rank == 0
            self._store = dist.PrefixStore(f"group{group}", dist.TCPStore(host, port, is_master=False, timeout=timeout))
            _meet(self._store, members, name, timeout)
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                with _errors_raised():
                    self._members: Any = dist.ProcessGroupNCCL(self._store, rank, size, options)
            else:
                self._members = dist.ProcessGroupGloo(self._store, rank, size, timeout)
            self._broadcast(torch.zeros(1, device=device))  # connects: a barrier for all members
        except (RuntimeError, ValueError) as error:
            raise StreamBroken(
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
            if not self._is_broken:
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
        """Yield the sent tensors by chunk; iterate to the end, since all members take part in every broadcast."""
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
        try:
            self._members.broadcast([tensor], options).wait()
        except RuntimeError as error:
            self._is_broken = True
            reason = str(error).partition("\n")[0]
            raise StreamBroken(f"{self._blame()} within {self._timeout_s:g} s: {reason}") from error
        return tensor

    def _blame(self) -> str:
        """Tell the other members that the stream broke here; the sender returns which of them are silent about it."""
        silent: list[str] = []
        with suppress(RuntimeError):  # torch's: the store has gone
            self._store.set(f"broken/{self._name}", "")
            if self._is_sender:
                silent = self._find_silent_peers()
        if silent:
            return f"{', '.join(silent)} took no part in a broadcast"
        return f"{self._name} saw no end of a broadcast"

    def _find_silent_peers(self) -> list[str]:
        with suppress(RuntimeError):  # torch's: one is silent
            self._store.wait([f"broken/{peer}" for peer in self._peers], timedelta(seconds=REPORT_S))
        return [peer for peer in self._peers if not self._store.check([f"broken/{peer}"])]


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Let the NCCL groups that are made in the block raise errors and missed deadlines where their work is awaited.

    By default a watchdog thread ends the whole process at either.
    """
    before = os.environ.get(NCCL_BLOCKING_WAIT)
    os.environ[NCCL_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NCCL_BLOCKING_WAIT]
        else:
            os.environ[NCCL_BLOCKING_WAIT] = before


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
