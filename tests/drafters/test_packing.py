"""Many sequences in one packed batch are each of them alone, in results and in gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.drafters import PackedBlocks, TrainableDrafter
from tests.drafters.conftest import VARIANTS, Context

DrafterOf = Callable[..., TrainableDrafter]
ContextOf = Callable[[TrainableDrafter, int], Context]
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def sequence(drafter: TrainableDrafter, context_of: ContextOf, length: int, anchors: list[int]) -> PackedBlocks:
    context = context_of(drafter, length)
    return PackedBlocks(
        taps_NT=context.taps_NT,
        token_ids_N=context.tokens_N,
        context_lengths=(length,),
        anchors_M=torch.tensor(anchors, dtype=torch.int64),
        blocks_per_sequence=(len(anchors),),
        block_tokens_MG=torch.randint(53, (len(anchors), drafter.block_size)),
    )


def together(parts: list[PackedBlocks]) -> PackedBlocks:
    return PackedBlocks(
        taps_NT=torch.cat([part.taps_NT for part in parts]),
        token_ids_N=torch.cat([part.token_ids_N for part in parts]),
        context_lengths=tuple(length for part in parts for length in part.context_lengths),
        anchors_M=torch.cat([part.anchors_M for part in parts]),
        blocks_per_sequence=tuple(count for part in parts for count in part.blocks_per_sequence),
        block_tokens_MG=torch.cat([part.block_tokens_MG for part in parts]),
    )


def logits_and_gradients(drafter: TrainableDrafter, parts: list[PackedBlocks]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of all blocks, and gradients of the sum of a loss over all of them."""
    drafter.zero_grad()
    logits = []
    for part in parts:
        output, _ = drafter.teacher_forced(drafter.training_hidden(part), part.block_tokens_MG)
        weights = torch.linspace(-1, 1, output.shape[-1])
        (output.log_softmax(-1) * weights).sum().backward()
        logits.append(output.detach())
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    return torch.cat(logits), gradients


