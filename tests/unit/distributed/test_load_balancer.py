import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.distributed.load_balancer import LoadBalancer


def test_requests_of_new_sessions_go_to_the_least_busy():
    balancer = LoadBalancer([0, 1, 2])
    assert [balancer.acquire(f"s{i}") for i in range(6)] == [0, 1, 2, 0, 1, 2]
    balancer.release(1)
    assert balancer.acquire("new") == 1


def test_a_session_stays_where_it_is_however_busy_that_is():
    balancer = LoadBalancer([0, 1])
    assert balancer.acquire("a") == 0
    assert [balancer.acquire("a") for _ in range(5)] == [0] * 5
    assert [balancer.acquire(f"other{i}") for i in range(3)] == [1, 1, 1]


def test_among_equally_busy_replicas_the_one_with_fewer_sessions_is_taken():
    balancer = LoadBalancer([0, 1])
    for session, expected in (("a", 0), ("b", 1), ("c", 0)):
        assert balancer.acquire(session) == expected
        balancer.release(expected)


def test_a_forgotten_session_is_placed_anew():
    balancer = LoadBalancer([0, 1])
    balancer.acquire("a")
    balancer.acquire("a")
    balancer.forget("a")
    assert balancer.acquire("a") == 1


def test_memory_is_bounded_and_the_most_silent_session_goes_first():
    balancer = LoadBalancer([0, 1], max_sessions=2)
    assert [balancer.acquire("a"), balancer.acquire("b")] == [0, 1]
    balancer.acquire("a")  # now b is the most silent
    balancer.acquire("c")  # 1, and b is forgotten
    assert balancer.acquire("a") == 0
    assert [balancer.acquire("b"), balancer.acquire("b")] == [1, 1]


def test_sessions_of_a_removed_replica_are_placed_on_the_others():
    balancer = LoadBalancer([0, 1])
    balancer.acquire("a")
    balancer.remove(0)
    balancer.release(0)  # a request that ends late
    assert balancer.acquire("a") == 1
    balancer.add(0)
    assert balancer.acquire("b") == 0
    assert balancer.acquire("a") == 1
    balancer.remove(0)
    balancer.remove(1)
    with pytest.raises(LookupError):
        balancer.acquire("a")


def test_member_to_avoid_is_taken_only_where_there_is_no_other():
    balancer = LoadBalancer(["a", "b", "c"])
    with balancer.lease() as first, balancer.lease() as second:
        assert (first, second) == ("a", "b")
        with balancer.lease(avoid=["c"]) as third:
            assert third == "a"
    with balancer.lease(avoid=["a"]) as fourth:
        assert fourth == "b"
    with balancer.lease(avoid=["a", "b", "c"]) as fifth:
        assert fifth == "a"
    assert balancer.load == {"a": 0, "b": 0, "c": 0}


def test_work_is_weighed():
    balancer = LoadBalancer(range(2))
    assert balancer.acquire(work=5) == 0
    assert [balancer.acquire(work=2) for _ in range(3)] == [1, 1, 1]
    assert balancer.acquire() == 0
    balancer.release(1, work=6)
    assert balancer.load == {0: 6, 1: 0}


def test_member_that_comes_back_has_its_old_position():
    balancer = LoadBalancer([0, 1])
    balancer.remove(0)
    balancer.add(0)
    assert balancer.acquire() == 0


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("adfrs"), st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_the_member_taken_is_always_the_least_busy(events: list[tuple[str, int, int]]) -> None:
    """Against a search through all of them: acquire, forget, release, remove and add in any order."""
    balancer = LoadBalancer(range(3))
    for event, member, session in events:
        if event == "a":
            expected = min(balancer.members, key=balancer._busyness, default=None)
            try:
                taken = balancer.acquire(avoid=())
            except LookupError:
                taken = None
            assert taken == expected
        elif event == "s" and balancer.members:
            balancer.acquire(f"s{session}")
        elif event == "f":
            balancer.forget(f"s{session}")
        elif event == "r" and balancer.work_of(member):
            balancer.release(member)
        elif event == "d":
            (balancer.remove if member in balancer.members else balancer.add)(member)
