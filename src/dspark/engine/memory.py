"""Which sequence holds which blocks of key/value memory, and which blocks a later prompt can take over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class MemoryStatistics:
    """Blocks now, and tokens and evictions since the start."""

    num_blocks: int
    num_used_blocks: int  # held by sequences
    num_cached_blocks: int  # held by none; kept for later prompts until their place is needed
    prompt_tokens: int  # of the sequences that came to run; after a preemption, all that the sequence had by then
    reused_tokens: int  # those of them that cached blocks held already
    evicted_blocks: int


class BlockMemory:
    """Bookkeeping of key/value blocks: block ``i`` of a sequence holds its positions ``i * block_size`` onwards.

    A block that :meth:`commit` has seen full is published: found by its namespace and by all tokens up to its end,
    compared one by one (the key names the block before it, so nothing rests on a hash), and shared with sequences that
    begin with the same tokens. Nobody writes to a published block: its owners write behind what they committed.
    Once no sequence holds it, a published block stays findable until its place is needed: least recently used first,
    and of one sequence the tail before the head, so what is findable is always findable from its first token on.

    Two sequences that computed equal blocks at the same time each keep their own. One is published, the others are its
    copies; a copy takes its place as soon as no sequence holds the published one. Unused blocks are therefore never in
    the way: whatever no sequence holds can be had.
    """

    def __init__(self, num_blocks: int, block_size: int, *, reuse_prefixes: bool = True) -> None:
        """All blocks are free.

        Args:
            num_blocks: blocks to hand out, ids 0 to ``num_blocks - 1``.
            block_size: positions of a block.
            reuse_prefixes: False publishes nothing: every prompt is computed from its first token.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}: give the memory room for one block.")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 position, not {block_size}.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._reuse_prefixes = reuse_prefixes
        self._sequences: dict[int, _Sequence] = {}
        self._owners = [0] * num_blocks  # of each block, how many sequences hold it
        self._free = list(reversed(range(num_blocks)))  # the last one is handed out next
        self._prefixes: dict[_PrefixKey, _Prefix] = {}
        self._unused: OrderedDict[_Prefix, None] = OrderedDict()  # published, without owner; the first one goes first
        self._prompt_tokens = 0
        self._reused_tokens = 0
        self._evicted_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds: :meth:`grow` can have each of them."""
        return len(self._free) + len(self._unused)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold; one that several share counts once."""
        return self.num_blocks - self.num_free_blocks

    def statistics(self) -> MemoryStatistics:
        """Counts of blocks, tokens and evictions."""
        return MemoryStatistics(
            num_blocks=self.num_blocks,
            num_used_blocks=self.num_used_blocks,
            num_cached_blocks=len(self._unused),
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            evicted_blocks=self._evicted_blocks,
        )

    def admit(self, sequence_id: int, token_ids: Sequence[int], *, namespace: str = "") -> int:
        """Take up a sequence with the published blocks that its tokens begin with.

        Args:
            token_ids: the prompt, and what was generated before a preemption. The last token is never reused: its
                forward pass gives the logits to go on with.
            namespace: only blocks that were published in this namespace are found.

        Returns:
            Tokens reused: whole blocks, 0 if none is known.

        Raises:
            ValueError: the sequence is admitted already.
        """
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id} is admitted already: release it first, or use another id.")
        sequence = _Sequence(namespace=namespace, prompt_tokens=len(token_ids))
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            prefix = self._prefixes.get((sequence.last_prefix, tuple(token_ids[start : start + self.block_size])))
            if prefix is None:
                break
            if not self._owners[prefix.block]:
                del self._unused[prefix]
            self._owners[prefix.block] += 1
            sequence.blocks.append(prefix.block)
            sequence.prefixes.append(prefix)
        sequence.reused_tokens = sequence.num_committed = len(sequence.blocks) * self.block_size
        self._sequences[sequence_id] = sequence
        return sequence.reused_tokens

    def grow(self, sequence_id: int, num_positions: int) -> bool:
        """Give the sequence room for positions 0 to ``num_positions - 1``; what it has already stays.

        Returns:
            False: there are not enough blocks, and nothing has changed.
        """
        blocks = self._sequence(sequence_id).blocks
        missing = self._blocks_for(num_positions) - len(blocks)
        if missing > self.num_free_blocks:
            return False
        for _ in range(missing):
            block = self._free.pop() if self._free else self._evict()
            self._owners[block] = 1
            blocks.append(block)
        return True

    def commit(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Publish the blocks that have become full; costs what is new, however long the sequence is.

        Args:
            token_ids: all tokens of the sequence whose keys and values are written and final. They begin with those
                of the last call (or with the reused ones); only full blocks that are new are read.

        Raises:
            ValueError: fewer tokens than committed before, or more than the blocks hold.
        """
        sequence = self._sequence(sequence_id)
        if not sequence.num_committed <= len(token_ids) <= len(sequence.blocks) * self.block_size:
            raise ValueError(
                f"sequence {sequence_id} commits {len(token_ids)} tokens, but has committed {sequence.num_committed} "
                f"and has room for {len(sequence.blocks) * self.block_size}: grow it first, and never commit less."
            )
        sequence.num_committed = len(token_ids)
        if not sequence.has_run:
            sequence.has_run = True
            self._prompt_tokens += sequence.prompt_tokens
            self._reused_tokens += sequence.reused_tokens
        if self._reuse_prefixes:
            for index in range(len(sequence.prefixes), len(token_ids) // self.block_size):
                start = index * self.block_size
                self._publish(sequence, tuple(token_ids[start : start + self.block_size]))

    def release(self, sequence_id: int) -> None:
        """Take all blocks back at once; published ones stay findable until their place is needed."""
        sequence = self._sequence(sequence_id)
        while sequence.blocks:
            self._give_back(sequence)
        del self._sequences[sequence_id]

    def blocks(self, sequence_id: int) -> Sequence[int]:
        """The sequence's blocks in order of positions: to read, valid until the next call about this sequence."""
        return self._sequence(sequence_id).blocks

    def _sequence(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise ValueError(f"sequence {sequence_id} is not admitted: admit it first; it may have been released.")
        return sequence

    def _blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def _publish(self, sequence: _Sequence, token_ids: tuple[int, ...]) -> None:
        """Make the sequence's first unpublished block findable, or a copy of the one that is and has owners."""
        block = sequence.blocks[len(sequence.prefixes)]
        key = (sequence.last_prefix, token_ids)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = _Prefix(key=key, block=block)
        elif self._owners[prefix.block]:
            prefix.copies.append(block)
        else:
            del self._unused[prefix]
            self._free.append(prefix.block)
            prefix.block = block
        sequence.prefixes.append(prefix)

    def _give_back(self, sequence: _Sequence) -> None:
        """Take the sequence's last block."""
        block = sequence.blocks.pop()
        self._owners[block] -= 1
        if len(sequence.prefixes) <= len(sequence.blocks):
            self._free.append(block)
            return
        prefix = sequence.prefixes.pop()
        if self._owners[block]:
            return
        if prefix.block != block:
            prefix.copies.remove(block)
            self._free.append(block)
        elif prefix.copies:
            prefix.block = prefix.copies.pop()
            self._free.append(block)
        else:
            self._unused[prefix] = None

    def _evict(self) -> int:
        prefix, _ = self._unused.popitem(last=False)
        del self._prefixes[prefix.key]
        self._evicted_blocks += 1
        return prefix.block


@dataclass(kw_only=True, eq=False, slots=True)
class _Prefix:
    """A published block, as part of the chain of blocks from a sequence's first token on."""

    key: _PrefixKey
    block: int
    copies: list[int] = field(default_factory=list)  # blocks of sequences that computed the same, one owner each


# What a block is found by: the block before it (the namespace where it is the first) and its tokens.
_PrefixKey = tuple[_Prefix | str, tuple[int, ...]]


@dataclass(kw_only=True, eq=False, slots=True)
class _Sequence:
    """The blocks of an admitted sequence; ``prefixes[i]`` is what its block ``i`` is published as, or a copy of."""

    namespace: str
    prompt_tokens: int
    reused_tokens: int = 0
    num_committed: int = 0
    has_run: bool = False
    blocks: list[int] = field(default_factory=list)
    prefixes: list[_Prefix] = field(default_factory=list)

    @property
    def last_prefix(self) -> _Prefix | str:
        return self.prefixes[-1] if self.prefixes else self.namespace
