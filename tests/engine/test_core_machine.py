"""Random operations on a core with tiny memory; after each of them everything it keeps account of must add up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dspark.engine.queue import QueueFull
from dspark.engine.request import Delta, Request
from dspark.engine.request_handle import RequestHandle
from dspark.models.block_tables import BLOCK_SIZE
from tests.engine.confident import make_request
from tests.engine.test_core import POLICIES, alone, assert_empty, make_core, result_of

SEEDS = st.integers(0, 40)
EDGES = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33])


class CoreMachine(RuleBasedStateMachine):
    """Submits, steps, cancels and abandons, also from within a delta."""

    @initialize(
        policy=st.sampled_from((*POLICIES, "fixed:3")),
        blocks=st.integers(3, 9),
        max_concurrency=st.integers(1, 4),
        max_prefill_tokens=st.sampled_from([1, 5, 16, 64]),
    )
    def begin(self, policy: str, blocks: int, max_concurrency: int, max_prefill_tokens: int) -> None:
        self.core = make_core(
            policy,
            blocks=blocks,
            max_concurrency=max_concurrency,
            max_prefill_tokens=max_prefill_tokens,
            max_waiting=6,
        )
        self.handles: list[RequestHandle] = []
        self.deltas: dict[int, list[Delta]] = {}
        self.abandoned: list[RequestHandle] = []
        self.to_cancel_at_delta: set[int] = set()

    @rule(seed=SEEDS, length=EDGES, cancels=st.booleans(), longest=st.booleans())
    def submit(self, seed: int, length: int, cancels: bool, longest: bool) -> None:
        request = make_request(seed)
        prompt = (request.prompt_ids * length)[: min(length, self.core.max_length - 1)]
        if longest:
            prompt = (request.prompt_ids * 60)[: self.core.max_length - 1]
        request = replace(request, prompt_ids=prompt)
        number = len(self.handles)
        deltas: list[Delta] = []

        def take_in(delta: Delta) -> None:
            deltas.append(delta)
            if number in self.to_cancel_at_delta:
                self.core.cancel(self.handles[number])

        try:
            self.handles.append(self.core.submit(request, on_delta=take_in))
        except QueueFull:
            assert self.core.num_waiting >= 6
            return
        self.deltas[number] = deltas
        if cancels and seed % 4 == 0:
            self.to_cancel_at_delta.add(number)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            had_work = self.core.has_work
            assert self.core.step() is had_work

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        self.core.cancel(handle)
        assert handle.is_finished or handle in self.abandoned

    @precondition(lambda self: len(self.handles) > 3)
    @rule(really=st.integers(0, 5))
    def abandon(self, really: int) -> None:
        if really == 0:
            self.abandoned += self.core.abandon()
            assert_empty(self.core)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "core"):
            return
        core, slots = self.core, self.core._slots
        memory, running = slots.memory, slots.running
        open_handles = [h for h in self.handles if not h.is_finished and h not in self.abandoned]
        assert list(core._handles.values()) == open_handles
        assert set(core._handle_of) == {c.choice_id for h in open_handles for c in h.choices}
        # Every open choice that is made is in one place: running, waiting, or finished.
        waiting = list(core._queue)
        assert len(waiting) == core.num_waiting
        ended = [c for h in open_handles for c in h.choices if c.finish_reason is not None]
        places = [choice.choice_id for choice in (*running, *waiting, *ended)]
        assert sorted(places) == sorted(core._handle_of)
        for handle in open_handles:
            unmade = handle.request.n - len(handle.choices)
            assert unmade in (0, handle.request.n - 1)
            assert handle.num_open == unmade + sum(choice.finish_reason is None for choice in handle.choices)
        # Slots and blocks.
        taken = [choice.slot for choice in running]
        assert sorted([*taken, *slots._free_slots]) == list(range(core.settings.max_concurrency))
        assert all(choice.slot is None for choice in (*waiting, *ended))
        assert set(memory._sequences) == {choice.choice_id for choice in running}
        assert set(slots._published) <= set(memory._sequences)
        owned = [block for choice in running for block in memory.blocks(choice.choice_id)]
        assert memory.num_used_blocks == len(set(owned))
        assert [memory._owners[block] for block in range(memory.num_blocks)] == [
            owned.count(block) for block in range(memory.num_blocks)
        ]
        for choice in running:
            assert choice.slot is not None
            blocks, computed = list(memory.blocks(choice.choice_id)), slots.computed(choice)
            assert slots._tables._blocks[choice.slot] == blocks
            assert computed < len(choice.tokens) <= core.max_length
            if slots.drafter_cache is not None:
                assert slots.drafter_cache.lengths[choice.slot] == computed
            for index, block in enumerate(blocks):  # nobody writes to a block that others read
                assert owned.count(block) == 1 or (index + 1) * BLOCK_SIZE <= computed
        for slot in slots._free_slots:
            assert slots.target_cache.lengths[slot] == slots._tables.capacity(slot) == 0

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        steps = 0
        while self.core.step():
            steps += 1
            assert steps < 5000
        assert_empty(self.core)
        for number, handle in enumerate(self.handles):
            if handle in self.abandoned:
                continue
            answers = zip(result_of(handle).completions, self.alone(handle.request), strict=True)
            for index, (completion, whole) in enumerate(answers):
                length = len(completion.token_ids)
                assert completion.token_ids == whole[:length]
                assert length == len(whole) or completion.finish_reason == "cancelled"
                mine = [delta for delta in self.deltas[number] if delta.choice == index]
                spelt = sum((delta.token_ids for delta in mine), ())
                assert completion.token_ids == spelt
                assert [delta.finish_reason is None for delta in mine] == [True] * (len(mine) - 1) + [False]

    def alone(self, request: Request) -> list[tuple[int, ...]]:
        """What it gives alone, in as much room as there is here."""
        room = self.core.max_length - len(request.prompt_ids)
        return alone(replace(request, max_tokens=min(request.max_tokens, room)))


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=16, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
