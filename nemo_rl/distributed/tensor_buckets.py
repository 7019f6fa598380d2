"""Named tensors from one process to others that use the same device: through one bucket of bounded size.

The sender fills the bucket, the receivers copy it out and say so, and so on; neither holds more than the bucket beside
what it has anyway. The bucket is shared by CUDA's handles for memory of another process, and on a CPU by a file
descriptor. They meet at a Unix socket of this machine whose name contains the device.
"""

import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_rl.distributed.devices import shareable_memory
from nemo_rl.errors import WorkerError

BUCKET_BYTES = 512 * 2**20
ALIGNMENT = 64  # bytes
RETRY_S = 0.05  # to reach a sender that does not listen yet
DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor, torch 2.13

_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in the bucket; the whole of it where it fits."""

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
    """Return what distinguishes the meetings of one run from all others."""
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
    device where receivers do not come, or do not answer, within `timeout_s`.
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
    """Yield what a sender of this device sends, in memory of their own; iterate to the end, since the sender waits.

    Raises WorkerError where no sender answers within `timeout_s`, or where it fails.
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
    """Yield tensors that are complete; `partial` keeps the others, by name."""
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
        storage_type: Any = torch.UntypedStorage  # its private half, as torch.multiprocessing uses it
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
