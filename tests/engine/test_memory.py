from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dspark.engine.memory import BlockMemory

NAMESPACES = ("", "a")
TOKENS = st.one_of(st.integers(0, 9).map(lambda count: [0] * count), st.lists(st.integers(0, 1), max_size=9))


def run(memory: BlockMemory, sequence_id: int, token_ids: list[int], namespace: str = "") -> int:
    """Admit, grow and commit; the tokens reused."""
    reused = memory.admit(sequence_id, token_ids, namespace=namespace)
    assert memory.grow(sequence_id, len(token_ids))
    memory.commit(sequence_id, token_ids)
    return reused


def test_a_prompt_reuses_the_full_blocks_that_it_shares_but_never_its_last_token():
    memory = BlockMemory(8, 4)
    run(memory, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    memory.release(0)
    assert memory.admit(1, [1, 2, 3, 4, 5, 6, 7, 8]) == 4  # token 8 has to be computed
    assert memory.admit(2, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    assert memory.admit(3, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert memory.blocks(1) == memory.blocks(2)[:1]
    assert memory.num_used_blocks == 2


def test_equal_tokens_behind_different_prefixes_are_different_blocks():
    memory = BlockMemory(8, 2)
    run(memory, 0, [1, 1, 7, 7, 0])
    assert memory.admit(1, [2, 2, 7, 7, 0]) == 0
    assert memory.admit(2, [7, 7, 0]) == 0


def test_namespaces_share_nothing():
    memory = BlockMemory(8, 2)
    run(memory, 0, [1, 2, 3, 4, 5], namespace="alice")
    assert memory.admit(1, [1, 2, 3, 4, 5], namespace="bob") == 0
    assert memory.admit(2, [1, 2, 3, 4, 5]) == 0
    assert memory.admit(3, [1, 2, 3, 4, 5], namespace="alice") == 4


def test_a_running_sequence_is_shared_with_as_soon_as_it_commits():
    memory = BlockMemory(8, 2)
    memory.admit(0, [1, 2, 3, 4, 5])
    memory.grow(0, 5)
    assert memory.admit(1, [1, 2, 3, 4, 5]) == 0
    memory.commit(0, [1, 2, 3])
    assert memory.admit(2, [1, 2, 3, 4, 5]) == 2
    memory.commit(0, [1, 2, 3, 4, 5])
    assert memory.admit(3, [1, 2, 3, 4, 5]) == 4
    assert memory.blocks(3) == memory.blocks(0)[:2]


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation():
    memory = BlockMemory(8, 2)
    tokens = [1, 2, 3]
    run(memory, 0, tokens)
    for token in [4, 5, 6, 7]:
        tokens.append(token)
        assert memory.grow(0, len(tokens))
        memory.commit(0, tokens)
    memory.release(0)
    assert memory.admit(1, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 6


def test_without_reuse_nothing_is_kept():
    memory = BlockMemory(4, 2, reuse_prefixes=False)
    run(memory, 0, [1, 2, 3, 4, 5])
    memory.release(0)
    assert memory.statistics().num_cached_blocks == 0
    assert memory.admit(1, [1, 2, 3, 4, 5]) == 0


def test_eviction_takes_the_least_recently_used_sequence_first_and_its_tail_before_its_head():
    memory = BlockMemory(6, 2)
    run(memory, 0, [1, 1, 2, 2, 3, 3])
    run(memory, 1, [5, 5, 6, 6, 7, 7])
    memory.release(1)
    memory.release(0)
    assert run(memory, 2, [5, 5, 0]) == 2  # its second block evicts [7, 7], the tail of what was released first
    assert memory.statistics().evicted_blocks == 1
    memory.release(2)
    assert memory.admit(3, [5, 5, 6, 6, 7, 7, 8]) == 4
    memory.release(3)  # now used more recently than the sequence 0
    assert memory.admit(4, [9] * 6) == 0
    assert memory.grow(4, 6)  # one free block, then [3, 3] and [2, 2]
    assert memory.admit(5, [1, 1, 2, 2, 3, 3, 4]) == 2
    assert memory.admit(6, [5, 5, 6, 6, 7, 7, 8]) == 4


def test_a_copy_takes_the_place_of_an_equal_block_that_nobody_holds():
    memory = BlockMemory(5, 2)
    for sequence_id in (0, 1):
        memory.admit(sequence_id, [1, 2, 3, 4])
        memory.grow(sequence_id, 4)
    memory.commit(0, [1, 2, 3, 4])
    memory.commit(1, [1, 2, 3, 4])
    copies = list(memory.blocks(1))
    assert set(copies).isdisjoint(memory.blocks(0))
    memory.release(0)  # at once: the two blocks are free, not kept besides their copies
    assert memory.num_free_blocks == 3
    assert memory.statistics().num_cached_blocks == 0
    assert memory.admit(2, [1, 2, 3, 4, 5]) == 4
    assert memory.blocks(2) == copies
    memory.release(2)
    assert memory.grow(1, 10)  # alone, it can have all


def test_an_equal_block_that_nobody_holds_makes_room_for_the_one_in_use():
    memory = BlockMemory(4, 2)
    memory.admit(0, [1, 2, 3])
    memory.grow(0, 3)
    run(memory, 1, [1, 2, 3])
    memory.release(1)
    assert memory.statistics().num_cached_blocks == 1
    memory.commit(0, [1, 2, 3])
    assert memory.statistics().num_cached_blocks == 0
    assert memory.num_free_blocks == 2
    assert memory.admit(2, [1, 2, 4]) == 2
    assert memory.blocks(2) == memory.blocks(0)[:1]


def test_a_growth_that_fails_changes_nothing():
    memory = BlockMemory(4, 2)
    run(memory, 0, [1, 2, 3])
    run(memory, 1, [4, 5, 6])
    memory.release(0)
    before = memory.statistics(), list(memory.blocks(1))
    assert not memory.grow(1, 9)
    assert (memory.statistics(), list(memory.blocks(1))) == before
    assert memory.admit(2, [1, 2, 0]) == 2
    assert not memory.grow(2, 7)
    memory.release(2)
    assert memory.grow(1, 8)


def test_statistics_count_sequences_that_ran_and_not_admissions_taken_back():
    memory = BlockMemory(3, 2)
    run(memory, 0, [1, 2, 3])
    for _ in range(3):
        memory.admit(1, [1, 2, 3, 4, 5])
        assert not memory.grow(1, 8)
        memory.release(1)
    run(memory, 2, [1, 2, 4])
    memory.commit(2, [1, 2, 4])
    statistics = memory.statistics()
    assert (statistics.prompt_tokens, statistics.reused_tokens) == (6, 2)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        BlockMemory(0, 16)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        BlockMemory(4, 0)
    memory = BlockMemory(4, 2)
    for call in (memory.blocks, memory.release):
        with pytest.raises(ValueError, match="sequence 7 is not admitted: admit it first"):
            call(7)
    run(memory, 7, [1, 2, 3])
    with pytest.raises(ValueError, match="admitted already: release it first"):
        memory.admit(7, [1])
    with pytest.raises(ValueError, match="commits 2 tokens, but has committed 3 and has room for 4"):
        memory.commit(7, [1, 2])
    with pytest.raises(ValueError, match="grow it first"):
        memory.commit(7, [1, 2, 3, 4, 5])


@dataclass
class ModelSequence:
    namespace: str
    tokens: list[int]  # prompt and generated
    committed: int
    blocks: list[int] = field(default_factory=list)


class NaiveModel(RuleBasedStateMachine):
    """Against plain lists: what every cell of the memory holds, and which prefixes are known in which order of use."""

    @initialize(num_blocks=st.integers(2, 8), block_size=st.integers(1, 3))
    def create(self, num_blocks, block_size):
        self.memory = BlockMemory(num_blocks, block_size)
        self.size = block_size
        self.live: dict[int, ModelSequence] = {}
        self.next_id = 0
        self.cells: dict[tuple[int, int], object] = {}  # (block, offset) -> namespace and all tokens up to there
        self.known: set[tuple[str, tuple[int, ...]]] = set()
        self.unused: list[tuple[str, tuple[int, ...]]] = []  # known, in no live sequence; next to evict first

    def prefixes(self, sequence: ModelSequence) -> list[tuple[str, tuple[int, ...]]]:
        ends = range(self.size, sequence.committed + 1, self.size)
        return [(sequence.namespace, tuple(sequence.tokens[:end])) for end in ends]

    def cell(self, sequence: ModelSequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self.size], position % self.size

    def num_live_blocks(self) -> int:
        return len({block for sequence in self.live.values() for block in sequence.blocks})

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.live)))

    @rule(prompt=TOKENS, namespace=st.sampled_from(NAMESPACES))
    def admit(self, prompt, namespace):
        expected = 0
        while expected + self.size < len(prompt) and (namespace, tuple(prompt[: expected + self.size])) in self.known:
            expected += self.size
        assert self.memory.admit(self.next_id, prompt, namespace=namespace) == expected
        sequence = ModelSequence(namespace, list(prompt), expected, list(self.memory.blocks(self.next_id)))
        assert len(sequence.blocks) == expected // self.size
        self.live[self.next_id] = sequence
        self.next_id += 1
        self.unused = [prefix for prefix in self.unused if prefix not in self.prefixes(sequence)]

    @rule(prompt=TOKENS, namespace=st.sampled_from(NAMESPACES))
    def admit_twins_and_run_them(self, prompt, namespace):
        """Both find the same blocks and compute the rest, each for itself."""
        twins = self.next_id, self.next_id + 1
        for _ in twins:
            self.admit(prompt, namespace)
        for sequence_id in twins:
            self.give_room(sequence_id, len(prompt))
            self.write_and_commit(sequence_id, len(prompt))

    @rule(prompt=TOKENS, namespace=st.sampled_from(NAMESPACES))
    def run_to_the_end(self, prompt, namespace):
        sequence_id = self.next_id
        self.admit(prompt, namespace)
        self.give_room(sequence_id, len(prompt))
        self.write_and_commit(sequence_id, len(prompt))
        self.take_back(sequence_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_positions=st.integers(0, 16))
    def grow(self, data, num_positions):
        self.give_room(self.pick(data), num_positions)

    def give_room(self, sequence_id: int, num_positions: int) -> None:
        sequence = self.live[sequence_id]
        missing = -(-num_positions // self.size) - len(sequence.blocks)
        free = self.memory.num_blocks - self.num_live_blocks() - len(self.unused)
        before = self.memory.statistics()
        grew = self.memory.grow(sequence_id, num_positions)
        assert grew == (missing <= free + len(self.unused))
        assert grew or self.memory.statistics() == before
        if grew and missing > 0:
            for _ in range(missing - free):
                self.known.remove(self.unused.pop(0))
            held = {block for other in self.live.values() for block in other.blocks}
            new_blocks = list(self.memory.blocks(sequence_id))[len(sequence.blocks) :]
            assert len(new_blocks) == missing
            assert held.isdisjoint(new_blocks)
            sequence.blocks += new_blocks
        for position in range(sequence.committed, len(sequence.blocks) * self.size):  # drafts, or the cells of before
            self.cells[self.cell(sequence, position)] = ("draft", sequence_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), generated=TOKENS, count=st.integers(0, 12))
    def commit(self, data, generated, count):
        sequence_id = self.pick(data)
        self.live[sequence_id].tokens += generated
        self.write_and_commit(sequence_id, count)

    def write_and_commit(self, sequence_id: int, count: int) -> None:
        sequence = self.live[sequence_id]
        end = min(sequence.committed + count, len(sequence.tokens), len(sequence.blocks) * self.size)
        for position in range(sequence.committed, end):
            content = (sequence.namespace, tuple(sequence.tokens[: position + 1]))
            self.cells[self.cell(sequence, position)] = content
        self.memory.commit(sequence_id, sequence.tokens[:end])
        sequence.committed = end
        self.known.update(self.prefixes(sequence))
        self.unused = [prefix for prefix in self.unused if prefix not in self.prefixes(sequence)]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        self.take_back(self.pick(data))

    def take_back(self, sequence_id: int) -> None:
        self.memory.release(sequence_id)
        sequence = self.live.pop(sequence_id)
        held = {prefix for other in self.live.values() for prefix in self.prefixes(other)}
        self.unused += [prefix for prefix in reversed(self.prefixes(sequence)) if prefix not in held]

    def teardown(self):
        """Whoever is left alone can have every block, and gives all of them back."""
        for sequence_id in sorted(self.live)[:-1]:
            self.memory.release(sequence_id)
        for sequence_id in sorted(self.live)[-1:]:
            assert self.memory.grow(sequence_id, self.memory.num_blocks * self.size)
            assert sorted(self.memory.blocks(sequence_id)) == list(range(self.memory.num_blocks))
            self.memory.release(sequence_id)
        assert self.memory.num_free_blocks == self.memory.num_blocks

    @invariant()
    def all_blocks_are_accounted_for(self):
        statistics = self.memory.statistics()
        assert statistics.num_used_blocks == self.memory.num_used_blocks == self.num_live_blocks()
        assert statistics.num_cached_blocks == len(self.unused)
        assert self.memory.num_free_blocks + self.memory.num_used_blocks == self.memory.num_blocks

    @invariant()
    def everyone_sees_what_it_committed(self):
        for sequence_id, sequence in self.live.items():
            assert list(self.memory.blocks(sequence_id)) == sequence.blocks
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            for position in range(sequence.committed):
                expected = (sequence.namespace, tuple(sequence.tokens[: position + 1]))
                assert self.cells[self.cell(sequence, position)] == expected

    @invariant()
    def only_committed_full_blocks_are_shared(self):
        holders: dict[int, list[ModelSequence]] = {}
        for sequence in self.live.values():
            for block in sequence.blocks:
                holders.setdefault(block, []).append(sequence)
        for block, sharing in holders.items():
            if len(sharing) > 1:
                (index,) = {sequence.blocks.index(block) for sequence in sharing}
                assert all(sequence.committed >= (index + 1) * self.size for sequence in sharing)
                (_,) = {self.prefixes(sequence)[index] for sequence in sharing}


TestAgainstTheNaiveModel = NaiveModel.TestCase
TestAgainstTheNaiveModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
