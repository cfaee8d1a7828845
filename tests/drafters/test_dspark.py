"""Decoding and training compute the same function, however the work is cut up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.drafters import Drafter, DrafterCache, DSparkConfig, DSparkDrafter, greedy_sampler
from dspark.types import Segment

KINDS = ("none", "vanilla", "gated", "rnn")
DrafterOf = Callable[..., DSparkDrafter]
TapsOf = Callable[[int], Tensor]
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


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


def fill(drafter: DSparkDrafter, contexts: dict[int, Tensor], num_slots: int = 6, max_length: int = 40) -> DrafterCache:
    """A cache whose slots hold the given features."""
    cache = drafter.new_cache(num_slots, max_length)
    segments = [Segment(slot, 0, len(taps)) for slot, taps in contexts.items()]
    drafter.extend(cache, segments, torch.cat(list(contexts.values())))
    return cache


@pytest.mark.parametrize("anchor_first", [True, False], ids=["from-anchor", "from-masks"])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_decoding(
    kind: str, reduced: bool, anchor_first: bool, drafter_of: DrafterOf, taps_of: TapsOf
) -> None:
    drafter = drafter_of(kind, reduced=reduced, sample_from_anchor=anchor_first)
    torch.manual_seed(0)
    lengths, span = (17, 11), 17
    taps_BST = torch.stack([taps_of(span), taps_of(span)])
    anchors_BA = torch.tensor([[0, 5, 16], [3, 11, 7]])
    keep_BA = torch.tensor([[True, True, True], [True, True, False]])
    columns = torch.randint(drafter.draft_vocab_size, (2, 3, 4))
    ids = drafter.draft_token_ids_D
    anchor_tokens = torch.randint(53, (2, 3))
    drafted = columns if ids is None else ids[columns]
    blocks = torch.cat((anchor_tokens[..., None], drafted[..., :-1]), dim=-1)
    output = drafter.training_forward(
        taps_BST, anchors_BA, blocks, context_lengths_B=torch.tensor(lengths), anchor_keep_BA=keep_BA
    )
    assert torch.isfinite(output.logits_BAGD).all()
    for b, a in keep_BA.nonzero().tolist():
        position = int(anchors_BA[b, a])
        cache = drafter.new_cache(1, span)
        drafter.extend(cache, [Segment(0, 0, position)], taps_BST[b, :position])
        sampler = Forced(columns[b, a][None], ids)
        block = drafter.propose(cache, [0], anchor_tokens[b, a].view(1), sampler)
        torch.testing.assert_close(sampler.logits_RGD[0], output.logits_BAGD[b, a], **CLOSE)
        assert torch.equal(block.tokens_RG[0], drafted[b, a])
        assert block.confidence_logits_RG is not None
        assert output.confidence_logits_BAG is not None
        torch.testing.assert_close(block.confidence_logits_RG[0], output.confidence_logits_BAG[b, a], **CLOSE)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [4, 1, 2], [5, 0]], ids=["neighbours", "scattered", "reversed"])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_ragged_rows_equal_single_rows(
    slots: list[int], anchor_first: bool, drafter_of: DrafterOf, taps_of: TapsOf
) -> None:
    drafter = drafter_of("rnn", reduced=True, sample_from_anchor=anchor_first)
    contexts = {slot: taps_of(3 + 5 * index) for index, slot in enumerate(slots)}
    anchors = torch.tensor([7, 50, 1, 2])[: len(slots)]
    cache = fill(drafter, contexts)
    together = drafter.propose(cache, slots, anchors, greedy_sampler)
    for row, slot in enumerate(slots):
        alone_cache = fill(drafter, {0: contexts[slot]}, num_slots=1)
        alone = drafter.propose(alone_cache, [0], anchors[row : row + 1], greedy_sampler)
        again = drafter.propose(cache, [slot], anchors[row : row + 1], greedy_sampler)
        assert torch.equal(together.tokens_RG[row], alone.tokens_RG[0])
        assert torch.equal(together.tokens_RG[row], again.tokens_RG[0])
        assert together.confidence_logits_RG is not None
        assert alone.confidence_logits_RG is not None
        torch.testing.assert_close(together.confidence_logits_RG[row], alone.confidence_logits_RG[0], **CLOSE)


def test_extension_in_pieces_equals_extension_at_once(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of()
    first, second = taps_of(12), taps_of(9)
    whole = fill(drafter, {0: first, 2: second})
    pieces = drafter.new_cache(6, 40)
    drafter.extend(pieces, [Segment(0, 0, 5)], first[:5])
    drafter.propose(pieces, [0, 2], torch.tensor([1, 2]), greedy_sampler)
    drafter.extend(pieces, [Segment(2, 0, 8), Segment(0, 5, 7)], torch.cat((second[:8], first[5:])))
    drafter.propose(pieces, [2], torch.tensor([1]), greedy_sampler)
    drafter.extend(pieces, [Segment(0, 12, 0), Segment(2, 8, 1)], second[8:])
    assert pieces.lengths == whole.lengths == [12, 0, 9, 0, 0, 0]
    for slot, length in ((0, 12), (2, 9)):
        for name in ("keys", "values"):
            got, expected = getattr(pieces, name)[:, slot, :, :length], getattr(whole, name)[:, slot, :, :length]
            torch.testing.assert_close(got, expected, **CLOSE)


def test_rollback_then_extension_equals_a_fresh_start(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of("gated")
    kept, dropped, new = taps_of(6), taps_of(5), taps_of(3)
    cache = fill(drafter, {0: torch.cat((kept, dropped))})
    cache.truncate(0, 6)
    drafter.extend(cache, [Segment(0, 6, 3)], new)
    fresh = fill(drafter, {0: torch.cat((kept, new))})
    anchor = torch.tensor([9])
    columns = torch.tensor([[3, 1, 4, 1]])
    rolled, straight = Forced(columns, None), Forced(columns, None)
    drafter.propose(cache, [0], anchor, rolled)
    drafter.propose(fresh, [0], anchor, straight)
    torch.testing.assert_close(rolled.logits_RGD, straight.logits_RGD, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_are_a_prefix_of_the_whole_block(kind: str, drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of(kind)
    cache = fill(drafter, {0: taps_of(8)})
    whole = drafter.propose(cache, [0], torch.tensor([4]), greedy_sampler)
    short = drafter.propose(cache, [0], torch.tensor([4]), greedy_sampler, num_tokens=2)
    assert short.tokens_RG.shape == (1, 2)
    assert short.probs_RGD.shape == (1, 2, 53)
    assert torch.equal(short.tokens_RG, whole.tokens_RG[:, :2])
    assert short.confidence_logits_RG is not None
    assert whole.confidence_logits_RG is not None
    torch.testing.assert_close(short.confidence_logits_RG, whole.confidence_logits_RG[:, :2], **CLOSE)


def test_drafting_works_without_context_and_at_the_end_of_the_cache(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of(sample_from_anchor=False)
    cache = drafter.new_cache(2, 10)
    drafter.extend(cache, [Segment(1, 0, 10)], taps_of(10))
    block = drafter.propose(cache, [0, 1], torch.tensor([1, 2]), greedy_sampler)
    assert block.tokens_RG.shape == (2, 4)
    assert cache.lengths == [0, 10]


def test_blocks_and_padding_do_not_leak(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of("rnn")
    taps = taps_of(12)[None]
    blocks = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    anchors = torch.tensor([[4, 9]])
    output = drafter.training_forward(taps, anchors, blocks)
    changed = taps.clone()
    changed[:, 4:] += 1.0
    other = drafter.training_forward(changed, anchors, torch.tensor([[[1, 2, 3, 4], [9, 9, 9, 9]]]))
    torch.testing.assert_close(other.logits_BAGD[:, 0], output.logits_BAGD[:, 0], **CLOSE)
    assert not torch.allclose(other.logits_BAGD[:, 1], output.logits_BAGD[:, 1])
    short = drafter.training_forward(taps, anchors, blocks, context_lengths_B=torch.tensor([6]))
    changed = taps.clone()
    changed[:, 6:] = 100.0
    padded = drafter.training_forward(changed, anchors, blocks, context_lengths_B=torch.tensor([6]))
    torch.testing.assert_close(padded.logits_BAGD, short.logits_BAGD, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_what_is_trained_and_nothing_else(kind: str, drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of(kind, reduced=True)
    blocks = torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    output = drafter.training_forward(taps_of(12)[None], torch.tensor([[4, 9]]), blocks)
    assert output.confidence_logits_BAG is not None
    (output.logits_BAGD.square().mean() + output.confidence_logits_BAG.square().mean()).backward()
    for name, parameter in drafter.named_parameters():
        frozen = name in ("embed_tokens.weight", "lm_head.weight")
        assert parameter.requires_grad is not frozen, name
        assert (parameter.grad is None) is frozen, name
        assert frozen or bool(parameter.grad.abs().sum() > 0), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_training_under_autocast(kind: str, stored: torch.dtype, drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of(kind)
    taps = taps_of(12)[None]
    anchors, blocks = torch.tensor([[4, 9]]), torch.tensor([[[1, 2, 3, 4], [5, 6, 7, 8]]])
    exact = drafter.training_forward(taps, anchors, blocks)
    with torch.autocast("cpu", torch.bfloat16):
        output = drafter.training_forward(taps.to(stored), anchors, blocks)
        assert output.confidence_logits_BAG is not None
        loss = output.logits_BAGD.float().square().mean() + output.confidence_logits_BAG.float().mean()
    loss.backward()
    scale = float(exact.logits_BAGD.detach().abs().max())
    assert float((output.logits_BAGD.float() - exact.logits_BAGD).detach().abs().max()) < 0.05 * scale
    assert drafter.fc.weight.grad is not None


def test_cached_features_of_another_dtype_are_taken(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of()
    taps = taps_of(12)[None].to(torch.bfloat16)
    output = drafter.training_forward(taps, torch.tensor([[4]]), torch.tensor([[[1, 2, 3, 4]]]))
    assert output.logits_BAGD.dtype == torch.float32


def test_bfloat16_decoding_gives_float32_logits_near_the_exact_ones(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    taps, columns = taps_of(9), torch.tensor([[3, 1, 4, 1]])
    seen = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = drafter_of("gated").to(dtype)
        sampler = Forced(columns, None)
        drafter.propose(fill(drafter, {0: taps}), [0], torch.tensor([2]), sampler)
        assert sampler.logits_RGD.dtype == torch.float32
        seen.append(sampler.logits_RGD)
    assert float((seen[0] - seen[1]).abs().max()) < 0.05 * float(seen[0].abs().max())


def test_decoding_sees_every_change_of_the_weights(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    """In-place updates, conversions and loading must never leave a stale copy behind."""
    drafter = drafter_of()
    taps, columns = taps_of(9), torch.tensor([[3, 1, 4, 1]])

    def logits(model: DSparkDrafter) -> Tensor:
        sampler = Forced(columns, None)
        model.propose(fill(model, {0: taps}), [0], torch.tensor([2]), sampler)
        return sampler.logits_RGD

    def trained(model: DSparkDrafter) -> Tensor:
        blocks = torch.cat((torch.tensor([[2]]), columns[:, :-1]), dim=1)[None]
        return model.training_forward(taps[None], torch.tensor([[9]]), blocks).logits_BAGD[0].detach()

    with torch.inference_mode():
        logits(drafter)
    optimizer = torch.optim.SGD([p for p in drafter.parameters() if p.requires_grad], lr=0.1)
    drafter.training_forward(taps[None], torch.tensor([[9]]), columns[None]).logits_BAGD.square().mean().backward()
    before = logits(drafter)
    optimizer.step()
    assert not torch.allclose(logits(drafter), before)
    torch.testing.assert_close(logits(drafter), trained(drafter), **CLOSE)
    twin = copy.deepcopy(drafter)
    with torch.no_grad():
        twin.get_parameter("layers.1.self_attn.v_proj.weight").mul_(2.0)  # k_norm would undo it for k_proj
    torch.testing.assert_close(logits(twin), trained(twin), **CLOSE)
    torch.testing.assert_close(logits(drafter), trained(drafter), **CLOSE)
    state = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    drafter.load_state_dict(state, assign=True)
    torch.testing.assert_close(logits(drafter), logits(twin), **CLOSE)


def test_new_drafter_starts_as_the_base_and_shares_the_target(
    config_of: Callable[..., DSparkConfig], target: Any, taps_of: TapsOf
) -> None:
    drafter: Drafter = DSparkDrafter.from_target(config_of("rnn"), target)
    assert isinstance(drafter, DSparkDrafter)
    assert drafter.embed_tokens.weight.data_ptr() == target.embedding_weight_VH.data_ptr()
    assert drafter.lm_head.weight.data_ptr() == target.lm_head_weight_VH.data_ptr()
    output = drafter.training_forward(taps_of(6)[None], torch.tensor([[4]]), torch.tensor([[[1, 2, 3, 4]]]))
    base = torch.nn.functional.linear(output.hidden_BAGH, drafter.lm_head.weight)
    assert torch.equal(output.logits_BAGD, base)
    assert drafter.draft_token_ids_D is None
    assert (drafter.block_size, drafter.tap_layers, drafter.draft_vocab_size) == (4, (0, 2, 3), 53)


def test_reduced_vocabulary_takes_the_targets_rows(config_of: Callable[..., DSparkConfig], target: Any) -> None:
    ids = [52, 40, 1, 2, 5, 7, 8, 11, 20, 21, 30, 31]
    drafter = DSparkDrafter.from_target(config_of(reduced=True), target, ids)
    assert drafter.draft_token_ids_D is not None
    assert drafter.draft_token_ids_D.tolist() == sorted(ids)
    rows = target.lm_head_weight_VH[sorted(ids)]
    assert torch.equal(drafter.lm_head.weight, rows)
    assert drafter.d2t.tolist() == [token - column for column, token in enumerate(sorted(ids))]
    assert drafter.t2d.nonzero().flatten().tolist() == sorted(ids)


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
    ids: list[int] | None, message: str, config_of: Callable[..., DSparkConfig], target: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        DSparkDrafter.from_target(config_of(reduced=True), target, ids)


def test_draft_vocabulary_for_a_full_drafter_is_refused(config_of: Callable[..., DSparkConfig], target: Any) -> None:
    with pytest.raises(ValueError, match="draft_token_ids given although"):
        DSparkDrafter.from_target(config_of(), target, [1])


def test_refused_calls(drafter_of: DrafterOf, taps_of: TapsOf) -> None:
    drafter = drafter_of()
    cache = drafter.new_cache(2, 10)
    with pytest.raises(ValueError, match=r"taps have shape \(3, 72\); the segments and tap_layers need \(4, 72\)"):
        drafter.extend(cache, [Segment(0, 0, 4)], taps_of(3))
    with pytest.raises(ValueError, match="slot 0 starts at 1, but the slot holds 0 tokens"):
        drafter.extend(cache, [Segment(0, 1, 4)], taps_of(4))
    with pytest.raises(ValueError, match="more than max_length 10"):
        drafter.extend(cache, [Segment(0, 0, 11)], taps_of(11))
    with pytest.raises(ValueError, match="slot 2 does not exist"):
        drafter.extend(cache, [Segment(2, 0, 4)], taps_of(4))
    with pytest.raises(ValueError, match="a slot appears in two segments"):
        drafter.extend(cache, [Segment(0, 0, 2), Segment(0, 2, 2)], taps_of(4))
    with pytest.raises(ValueError, match="cannot truncate slot 0 to length 1: it holds 0 tokens"):
        cache.truncate(0, 1)
    with pytest.raises(ValueError, match="num_tokens must be 1 to the block size 4, got 5"):
        drafter.propose(cache, [0], torch.tensor([1]), greedy_sampler, num_tokens=5)
    with pytest.raises(ValueError, match="one different slot per anchor is needed"):
        drafter.propose(cache, [0, 0], torch.tensor([1, 1]), greedy_sampler)
    with pytest.raises(ValueError, match="num_slots and max_length must be at least 1"):
        drafter.new_cache(0, 10)
    drafter.extend(cache, [Segment(0, 0, 0)], taps_of(0))
    assert cache.lengths == [0, 0]
