"""User code in flight, as the next process reads it."""

from pathlib import Path

from nemo_rl.observability.user_code_record import FILE, SIZE, UserCodeRecord, UserCodeSeen, read


def test_functions_are_named_from_their_first_call_to_their_last_end(tmp_path: Path) -> None:
    record = UserCodeRecord()
    record.begin("before:open")
    assert record.open(tmp_path) == UserCodeSeen()
    assert read(tmp_path / FILE) == UserCodeSeen("before:open", "before:open")
    record.begin("rewards:short")
    record.begin("rewards:short")
    record.end("before:open")
    record.end("rewards:short")
    assert read(tmp_path / FILE) == UserCodeSeen("rewards:short", "rewards:short")
    record.end("rewards:short")
    assert read(tmp_path / FILE) == UserCodeSeen("", "rewards:short")


def test_a_clean_end_leaves_nothing_in_flight(tmp_path: Path) -> None:
    record = UserCodeRecord()
    record.open(tmp_path)
    record.begin("rewards:short")
    record.close()
    assert UserCodeRecord().open(tmp_path) == UserCodeSeen("", "rewards:short")


def test_the_list_is_bounded(tmp_path: Path) -> None:
    record = UserCodeRecord()
    record.open(tmp_path)
    for number in range(1000):
        record.begin(f"rewards:function{number}")
    assert (tmp_path / FILE).stat().st_size == SIZE
    assert read(tmp_path / FILE).in_flight.startswith("rewards:function0, rewards:function1, ")


def test_a_missing_or_damaged_file_names_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / FILE) == UserCodeSeen()
    (tmp_path / FILE).write_bytes(b"")
    assert read(tmp_path / FILE) == UserCodeSeen()
