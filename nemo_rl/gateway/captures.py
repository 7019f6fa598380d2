"""Records of model calls that a client captures by rollout: stored once, frozen as a snapshot, retired by the trainer.

NeMo Gym's model server stores one record per call for agents whose replies carry no tokens; the trainer freezes a
rollout's records and retires exactly what it consumed (nemo_gym/token_id_capture/protocols.py of nemo-gym 0.7). Records
are opaque here. No I/O; the clock is passed in.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_rl.gateway.request_errors import RequestError


@dataclass(frozen=True, slots=True)
class CaptureSnapshot:
    """One state of a rollout's records."""

    records: tuple[bytes, ...]  # JSON as it was stored, in the order of the first store
    is_incomplete: bool  # a call failed to be captured, or was announced and never stored
    snapshot_id: str  # equal for equal states
    version: int  # grows with every change
    problem: str = ""  # why a record was refused, if one was for want of room


@dataclass(frozen=True, slots=True)
class CapturedCalls:
    """Records of a rollout from some index on."""

    serial: int  # differs between captures under the same rollout id
    records: tuple[bytes, ...]


@dataclass(slots=True)
class _Capture:
    serial: int
    last_used_at: float = 0.0
    records: dict[str, bytes] = field(default_factory=dict)  # by call
    announced: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    version: int = 0
    is_frozen: bool = False
    problem: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.records.values()))

    def snapshot(self, rollout_id: str) -> CaptureSnapshot:
        digest = hashlib.sha256(f"{rollout_id}\n{self.version}".encode())
        for call_id, record in self.records.items():
            digest.update(f"\n{call_id}\n".encode() + hashlib.sha256(record).digest())
        is_incomplete = bool(self.failed or self.announced - self.records.keys())
        return CaptureSnapshot(
            tuple(self.records.values()), is_incomplete, digest.hexdigest(), self.version, self.problem
        )


class CaptureStore:
    """The captures of one server: at most `max_bytes` of records; a rollout lives `ttl_s` s after its last use."""

    def __init__(self, *, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._captures: OrderedDict[str, _Capture] = OrderedDict()  # longest unused first
        self._num_bytes = 0
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._captures)

    def put(self, rollout_id: str, call_id: str, record: bytes) -> None:
        """Store the record of a call; storing the same bytes again changes nothing.

        Raises RequestError 409 for another record of the same call, or for a frozen rollout; 429 if the store is full.
        """
        self.expire()
        capture = self._use(rollout_id)
        if (stored := capture.records.get(call_id)) is not None:
            if stored != record:
                raise RequestError(409, f"call {call_id} is stored with another record", code="record_conflict")
            return
        if capture.is_frozen:
            raise RequestError(409, "this rollout is frozen", code="rollout_frozen")
        if self._num_bytes + len(record) > self._max_bytes:
            capture.problem = f"captured records fill {self._max_bytes} bytes; raise gateway.max_captured_mib"
            raise RequestError(429, capture.problem, code="over_capacity")
        self._num_bytes += len(record)
        capture.records[call_id] = record
        capture.version += 1

    def announce(self, rollout_id: str, call_id: str) -> None:
        """Note a call before it is made: without a record the rollout is incomplete."""
        capture = self._use(rollout_id)
        if call_id not in capture.announced:
            capture.announced.add(call_id)
            capture.version += 1

    def mark_incomplete(self, rollout_id: str, call_id: str) -> None:
        """Note that a call was not captured; also after the rollout is frozen."""
        capture = self._use(rollout_id)
        if call_id not in capture.failed:
            capture.failed.add(call_id)
            capture.version += 1

    def list_calls(self, rollout_id: str, *, after: int = 0) -> CapturedCalls:
        """Return the records that follow the first `after`; there may be more later."""
        capture = self._use(rollout_id)
        return CapturedCalls(capture.serial, tuple(itertools.islice(capture.records.values(), after, None)))

    def read_call(self, rollout_id: str, call_id: str) -> bytes:
        """Return the record of one call; raises RequestError 404 if there is none."""
        record = self._use(rollout_id).records.get(call_id)
        if record is None:
            raise RequestError(404, f"no record of call {call_id}", code="record_not_found")
        return record

    def freeze(self, rollout_id: str) -> CaptureSnapshot:
        """Refuse further records and return the state; only `mark_incomplete` and `announce` change it from now on."""
        capture = self._use(rollout_id)
        capture.is_frozen = True
        return capture.snapshot(rollout_id)

    def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Forget a rollout if this is its present state; return whether it was."""
        if rollout_id not in self._captures:
            return False
        present = self._use(rollout_id).snapshot(rollout_id)
        if (present.snapshot_id, present.version) != (snapshot_id, version):
            return False
        self._forget(rollout_id)
        return True

    def take(self, rollout_id: str) -> CaptureSnapshot | None:
        """Return the present state and forget the rollout; None if nothing was captured."""
        if rollout_id not in self._captures:
            return None
        snapshot = self._captures[rollout_id].snapshot(rollout_id)
        self._forget(rollout_id)
        return snapshot

    def end(self, rollout_id: str) -> None:
        """Forget the records of a rollout that is over and of its further attempts, and refuse records still to come.

        Further attempts have the rollout's id followed by "-a" and a number, as in nemo-gym 0.7.
        """
        for key, capture in self._captures.items():
            if key == rollout_id or key.startswith(f"{rollout_id}-a"):
                self._num_bytes -= capture.num_bytes
                capture.records.clear()
                capture.serial = next(self._serials)
                capture.version += 1
                capture.is_frozen = True

    def expire(self) -> None:
        """Forget rollouts that are past their time to live."""
        cutoff = self._clock() - self._ttl_s
        while self._captures and next(iter(self._captures.values())).last_used_at < cutoff:
            self._forget(next(iter(self._captures)))

    def _use(self, rollout_id: str) -> _Capture:
        capture = self._captures.get(rollout_id)
        if capture is None:
            capture = self._captures[rollout_id] = _Capture(next(self._serials))
        capture.last_used_at = self._clock()
        self._captures.move_to_end(rollout_id)
        return capture

    def _forget(self, rollout_id: str) -> None:
        self._num_bytes -= self._captures.pop(rollout_id).num_bytes
