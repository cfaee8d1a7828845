"""Who is served next: users take turns, and within a user first come is first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class QueueFull(ValueError):
    """The queue holds as much as it may: the work was refused, not dropped silently."""


class FairQueue(Generic[T]):
    """Waiting work of many users, bounded in all.

    Users with waiting work are served in rotation, one item a turn; a user who comes (or comes back) takes the last
    place of the rotation. So the k-th item of a user waits for at most k items of each other user, however many those
    have. Items that were served and come back (:meth:`push_front`) go first and take
    nobody's turn.

    Every operation costs the same however much is waiting; only iteration goes through it. An item waits once: items
    are told apart by ``==``, so give objects with an identity of their own.
    """

    def __init__(self, max_waiting: int) -> None:
        """Nobody waits.

        Args:
            max_waiting: items that may wait before :meth:`push` refuses more.
        """
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, not {max_waiting}: nothing could ever be served.")
        self.max_waiting = max_waiting
        self._returned: OrderedDict[T, None] = OrderedDict()
        self._rotation: OrderedDict[str, OrderedDict[T, None]] = OrderedDict()  # next user first; none without items
        self._user_of: dict[T, str] = {}  # of the items in the rotation

    def __len__(self) -> int:
        return len(self._returned) + len(self._user_of)

    def __iter__(self) -> Iterator[T]:
        """All items in the order in which they would be served if none came any more."""
        yield from self._returned
        turns = [iter(items) for items in self._rotation.values()]
        while turns:
            still_waiting = []
            for turn in turns:
                for item in turn:
                    yield item
                    still_waiting.append(turn)
                    break
            turns = still_waiting

    def push(self, item: T, user: str, *, is_accepted: bool = False) -> None:
        """Let an item wait for its user's turn.

        Args:
            is_accepted: it waits even above ``max_waiting``: somebody has counted already.

        Raises:
            QueueFull: ``max_waiting`` items wait already.
        """
        if not is_accepted and len(self) >= self.max_waiting:
            raise QueueFull(
                f"{len(self)} requests are waiting and max_waiting is {self.max_waiting}: "
                "try again when some are done, or set max_waiting higher."
            )
        self._refuse_twice(item)
        self._user_of[item] = user
        self._rotation.setdefault(user, OrderedDict())[item] = None

    def push_front(self, item: T) -> None:
        """Let an item that was served before wait ahead of all that was not, behind those that came back earlier.

        It is never refused, even above ``max_waiting``: it was accepted once.
        """
        self._refuse_twice(item)
        self._returned[item] = None

    def peek(self) -> T:
        """The item that :meth:`pop` would give. Raises IndexError if nothing waits."""
        if not self:
            raise IndexError("nothing waits: look at the queue's length first.")
        items = self._returned or next(iter(self._rotation.values()))
        return next(iter(items))

    def pop(self) -> T:
        """Take the next item; its user's next turn is after everybody else's. Raises IndexError if nothing waits."""
        item = self.peek()
        if item in self._user_of:
            self._rotation.move_to_end(self._user_of[item])
        self.remove(item)
        return item

    def remove(self, item: T) -> bool:
        """Take an item out wherever it waits; the turns of its user stay as they are. False: it did not wait."""
        if item in self._returned:
            del self._returned[item]
            return True
        user = self._user_of.pop(item, None)
        if user is None:
            return False
        del self._rotation[user][item]
        if not self._rotation[user]:
            del self._rotation[user]
        return True

    def _refuse_twice(self, item: T) -> None:
        if item in self._returned or item in self._user_of:
            raise ValueError(f"{item!r} is waiting already: an item can wait only once.")
