"""Records of captured calls: stored once, frozen, retired exactly as they were consumed."""

import pytest

from nemo_rl.gateway.captures import CapturedCalls, CaptureStore
from nemo_rl.gateway.request_errors import RequestError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store_of(clock: Clock | None = None, *, max_bytes: int = 100) -> CaptureStore:
    return CaptureStore(max_bytes=max_bytes, ttl_s=10, clock=clock or Clock())


def refused(store: CaptureStore, *put: object) -> str | None:
    with pytest.raises(RequestError) as error:
        store.put(*put)  # type: ignore[arg-type]
    return error.value.code


def test_a_record_is_stored_once_whatever_is_sent_again() -> None:
    store = store_of()
    store.put("r", "b", b"2")
    store.put("r", "a", b"1")
    store.put("r", "b", b"2")
    assert refused(store, "r", "b", b"3") == "record_conflict"
    snapshot = store.freeze("r")
    assert (snapshot.records, snapshot.is_incomplete, snapshot.version) == ((b"2", b"1"), False, 2)
    assert store.freeze("r") == snapshot
    store.put("r", "b", b"2")  # a retry of a stored record
    assert store.freeze("r") == snapshot
    assert refused(store, "r", "c", b"3") == "rollout_frozen"


def test_a_rollout_that_lost_a_call_is_incomplete() -> None:
    store = store_of()
    for rollout in ("lost", "announced"):
        store.announce(rollout, "a")
    store.put("announced", "a", b"1")
    assert store.freeze("lost").is_incomplete
    before = store.freeze("announced")
    assert not before.is_incomplete
    store.mark_incomplete("announced", "b")
    after = store.freeze("announced")
    assert after.is_incomplete
    assert after.version > before.version
    assert after.snapshot_id != before.snapshot_id


def test_only_the_present_snapshot_is_retired() -> None:
    store = store_of()
    store.put("r", "a", b"1")
    snapshot = store.freeze("r")
    assert not store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version + 1)
    assert not store.drop("r", snapshot_id="other", version=snapshot.version)
    assert not store.drop("other", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    store.mark_incomplete("r", "b")
    assert not store.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    present = store.freeze("r")
    assert store.drop("r", snapshot_id=present.snapshot_id, version=present.version)
    assert len(store) == 0


def test_a_full_store_refuses_records_until_rollouts_are_retired_or_forgotten() -> None:
    clock = Clock()
    store = store_of(clock, max_bytes=3)
    store.put("old", "a", b"12")
    clock.now = 6
    store.put("young", "a", b"3")
    assert refused(store, "young", "b", b"4") == "over_capacity"
    assert store.freeze("other").problem == ""
    clock.now = 11
    store.put("young", "b", b"45")
    assert store.list_calls("old").records == ()
    snapshot = store.freeze("young")
    assert snapshot.problem == "captured records fill 3 bytes; raise gateway.max_captured_mib"
    assert store.drop("young", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    store.put("next", "a", b"678")


def test_records_are_read_one_by_one_and_from_where_a_reader_was() -> None:
    store = store_of()
    for call in ("a", "b", "c"):
        store.put("r", call, call.encode())
    assert store.read_call("r", "b") == b"b"
    serial = store.list_calls("r").serial
    assert store.list_calls("r", after=2) == CapturedCalls(serial, (b"c",))
    assert store.list_calls("r", after=3) == CapturedCalls(serial, ())
    with pytest.raises(RequestError) as error:
        store.read_call("r", "d")
    assert error.value.code == "record_not_found"
    store.take("r")
    store.put("r", "e", b"e")
    assert store.list_calls("r").serial != serial  # no reader may go on where it was in another capture


def test_a_rollout_is_taken_once_with_all_that_was_captured() -> None:
    store = store_of(max_bytes=2)
    store.put("r", "a", b"12")
    store.mark_incomplete("r", "b")
    taken = store.take("r")
    assert taken is not None
    assert (taken.records, taken.is_incomplete) == ((b"12",), True)
    assert store.take("r") is None
    store.put("r", "a", b"34")  # its room is free again


def test_a_rollout_that_is_over_gives_up_the_room_of_all_its_attempts() -> None:
    store = store_of(max_bytes=4)
    for rollout in ("r", "r-a1", "r2", "s"):
        store.put(rollout, "a", b"1")
    store.end("r")
    assert [store.list_calls(rollout).records for rollout in ("r", "r-a1", "r2", "s")] == [(), (), (b"1",), (b"1",)]
    assert refused(store, "r-a1", "b", b"2") == "rollout_frozen"  # what was given up on still runs
    store.put("next", "a", b"34")
    assert refused(store, "next", "b", b"5") == "over_capacity"
    store.end("unknown")
