from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dspark.engine.queue import FairQueue, QueueFull

USERS = st.sampled_from("abc")
PUSH = st.tuples(st.just("push"), USERS)
POP = st.tuples(st.just("pop"), st.none())
PUSH_FRONT = st.tuples(st.just("push_front"), st.none())
REMOVE = st.tuples(st.just("remove"), st.integers(0, 30))
OPERATIONS = st.lists(st.one_of(PUSH, PUSH, PUSH, PUSH, POP, POP, PUSH_FRONT, REMOVE), max_size=60)


def drain(queue: FairQueue) -> list:
    return [queue.pop() for _ in range(len(queue))]


def test_users_take_turns_and_each_is_served_in_order():
    queue = FairQueue[str](10)
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.push(item, item[0])
    assert drain(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_a_single_request_waits_for_one_turn_of_a_user_with_a_thousand():
    queue = FairQueue[tuple[str, int]](2000)
    for number in range(1000):
        queue.push(("many", number), "many")
    queue.pop()
    queue.push(("one", 0), "one")
    assert [queue.pop() for _ in range(2)] == [("many", 1), ("one", 0)]


def test_who_comes_back_takes_the_last_place():
    queue = FairQueue[str](10)
    for item in ("a1", "b1", "b2"):
        queue.push(item, item[0])
    assert queue.pop() == "a1"
    queue.push("a2", "a")
    assert drain(queue) == ["b1", "a2", "b2"]


def test_preempted_work_goes_first_in_its_order_even_if_the_queue_is_full():
    queue = FairQueue[str](3)
    for item in ("a1", "a2", "b1"):
        queue.push(item, item[0])
    first, second = queue.pop(), queue.pop()
    queue.push("c1", "c")
    queue.push("c2", "c")
    queue.push_front(first)
    queue.push_front(second)
    assert len(queue) == 5
    with pytest.raises(QueueFull, match="5 requests are waiting and max_waiting is 3"):
        queue.push("d1", "d")
    assert drain(queue) == ["a1", "b1", "a2", "c1", "c2"]


def test_a_full_queue_refuses_and_says_what_to_do():
    queue = FairQueue[int](2)
    queue.push(1, "a")
    queue.push(2, "b")
    with pytest.raises(QueueFull, match=r"2 requests are waiting and max_waiting is 2: .* set max_waiting higher"):
        queue.push(3, "c")
    assert list(queue) == [1, 2]
    queue.push_front(queue.pop())
    with pytest.raises(QueueFull):  # what came back counts
        queue.push(3, "c")
    queue.pop()
    queue.push(3, "c")


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="max_waiting must be at least 1, not 0"):
        FairQueue(0)
    queue = FairQueue[int](2)
    for call in (queue.peek, queue.pop):
        with pytest.raises(IndexError, match="nothing waits"):
            call()
    queue.push(1, "a")
    with pytest.raises(ValueError, match="1 is waiting already"):
        queue.push(1, "b")
    with pytest.raises(ValueError, match="1 is waiting already"):
        queue.push_front(1)


@given(operations=OPERATIONS)
@example(
    operations=[("push", "a"), ("pop", None), *[("push", "a")] * 8, ("push_front", None), ("push", "a")]
)  # one more than may wait
def test_any_history(operations):
    """Against a plain list: order within a user, turns between users, removal and length."""
    queue = FairQueue[int](8)
    waiting: list[tuple[int, str]] = []  # in order of arrival
    returned: list[int] = []
    served: list[int] = []
    passed_by: dict[int, dict[str, int]] = {}  # of each waiting item: items of each user served meanwhile
    rank: dict[int, int] = {}  # of each waiting item: how many of its user were waiting when it came, itself included
    for number, (operation, argument) in enumerate(operations):
        if operation == "push":
            if len(waiting) + len(returned) >= 8:  # what came back is taken above it, too
                with pytest.raises(QueueFull):
                    queue.push(number, argument)
                continue
            queue.push(number, argument)
            waiting.append((number, argument))
            passed_by[number] = {}
            rank[number] = sum(user == argument for _, user in waiting)
        elif operation == "pop" and len(queue):
            item = queue.peek()
            assert next(iter(queue)) == item == queue.pop()
            served.append(item)
            if returned:
                assert item == returned.pop(0)
                continue
            user = dict(waiting)[item]
            assert item == next(other for other, other_user in waiting if other_user == user)
            waiting.remove((item, user))
            for other, other_user in waiting:
                if other_user != user:
                    passed_by[other][user] = passed_by[other].get(user, 0) + 1
                    assert passed_by[other][user] <= rank[other]
        elif operation == "push_front" and served:
            returned.append(served.pop())
            queue.push_front(returned[-1])
        elif operation == "remove":
            waits = argument in returned or argument in dict(waiting)
            assert queue.remove(argument) == waits
            returned = [item for item in returned if item != argument]
            waiting = [entry for entry in waiting if entry[0] != argument]
        assert len(queue) == len(waiting) + len(returned)
        assert sorted(queue) == sorted([*returned, *dict(waiting)])
    order = list(queue)
    assert drain(queue) == order
