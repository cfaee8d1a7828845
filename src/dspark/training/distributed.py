"""The processes of a run: one, or as many as ``torchrun`` started.

Every process runs the same program; what differs is its rank. Process 0, the main one, writes files and logs.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

__all__ = ["WorkerLostError", "World"]

DEFAULT_TIMEOUT_S = 300.0

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_COMMUNICATION = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out|timeout|process ?group", re.IGNORECASE
)
_WHILE_MAIN_WORKS = timedelta(days=365)
"""The others wait for the main process as long as it lives: computing teacher states takes hours."""

_PATIENT_POLL_S = 0.2

T = TypeVar("T")


class WorkerLostError(ConnectionError):
    """Another process of the run ended or no longer answers."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, seen from one of them. With one process nothing here communicates.

    Attributes:
        device: where this process computes.
        rank: this process, 0 to ``world_size - 1``.
        world_size: processes of the run.
        local_rank: this process among those of its machine; chooses its accelerator.
        store: where processes leave each other messages; None for a run of one.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store: Store | None = None
    _messages: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @classmethod
    def single(cls, device: str | torch.device) -> World:
        """A run of one process."""
        return cls(device=torch.device(device))

    @classmethod
    def start(cls, device: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
        """Meet the other processes that ``torchrun`` started; a run of one where it started none.

        Args:
            device: of the recipe. An accelerator without a number means one for each process of the machine.
            timeout_s: longest wait for another process inside a step, until :class:`WorkerLostError`.

        Raises:
            ValueError: the environment is only half of torchrun's, or the device does not suffice for all processes.
            WorkerLostError: the others did not come.
        """
        present = [name for name in _VARIABLES if name in os.environ]
        if "RANK" not in present and "WORLD_SIZE" not in present:
            return cls.single(device)
        if missing := [name for name in _VARIABLES if name not in present]:
            raise ValueError(
                f"the environment has {present[0]} but not {', '.join(missing)}: start several processes with "
                "`torchrun --nproc-per-node N -m dspark train ...`, or unset RANK and WORLD_SIZE for one"
            )
        rank, world_size, local_rank = (int(os.environ[name]) for name in _VARIABLES[:3])
        place = _own_device(torch.device(device), world_size, local_rank)
        if world_size == 1:
            return cls.single(place)
        timeout = timedelta(seconds=timeout_s)
        with _communication():
            store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
            dist.init_process_group(
                dist.get_default_backend_for_device(place),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
        return cls(
            device=place,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            store=PrefixStore("dspark", store),
        )

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        """Whether there is no other process."""
        return self.store is None

    def sum(self, values_X: Tensor) -> Tensor:
        """Sum of a tensor over all processes, on the device it came from."""
        if self.is_single:
            return values_X
        total_X = values_X.to(self.device, copy=True)
        with _communication():
            dist.all_reduce(total_X)
        return total_X.to(values_X.device)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag if self.is_single else bool(self.sum(torch.tensor(float(flag))) > 0)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of ranks."""
        if self.is_single:
            return [value]
        values: list[T | None] = [None] * self.world_size
        with _communication():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def broadcast_object(self, value: T) -> T:
        """The main process's value, in every process."""
        if self.is_single:
            return value
        values = [value]
        with _communication():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with the main process's."""
        if self.is_single:
            return
        with _communication():
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.any(False)

    def on_main(self, work: Callable[[], T]) -> T | None:
        """Do something in the main process alone while the others wait, however long it takes.

        Raises:
            WorkerLostError: in the others, when it failed in the main process, which raises its own error.
        """
        if self.store is None:
            return work()
        key = f"main/{next(self._messages)}"
        if self.is_main:
            try:
                result = work()
            except BaseException as error:
                self.store.set(key, f"failed ({type(error).__name__}: {error})")
                raise
            self.store.set(key, "done")
            return result
        with _communication():
            self.store.wait([key], _WHILE_MAIN_WORKS)
            outcome = self.store.get(key).decode()
        if outcome != "done":
            raise WorkerLostError(f"process 0 of the run {outcome}")
        return None

    def together(self, work: Callable[[Callable[[], None]], T]) -> T:
        """Do something in all processes that takes each of them its own time, however long.

        Args:
            work: is given a barrier that waits without a limit, as often as it is called.

        Raises:
            WorkerLostError: the work failed in another process.
        """
        if self.store is None:
            return work(lambda: None)
        store, name = self.store, f"together/{next(self._messages)}"
        rounds = itertools.count()

        def barrier() -> None:
            key = f"{name}/{next(rounds)}"
            if store.add(key, 1) == self.world_size:
                store.set(f"{key}/all", "here")
            while not store.check([f"{key}/all"]):
                if store.check([f"{name}/failed"]):
                    raise WorkerLostError(store.get(f"{name}/failed").decode())
                time.sleep(_PATIENT_POLL_S)

        with _communication():
            try:
                return work(barrier)
            except BaseException as error:
                store.set(f"{name}/failed", f"process {self.rank} of the run failed ({type(error).__name__}: {error})")
                raise

    def main_first(self, first: Callable[[], T], then: Callable[[], T]) -> T:
        """``first()`` of the main process and, after it is done, ``then()`` of the others: for what prepares files."""
        result = self.on_main(first)
        if self.is_main:
            return result  # type: ignore[return-value]
        return then()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Name a failure of communication in the body, such as of a gradient's, as :class:`WorkerLostError`."""
        if self.is_single:
            yield
            return
        with _communication():
            yield

    def close(self) -> None:
        """Leave the others. A process that fails must do this, or they wait for it until the time is up."""
        if not self.is_single and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _own_device(device: torch.device, world_size: int, local_rank: int) -> torch.device:
    """``cuda`` becomes ``cuda:<local rank>``, and so for any accelerator."""
    if device.type == "cpu" or world_size == 1:
        return device
    if str(device) != device.type:
        raise ValueError(
            f"device is {device} for {world_size} processes: write {device.type}, each then takes one of its own"
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(
            f"process {local_rank} of this machine has no {device.type} device of its own, there are {count}: "
            f"start with torchrun --nproc-per-node {max(1, count)}"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device.type, local_rank)


@contextmanager
def _communication() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _COMMUNICATION.search(str(error)):
            raise
        raise WorkerLostError(
            "another process of the run ended or no longer answers (its own error, if it had one, is in its output); "
            f"the same command goes on from the last checkpoint, with any number of processes. The cause: {error}"
        ) from error
