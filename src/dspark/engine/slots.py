"""Which choices are in memory: a slot each, and blocks for keys and values of target and drafter alike."""

from __future__ import annotations

import heapq

from dspark.drafters.cache import DrafterCache
from dspark.drafters.protocol import Drafter
from dspark.engine.choice import Choice
from dspark.engine.memory import BlockMemory
from dspark.models.block_tables import BLOCK_SIZE, BlockTables
from dspark.models.kv_cache import KVCache
from dspark.models.target import Target, TargetCache

_DEFAULT_MEMORY_BYTES = 2**30


class Slots:
    """The memory of an engine, allocated once. The same block numbers stand for the target's and the drafter's memory.

    Attributes:
        max_length: prompt and generated tokens of a choice at most.
        memory: who has which blocks.
        running: the choices in memory, in the order in which they came.

    Args:
        num_slots: choices in memory at once.
        max_length: asked for; None for as much as context and memory let.
        memory_bytes: for keys, values and waiting features of target and drafter together; None for what all slots need
            at ``max_length``, or 1 GiB if there is none.
        reuse_prefixes: whether computed blocks serve later prompts. A target that does not share blocks cannot.
    """

    target_cache: TargetCache
    drafter_cache: DrafterCache | None

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        num_slots: int,
        max_length: int | None,
        memory_bytes: int | None,
        reuse_prefixes: bool,
    ) -> None:
        # A pass writes the anchor and a draft behind what is known, and a drafter its block of inputs.
        self._margin = 1 if drafter is None else drafter.block_size + 1
        self.max_length, num_blocks = _size(
            target, drafter, self._margin, num_slots=num_slots, max_length=max_length, memory_bytes=memory_bytes
        )
        self._tables = BlockTables(
            num_slots=num_slots,
            max_length=self.max_length + self._margin,
            num_blocks=num_blocks,
            device=target.device,
        )
        tables = self._tables if target.shares_blocks else None
        self.target_cache = target.new_cache(num_slots, self.max_length, tables)
        self.drafter_cache = None if drafter is None else drafter.new_cache(num_slots, self.max_length, self._tables)
        self.memory = BlockMemory(num_blocks, BLOCK_SIZE, reuse_prefixes=reuse_prefixes and target.shares_blocks)
        self.running: list[Choice] = []
        self._free_slots = list(range(num_slots))
        self._published: dict[int, int] = {}  # full blocks of a running choice that memory knows of

    def computed(self, choice: Choice) -> int:
        """Tokens of a running choice whose keys and values are known."""
        assert choice.slot is not None, "the choice is not in memory"
        return self.target_cache.lengths[choice.slot]

    def enter(self, choice: Choice) -> int | None:
        """Bring a choice into memory, with room for all its tokens.

        Others keep room to go on for a while: a block for each of them stays free.

        Returns:
            Tokens that need not be computed, as an earlier prompt left them; None if there is no room now.
        """
        if not self._free_slots:
            return None
        known = () if choice.wants_prompt_logprobs else choice.tokens  # these need a pass over the whole prompt
        reused = self.memory.admit(choice.choice_id, known, namespace=choice.request.prefix_namespace)
        has_room = self.memory.grow(choice.choice_id, len(choice.tokens) + self._margin)
        if not has_room or self.memory.num_free_blocks < len(self.running):
            self.memory.release(choice.choice_id)
            return None
        choice.slot = heapq.heappop(self._free_slots)
        self._tables.assign(choice.slot, self.memory.blocks(choice.choice_id))
        if reused > 0:
            self.target_cache.adopt(choice.slot, reused)
            if self.drafter_cache is not None:
                self.drafter_cache.adopt(choice.slot, reused)
        self.running.append(choice)
        return reused

    def extend(self, choice: Choice) -> bool:
        """Make room for a running choice's next round; False if there is no memory left."""
        assert choice.slot is not None, "the choice is not in memory"
        needed = len(choice.tokens) + self._margin
        if needed <= self._tables.capacity(choice.slot):
            return True
        if not self.memory.grow(choice.choice_id, needed):
            return False
        self._tables.assign(choice.slot, self.memory.blocks(choice.choice_id))
        return True

    def publish(self, choice: Choice) -> None:
        """Let later prompts find what is computed of a running choice, as far as it fills blocks."""
        computed = self.computed(choice)
        blocks = computed // BLOCK_SIZE
        if blocks != self._published.get(choice.choice_id):
            self._published[choice.choice_id] = blocks
            self.memory.commit(choice.choice_id, choice.tokens[:computed])

    def leave(self, choice: Choice) -> None:
        """Take back slot and blocks at once; what was published can still be found."""
        assert choice.slot is not None, "the choice is not in memory"
        self.memory.release(choice.choice_id)
        self._published.pop(choice.choice_id, None)
        self.target_cache.truncate(choice.slot, 0)
        if self.drafter_cache is not None:
            self.drafter_cache.truncate(choice.slot, 0)
        self._tables.assign(choice.slot, ())
        heapq.heappush(self._free_slots, choice.slot)
        choice.slot = None
        self.running.remove(choice)


def _size(
    target: Target,
    drafter: Drafter | None,
    margin: int,
    *,
    num_slots: int,
    max_length: int | None,
    memory_bytes: int | None,
) -> tuple[int, int]:
    """Tokens of a choice at most, and blocks of memory.

    Raises:
        ValueError: memory or context do not hold what is asked, or the target's memory cannot be shared out in blocks
            and nobody says how long its slots shall be.
    """
    context = target.config.max_position_embeddings
    if not target.shares_blocks:
        if memory_bytes is not None or max_length is None:
            raise ValueError(
                "this target keeps each request in a slot of its own: set max_length, and leave kv_memory_bytes out "
                "(memory is max_concurrency slots of max_length tokens)"
            )
        if max_length > context:
            raise ValueError(f"max_length is {max_length}, but the target's context has {context} tokens")
        return max_length, num_slots * -(-(max_length + margin) // BLOCK_SIZE)
    per_block = _bytes_per_block(target, drafter, margin)
    if memory_bytes is None:
        # One block more for each slot, since nobody enters unless those that run can go on for a block.
        blocks = 0 if max_length is None else num_slots * (-(-(max_length + margin) // BLOCK_SIZE) + 1)
        memory_bytes = per_block * blocks or _DEFAULT_MEMORY_BYTES
    num_blocks = memory_bytes // per_block
    held = num_blocks * BLOCK_SIZE - margin
    if held < 2:
        least = per_block * -(-(2 + margin) // BLOCK_SIZE)
        raise ValueError(f"kv_memory_bytes is {memory_bytes}, not enough for any request: give at least {least}")
    if max_length is None:
        return min(context, held), num_blocks
    if max_length > min(context, held):
        raise ValueError(
            f"max_length is {max_length}, but the target's context has {context} tokens and kv_memory_bytes "
            f"({memory_bytes}) holds {held}: ask for less, or give more memory"
        )
    return max_length, num_blocks


def _bytes_per_block(target: Target, drafter: Drafter | None, margin: int) -> int:
    """What a block takes in target and drafter: asked of caches that have one block."""
    tables = BlockTables(num_slots=1, max_length=1 + margin, num_blocks=1, device=target.device)
    target_cache = target.new_cache(1, 1, tables)
    assert isinstance(target_cache, KVCache), "a target that shares blocks keeps them in this cache"
    return target_cache.nbytes_per_block + (0 if drafter is None else drafter.new_cache(1, 1, tables).nbytes_per_block)
