"""For every kind of drafter, decoding and training compute the same function, however the work is cut up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.drafters import Drafter, DrafterCache, TrainableDrafter, drafter_kind, greedy_sampler
from dspark.drafters.registry import drafter_from_target
from dspark.types import Segment
from tests.drafters.conftest import VARIANTS, Context
from tests.drafters.packed import train

DrafterOf = Callable[..., TrainableDrafter]
ContextOf = Callable[[TrainableDrafter, int], Context]
CLOSE = {"atol": 2e-5, "rtol": 2e-5}
# Every variant, and both block layouts where there are two.
LAYOUTS = [
    *((variant, {}) for variant in VARIANTS),
    *((variant, {"sample_from_anchor": False}) for variant in VARIANTS[:4]),
]
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_layout = pytest.mark.parametrize(
    ("variant", "layout"), LAYOUTS, ids=[f"{variant}{'-masks' if layout else ''}" for variant, layout in LAYOUTS]
)


class Forced:
    """Sampler that draws given draft columns and keeps the logits it saw."""

    def __init__(self, columns_RG: Tensor, token_ids_D: Tensor | None) -> None:
        self.columns_RG = columns_RG
        self.tokens_RG = columns_RG if token_ids_D is None else token_ids_D[columns_RG]
        self.logits: list[Tensor] = []

    def __call__(self, position: int, logits_RD: Tensor, tokens_Rk: Tensor) -> tuple[Tensor, Tensor]:
        assert torch.equal(tokens_Rk, self.tokens_RG[:, :position])
        self.logits.append(logits_RD.clone())
        return self.columns_RG[:, position], logits_RD.softmax(-1)

    @property
    def logits_RGD(self) -> Tensor:
        return torch.stack(self.logits, dim=1)


def fill(drafter: Drafter, contexts: dict[int, Context], num_slots: int = 6, max_length: int = 40) -> DrafterCache:
    """A cache whose slots hold the given contexts."""
    cache = drafter.new_cache(num_slots, max_length)
    extend(drafter, cache, {slot: (0, context) for slot, context in contexts.items()})
    return cache


def extend(drafter: Drafter, cache: DrafterCache, pieces: dict[int, tuple[int, Context]]) -> None:
    """Extend slots by ``slot: (start, context)``."""
    segments = [Segment(slot, start, len(piece.tokens_N)) for slot, (start, piece) in pieces.items()]
    tokens_N = torch.cat([piece.tokens_N for _, piece in pieces.values()])
    drafter.extend(cache, segments, tokens_N, torch.cat([piece.taps_NT for _, piece in pieces.values()]))


def forced_logits(drafter: Drafter, cache: DrafterCache, slot: int, anchor: int) -> Tensor:
    """Logits ``[G, D]`` of one row along fixed draft tokens."""
    columns = torch.tensor([[3, 1, 4, 1]])[:, : drafter.block_size]
    sampler = Forced(columns, drafter.draft_token_ids_D)
    drafter.propose(cache, [slot], torch.tensor([anchor]), sampler)
    return sampler.logits_RGD[0]


def one_block(drafter: TrainableDrafter, context: Context, anchor: int, anchor_token: int) -> dict[str, Tensor]:
    """Arguments of `train` for the block that `forced_logits` drafts."""
    ids, columns = drafter.draft_token_ids_D, torch.tensor([3, 1, 4, 1])[: drafter.block_size]
    drafted = columns if ids is None else ids[columns]
    return {
        "taps_BST": context.taps_NT[None],
        "token_ids_BS": context.tokens_N[None],
        "anchors_BA": torch.tensor([[anchor]]),
        "block_tokens_BAG": torch.cat((torch.tensor([anchor_token]), drafted[:-1]))[None, None],
    }


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@each_layout
def test_training_equals_decoding(
    variant: str, layout: dict[str, Any], reduced: bool, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant, reduced=reduced, **layout)
    torch.manual_seed(0)
    lengths, span = (17, 11), 17
    contexts = [context_of(drafter, span) for _ in lengths]
    earliest = 1 if variant in ("eagle3", "mtp") else 0
    anchors_BA = torch.tensor([[earliest, 5, 16], [3, 11, 7]])
    keep_BA = torch.tensor([[True, True, True], [True, True, False]])
    columns = torch.randint(drafter.draft_vocab_size, (2, 3, drafter.block_size))
    ids = drafter.draft_token_ids_D
    # Not the tokens of the context: an anchor's own token must never come from there.
    anchor_tokens = torch.randint(53, (2, 3))
    drafted = columns if ids is None else ids[columns]
    output = train(
        drafter,
        torch.stack([context.taps_NT for context in contexts]),
        anchors_BA,
        torch.cat((anchor_tokens[..., None], drafted[..., :-1]), dim=-1),
        token_ids_BS=torch.stack([context.tokens_N for context in contexts]),
        context_lengths_B=torch.tensor(lengths),
        anchor_keep_BA=keep_BA,
    )
    assert torch.isfinite(output.logits_BAGD).all()
    assert drafter.has_confidence_head is (output.confidence_logits_BAG is not None)
    for b, a in keep_BA.nonzero().tolist():
        position = int(anchors_BA[b, a])
        cache = fill(drafter, {0: contexts[b].cut(0, position)}, 1, span)
        sampler = Forced(columns[b, a][None], ids)
        block = drafter.propose(cache, [0], anchor_tokens[b, a].view(1), sampler)
        torch.testing.assert_close(sampler.logits_RGD[0], output.logits_BAGD[b, a], **CLOSE)
        assert torch.equal(block.tokens_RG[0], drafted[b, a])
        assert (block.confidence_logits_RG is None) is (output.confidence_logits_BAG is None)
        if block.confidence_logits_RG is not None and output.confidence_logits_BAG is not None:
            torch.testing.assert_close(block.confidence_logits_RG[0], output.confidence_logits_BAG[b, a], **CLOSE)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [4, 1, 2], [5, 0]], ids=["neighbours", "scattered", "reversed"])
@each_layout
def test_ragged_rows_equal_single_rows(
    variant: str, layout: dict[str, Any], slots: list[int], drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant, reduced=True, **layout)
    contexts = {slot: context_of(drafter, 1 + 5 * index) for index, slot in enumerate(slots)}
    anchors = torch.tensor([7, 50, 1, 2])[: len(slots)]
    cache = fill(drafter, contexts)
    torch.manual_seed(0)
    columns = torch.randint(drafter.draft_vocab_size, (len(slots), drafter.block_size))
    together = Forced(columns, drafter.draft_token_ids_D)
    block = drafter.propose(cache, slots, anchors, together)
    assert block.probs_RGD is not None
    assert block.probs_RGD.shape == (len(slots), drafter.block_size, 12)
    torch.testing.assert_close(block.probs_RGD, together.logits_RGD.softmax(-1))
    for row, slot in enumerate(slots):
        for one_cache, one_slot in ((fill(drafter, {0: contexts[slot]}, num_slots=1), 0), (cache, slot)):
            alone = Forced(columns[row : row + 1], drafter.draft_token_ids_D)
            single = drafter.propose(one_cache, [one_slot], anchors[row : row + 1], alone)
            torch.testing.assert_close(together.logits_RGD[row], alone.logits_RGD[0], **CLOSE)
            assert torch.equal(block.tokens_RG[row], single.tokens_RG[0])
            if block.confidence_logits_RG is not None:
                assert single.confidence_logits_RG is not None
                torch.testing.assert_close(block.confidence_logits_RG[row], single.confidence_logits_RG[0], **CLOSE)


@each_variant
def test_extension_in_pieces_equals_extension_at_once(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant)
    first, second = context_of(drafter, 12), context_of(drafter, 9)
    whole = fill(drafter, {0: first, 2: second})
    pieces = drafter.new_cache(6, 40)
    extend(drafter, pieces, {0: (0, first.cut(0, 5))})
    drafter.propose(pieces, [0], torch.tensor([1]), greedy_sampler)
    extend(drafter, pieces, {2: (0, second.cut(0, 8)), 0: (5, first.cut(5))})
    drafter.propose(pieces, [2, 0], torch.tensor([1, 2]), greedy_sampler)
    extend(drafter, pieces, {0: (12, first.cut(12)), 2: (8, second.cut(8))})
    extend(drafter, pieces, {1: (0, first.cut(12))})
    assert pieces.lengths == whole.lengths == [12, 0, 9, 0, 0, 0]
    for slot in (0, 2):
        torch.testing.assert_close(
            forced_logits(drafter, pieces, slot, 7), forced_logits(drafter, whole, slot, 7), **CLOSE
        )


@each_variant
@pytest.mark.parametrize("kept", [1, 2, 6])
def test_rollback_then_extension_equals_a_fresh_start(
    kept: int, variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant)
    old, new = context_of(drafter, 11), context_of(drafter, 3)
    cache = fill(drafter, {0: old})
    drafter.propose(cache, [0], torch.tensor([5]), greedy_sampler)
    cache.truncate(0, kept)
    assert torch.allclose(
        forced_logits(drafter, cache, 0, 9), forced_logits(drafter, fill(drafter, {0: old.cut(0, kept)}), 0, 9), **CLOSE
    )
    extend(drafter, cache, {0: (kept, new)})
    fresh = fill(drafter, {0: old.cut(0, kept) + new})
    torch.testing.assert_close(forced_logits(drafter, cache, 0, 9), forced_logits(drafter, fresh, 0, 9), **CLOSE)


@each_variant
def test_nothing_beyond_a_slots_length_matters(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    """What rejected draft tokens leave behind must never be seen, for as long as it stays there."""
    drafter = drafter_of(variant)
    context = context_of(drafter, 9)
    cache = fill(drafter, {0: context})
    clean = forced_logits(drafter, cache, 0, 9)
    beyond = [*range(9, cache.tables.num_rows)]
    if variant in ("eagle3", "mtp"):
        beyond.append(0)  # the first token completes no pair
    cache.keys[:, :, beyond] = cache.values[:, :, beyond] = 1e3
    cache.features[9:] = 1e3
    torch.testing.assert_close(forced_logits(drafter, cache, 0, 9), clean, **CLOSE)


@each_variant
def test_every_token_and_feature_of_the_context_matters(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    """Tokens from the second on matter to drafters over pairs, none to the others; features matter to all."""
    drafter = drafter_of(variant)
    context = context_of(drafter, 5)
    usual = forced_logits(drafter, fill(drafter, {0: context}), 0, 9)
    for position in range(5):
        tokens, taps = context.tokens_N.clone(), context.taps_NT.clone()
        tokens[position] = (tokens[position] + 1) % 53
        taps[position] += 0.5
        other = forced_logits(drafter, fill(drafter, {0: Context(context.tokens_N, taps)}), 0, 9)
        assert not torch.allclose(other, usual, **CLOSE)
        other = forced_logits(drafter, fill(drafter, {0: Context(tokens, context.taps_NT)}), 0, 9)
        ignored = position == 0 or variant not in ("eagle3", "mtp")
        assert torch.allclose(other, usual, **CLOSE) is ignored


@each_variant
def test_fewer_tokens_are_a_prefix_of_the_whole_block(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant)
    cache = fill(drafter, {0: context_of(drafter, 8)})
    count = min(2, drafter.block_size)
    whole = drafter.propose(cache, [0], torch.tensor([4]), greedy_sampler)
    short = drafter.propose(cache, [0], torch.tensor([4]), greedy_sampler, num_tokens=count)
    assert short.tokens_RG.shape == (1, count)
    assert short.probs_RGD is None  # greedy acceptance needs none
    assert torch.equal(short.tokens_RG, whole.tokens_RG[:, :count])
    if whole.confidence_logits_RG is not None:
        assert short.confidence_logits_RG is not None
        torch.testing.assert_close(short.confidence_logits_RG, whole.confidence_logits_RG[:, :count], **CLOSE)


@each_layout
def test_drafting_at_the_end_of_the_cache(
    variant: str, layout: dict[str, Any], drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant, **layout)
    context = context_of(drafter, 10)
    cache = fill(drafter, {1: context}, num_slots=2, max_length=10)
    roomy = fill(drafter, {1: context})
    torch.testing.assert_close(forced_logits(drafter, cache, 1, 2), forced_logits(drafter, roomy, 1, 2), **CLOSE)
    assert cache.lengths == [0, 10]


@each_variant
def test_drafting_without_context(variant: str, drafter_of: DrafterOf) -> None:
    drafter = drafter_of(variant)
    cache = drafter.new_cache(2, 10)
    if variant in ("eagle3", "mtp"):
        with pytest.raises(ValueError, match="slot 1 holds no token, but the first draft step needs the feature"):
            drafter.propose(cache, [1], torch.tensor([1]), greedy_sampler)
    else:
        block = drafter.propose(cache, [1], torch.tensor([1]), greedy_sampler)
        assert block.tokens_RG.shape == (1, 4)


@each_variant
def test_gradients_reach_what_is_trained_and_nothing_else(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant, reduced=True)
    context = context_of(drafter, 12)
    blocks = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])[..., : drafter.block_size]
    output = train(drafter, context.taps_NT[None], torch.tensor([[4, 9]]), blocks, token_ids_BS=context.tokens_N[None])
    loss = output.logits_BAGD.square().mean()
    if output.confidence_logits_BAG is not None:
        loss = loss + output.confidence_logits_BAG.square().mean()
    loss.backward()
    for name, parameter in drafter.named_parameters():
        frozen = name in ("embed_tokens.weight", "lm_head.weight")
        assert parameter.requires_grad is not frozen, name
        assert (parameter.grad is None) is frozen, name
        assert frozen or bool(parameter.grad.abs().sum() > 0), name


@each_variant
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_training_under_autocast(
    variant: str, stored: torch.dtype, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = drafter_of(variant)
    context = context_of(drafter, 12)
    blocks = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])[..., : drafter.block_size]
    arguments = {"anchors_BA": torch.tensor([[4, 9]]), "block_tokens_BAG": blocks,
                 "token_ids_BS": context.tokens_N[None]}  # fmt: skip
    exact = train(drafter, context.taps_NT[None], **arguments)
    with torch.autocast("cpu", torch.bfloat16):
        output = train(drafter, context.taps_NT[None].to(stored), **arguments)
        loss = output.logits_BAGD.float().square().mean()
        if output.confidence_logits_BAG is not None:
            loss = loss + output.confidence_logits_BAG.float().mean()
    loss.backward()
    assert output.hidden_BAGH.dtype == torch.float32
    difference = (output.logits_BAGD.float() - exact.logits_BAGD).detach()
    assert float(difference.abs().max()) < 0.1 * float(exact.logits_BAGD.detach().abs().max())
    assert float(difference.square().mean().sqrt()) < 0.02 * float(exact.logits_BAGD.detach().std())
    assert all(p.grad is not None for p in drafter.parameters() if p.requires_grad)


@each_variant
def test_features_of_another_type_are_taken(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = drafter_of(variant)
    context = context_of(drafter, 5)
    short = Context(context.tokens_N, context.taps_NT.to(torch.bfloat16))
    output = train(drafter, **one_block(drafter, short, 5, 7))
    assert output.logits_BAGD.dtype == torch.float32
    logits = forced_logits(drafter, fill(drafter, {0: short}), 0, 7)
    torch.testing.assert_close(output.logits_BAGD[0, 0], logits, **CLOSE)


@each_variant
def test_bfloat16_decoding_gives_float32_logits_near_the_exact_ones(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    exact = drafter_of(variant)
    context = context_of(exact, 9)
    seen = []
    for drafter in (exact, drafter_of(variant).to(torch.bfloat16)):
        seen.append(forced_logits(drafter, fill(drafter, {0: context}), 0, 2))
        assert seen[-1].dtype == torch.float32
    assert float((seen[0] - seen[1]).square().mean().sqrt()) < 0.03 * float(seen[0].std())


@each_variant
def test_decoding_sees_every_change_of_the_weights(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    """In-place updates, conversions and loading must never leave a stale copy behind."""
    drafter = drafter_of(variant)
    context = context_of(drafter, 9)

    def decoded(model: TrainableDrafter) -> Tensor:
        return forced_logits(model, fill(model, {0: context}), 0, 2)

    def trained(model: TrainableDrafter) -> Tensor:
        return train(model, **one_block(model, context, 9, 2)).logits_BAGD[0, 0]

    with torch.inference_mode():
        decoded(drafter)
    optimizer = torch.optim.SGD([p for p in drafter.parameters() if p.requires_grad], lr=0.1)
    trained(drafter).square().mean().backward()
    before = decoded(drafter)
    optimizer.step()
    assert not torch.allclose(decoded(drafter), before)
    torch.testing.assert_close(decoded(drafter), trained(drafter).detach(), **CLOSE)
    twin = copy.deepcopy(drafter)
    with torch.no_grad():
        twin.get_parameter("layers.0.self_attn.v_proj.weight").mul_(2.0)  # k_norm would undo it for k_proj
    torch.testing.assert_close(decoded(twin), trained(twin).detach(), **CLOSE)
    torch.testing.assert_close(decoded(drafter), trained(drafter).detach(), **CLOSE)
    state = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    drafter.load_state_dict(state, assign=True)
    torch.testing.assert_close(decoded(drafter), decoded(twin), **CLOSE)


@each_variant
def test_refused_calls(variant: str, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = drafter_of(variant)
    cache = drafter.new_cache(2, 10)
    four = context_of(drafter, 4)
    width = four.taps_NT.shape[1]
    with pytest.raises(ValueError, match=rf"taps have shape \(3, {width}\); .* tap_layers need \(4, {width}\)"):
        drafter.extend(cache, [Segment(0, 0, 4)], four.tokens_N, four.taps_NT[:3])
    with pytest.raises(ValueError, match=r"token_ids have shape \(3,\); the segments hold 4 tokens"):
        drafter.extend(cache, [Segment(0, 0, 4)], four.tokens_N[:3], four.taps_NT)
    with pytest.raises(ValueError, match="slot 0: a segment starts at 1, the slot holds 0 positions"):
        drafter.extend(cache, [Segment(0, 1, 4)], *four)
    with pytest.raises(ValueError, match="position 10 is beyond the cache's 10 positions"):
        drafter.extend(cache, [Segment(0, 0, 11)], *context_of(drafter, 11))
    with pytest.raises(ValueError, match="slot 2 is unknown"):
        drafter.extend(cache, [Segment(2, 0, 4)], *four)
    with pytest.raises(ValueError, match="slot 0 is unknown or named twice"):
        drafter.extend(cache, [Segment(0, 0, 2), Segment(0, 2, 2)], *four)
    with pytest.raises(ValueError, match="cannot truncate slot 0 to 1: it holds 0 positions"):
        cache.truncate(0, 1)
    size = drafter.block_size
    with pytest.raises(ValueError, match=f"num_tokens must be 1 to the block size {size}, got {size + 1}"):
        drafter.propose(cache, [0], torch.tensor([1]), greedy_sampler, num_tokens=size + 1)
    with pytest.raises(ValueError, match="one different slot per anchor is needed"):
        drafter.propose(cache, [0, 0], torch.tensor([1, 1]), greedy_sampler)
    with pytest.raises(ValueError, match="at least one slot and one position"):
        drafter.new_cache(0, 10)
    drafter.extend(cache, [Segment(0, 0, 0)], *four.cut(0, 0))
    assert cache.lengths == [0, 0]


def test_names_of_the_kinds(drafter_of: DrafterOf) -> None:
    kinds = {variant: drafter_kind(drafter_of(variant, confidence=variant != "none").config) for variant in VARIANTS}
    assert kinds == {
        "none": "dflash", "vanilla": "dspark", "gated": "dspark", "rnn": "dspark", "eagle3": "eagle3", "mtp": "mtp",
    }  # fmt: skip
    assert drafter_kind(drafter_of("none", confidence=True).config) == "dspark"


@each_variant
@pytest.mark.parametrize("reduced", [False, True])
def test_new_drafters_share_the_targets_parts(
    variant: str, reduced: bool, config_of: Callable[..., Any], target: Any
) -> None:
    config = config_of(variant, reduced=reduced)
    ids = [52, 40, 1, 2, 5, 7, 8, 11, 20, 21, 30, 31]
    drafter: Drafter = drafter_from_target(config, target, ids if reduced else None)
    assert isinstance(drafter, TrainableDrafter)
    assert drafter.embed_tokens.weight.data_ptr() == target.embedding_weight_VH.data_ptr()
    assert drafter.tap_layers == config.target_layer_ids
    assert (drafter.block_size, drafter.draft_vocab_size) == (config.block_size, config.draft_vocab_size)
    if not reduced:
        assert drafter.lm_head.weight.data_ptr() == target.lm_head_weight_VH.data_ptr()
        assert drafter.draft_token_ids_D is None
        return
    assert drafter.draft_token_ids_D is not None
    assert drafter.draft_token_ids_D.tolist() == sorted(ids)
    assert torch.equal(drafter.lm_head.weight, target.lm_head_weight_VH[sorted(ids)])
    assert drafter.d2t.tolist() == [token - column for column, token in enumerate(sorted(ids))]
    assert drafter.t2d.nonzero().flatten().tolist() == sorted(ids)


@each_variant
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "draft_token_ids is missing"),
        ([1, 2, 3], "draft_token_ids holds 3 tokens but draft_vocab_size is 12"),
        ([1, 1, *range(2, 12)], "names a token twice"),
        ([99, *range(11)], "outside the target's vocabulary of 53"),
    ],
)
def test_refused_draft_vocabularies(
    ids: list[int] | None, message: str, variant: str, config_of: Callable[..., Any], target: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_from_target(config_of(variant, reduced=True), target, ids)
    with pytest.raises(ValueError, match="draft_token_ids given although"):
        drafter_from_target(config_of(variant), target, [1])