@each_variant
def test_packed_equals_each_sequence_alone(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    torch.manual_seed(0)
    drafter = drafter_of(variant)
    parts = [
        sequence(drafter, context_of, 9, [2, 5, 9]),
        sequence(drafter, context_of, 1, [1]),
        sequence(drafter, context_of, 17, [17]),
        sequence(drafter, context_of, 4, [1, 2, 3, 4]),
    ]
    alone, alone_gradients = logits_and_gradients(drafter, parts)
    packed, packed_gradients = logits_and_gradients(drafter, [together(parts)])
    torch.testing.assert_close(packed, alone, **CLOSE)
    assert packed_gradients.keys() == alone_gradients.keys()
    for name, gradient in alone_gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@each_variant
def test_context_after_the_last_anchor_changes_nothing(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    torch.manual_seed(0)
    drafter = drafter_of(variant)
    whole = [sequence(drafter, context_of, 14, [3, 8]), sequence(drafter, context_of, 6, [2])]
    cut = [
        replace(part, taps_NT=part.taps_NT[:end], token_ids_N=part.token_ids_N[:end], context_lengths=(end,))
        for part, end in zip(whole, (8, 2), strict=True)
    ]
    expected, _ = logits_and_gradients(drafter, [together(cut)])
    torch.testing.assert_close(logits_and_gradients(drafter, [together(whole)])[0], expected, **CLOSE)
    loud = [replace(part, taps_NT=part.taps_NT.clone(), token_ids_N=part.token_ids_N.clone()) for part in whole]
    for part, end in zip(loud, (8, 2), strict=True):
        part.taps_NT[end:] = 1e4
        part.token_ids_N[end:] = 0
    torch.testing.assert_close(logits_and_gradients(drafter, [together(loud)])[0], expected, **CLOSE)


@each_variant
def test_blocks_do_not_see_each_other(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    torch.manual_seed(0)
    drafter = drafter_of(variant)
    part = sequence(drafter, context_of, 9, [4, 6, 9])
    logits, _ = logits_and_gradients(drafter, [part])
    tokens = part.block_tokens_MG.clone()
    tokens[1] = (tokens[1] + 1) % 53
    other, _ = logits_and_gradients(drafter, [replace(part, block_tokens_MG=tokens)])
    torch.testing.assert_close(other[[0, 2]], logits[[0, 2]], **CLOSE)
    assert not torch.allclose(other[1], logits[1], **CLOSE)
    taps = part.taps_NT.clone()
    taps[6:] += 1.0  # from the second block's anchor on
    other, _ = logits_and_gradients(drafter, [replace(part, taps_NT=taps)])
    torch.testing.assert_close(other[:2], logits[:2], **CLOSE)
    assert not torch.allclose(other[2], logits[2], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS[:4])
def test_blocks_without_any_context(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    torch.manual_seed(0)
    drafter = drafter_of(variant)
    empty, full = sequence(drafter, context_of, 0, [0]), sequence(drafter, context_of, 5, [0, 5])
    alone, _ = logits_and_gradients(drafter, [empty, full])
    assert torch.isfinite(alone).all()
    for order in ([empty, full], [full, empty]):
        packed, gradients = logits_and_gradients(drafter, [together(order)])
        expected = alone if order[0] is empty else torch.cat((alone[1:], alone[:1]))
        torch.testing.assert_close(packed, expected, **CLOSE)
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@each_variant
def test_sequences_without_blocks(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    torch.manual_seed(0)
    drafter = drafter_of(variant)
    one, idle, two = (sequence(drafter, context_of, 5, anchors) for anchors in ([3], [], [1, 5]))
    expected, _ = logits_and_gradients(drafter, [one, two])
    packed, _ = logits_and_gradients(drafter, [together([one, idle, two])])
    torch.testing.assert_close(packed, expected, **CLOSE)


@each_variant
@pytest.mark.parametrize("lengths", [(), (5,)], ids=["nothing", "context"])
def test_a_part_without_blocks_gives_zero_gradients(
    lengths: tuple[int, ...], variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    """A process whose part of a step is empty still takes part in the reduction of the gradients."""
    drafter = drafter_of(variant)
    context = context_of(drafter, sum(lengths))
    nothing = PackedBlocks(
        taps_NT=context.taps_NT,
        token_ids_N=context.tokens_N,
        context_lengths=lengths,
        anchors_M=torch.zeros(0, dtype=torch.int64),
        blocks_per_sequence=(0,) * len(lengths),
        block_tokens_MG=torch.zeros(0, drafter.block_size, dtype=torch.int64),
    )
    logits, gradients = logits_and_gradients(drafter, [nothing])
    assert logits.shape == (0, drafter.block_size, 53)
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not name.startswith("confidence_head")} <= gradients.keys()
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("variant", ["eagle3", "mtp"])
def test_drafters_over_pairs_refuse_an_anchor_without_a_feature(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant)
    with pytest.raises(ValueError, match="an anchor is at position 0, but this drafter needs the feature"):
        drafter.training_hidden(sequence(drafter, context_of, 5, [3, 0]))


@pytest.mark.parametrize("variant", ["eagle3", "mtp"])
def test_blocks_longer_than_the_block_size_are_refused(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant)
    part = sequence(drafter, context_of, 5, [3])
    longer = replace(part, block_tokens_MG=torch.zeros(1, drafter.block_size + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"blocks have {drafter.block_size + 1} tokens, more than the block size"):
        drafter.training_hidden(longer)


def test_a_shorter_horizon_is_the_start_of_a_longer_one(drafter_of: DrafterOf, context_of: ContextOf) -> None:
    torch.manual_seed(0)
    drafter = drafter_of("eagle3")
    part = sequence(drafter, context_of, 5, [3, 5])
    short = replace(part, block_tokens_MG=part.block_tokens_MG[:, :2])
    torch.testing.assert_close(drafter.training_hidden(short), drafter.training_hidden(part)[:, :2], **CLOSE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_lengths": (9, 1)}, "context_lengths names 2 sequences, blocks_per_sequence 1"),
        ({"context_lengths": (8,)}, "context_lengths add up to 8, but there are 9 taps and 9 tokens"),
        ({"token_ids_N": torch.zeros(8)}, "context_lengths add up to 9, but there are 9 taps and 8 tokens"),
        ({"blocks_per_sequence": (1,)}, "blocks_per_sequence add up to 1, but there are 2 anchors and 2 rows"),
    ],
)
def test_counts_that_disagree(
    change: dict[str, object], message: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    part = sequence(drafter_of(), context_of, 9, [2, 5])
    with pytest.raises(ValueError, match=message):
        replace(part, **change)  # type: ignore[arg-type]
