"""DSpark drafters that compute in int8: near to what they compute in float32, and each row from itself alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark.drafters import DSparkDrafter, TrainableDrafter
from dspark.drafters.checkpoint import load_drafter, save_drafter
from dspark.models.int8_intrinsics import has_dot_products
from tests.drafters.conftest import Context, FakeTarget
from tests.drafters.test_kinds import Forced, fill

DrafterOf = Callable[..., TrainableDrafter]
ContextOf = Callable[[TrainableDrafter, int], Context]
HEADS = ("none", "vanilla", "gated", "rnn")

pytestmark = pytest.mark.skipif(not has_dot_products(), reason="this processor has no AVX512-VNNI")


def wide(drafter_of: DrafterOf, variant: str, **changes: object) -> DSparkDrafter:
    drafter = drafter_of(variant, head_dim=8, **changes)
    assert isinstance(drafter, DSparkDrafter)
    return drafter


def forced(drafter: TrainableDrafter, contexts: dict[int, Context], anchors: list[int]):
    """Logits [R, G, D] and confidence logits of given tokens, over contexts in the slots that are named."""
    cache = fill(drafter, contexts, 4, 50)
    columns = torch.tensor([[3, 1, 4, 1]])[:, : drafter.block_size].expand(len(contexts), -1)
    sampler = Forced(columns, drafter.draft_token_ids_D)
    block = drafter.propose(cache, list(contexts), torch.tensor(anchors), sampler)
    return sampler.logits_RGD, block.confidence_logits_RG


@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("reduced", [False, True])
def test_int8_is_near_to_float(variant: str, reduced: bool, drafter_of: DrafterOf, context_of: ContextOf) -> None:
    """A few parts in a hundred are what numbers of 8 bits leave of random weights."""
    drafter = wide(drafter_of, variant, reduced=reduced)
    contexts = {2: context_of(drafter, 30), 0: context_of(drafter, 3)}
    exact, sure = forced(drafter, contexts, [7, 1])
    assert drafter.compute_dtype == "float32"
    drafter.compute_in_int8()
    assert drafter.compute_dtype == "int8"
    near, near_sure = forced(drafter, contexts, [7, 1])
    assert near.dtype == torch.float32
    error = (near - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm()
    assert 0.0 < error < 0.06
    if sure is not None:
        torch.testing.assert_close(near_sure, sure, atol=0.1, rtol=0.0)


@pytest.mark.parametrize("variant", HEADS)
def test_a_row_has_the_same_bits_alone_and_in_company(
    variant: str, drafter_of: DrafterOf, context_of: ContextOf
) -> None:
    drafter = wide(drafter_of, variant)
    drafter.compute_in_int8()
    contexts = {3: context_of(drafter, 17), 1: context_of(drafter, 40), 0: context_of(drafter, 5)}
    together, _ = forced(drafter, contexts, [5, 6, 7])
    for row, (slot, context) in enumerate(contexts.items()):
        alone, _ = forced(drafter, {slot: context}, [5 + row])
        if variant == "none":  # sequential heads are products in the parameters' type
            assert torch.equal(together[row], alone[0])
        else:
            torch.testing.assert_close(together[row], alone[0])


def test_it_goes_by_the_weights_as_they_were(drafter_of: DrafterOf, context_of: ContextOf) -> None:
    drafter = wide(drafter_of, "none")
    drafter.compute_in_int8()
    contexts = {0: context_of(drafter, 9)}
    expected, _ = forced(drafter, contexts, [7])
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if not name.startswith("embed_tokens"):
                parameter.mul_(2.0)
    assert torch.equal(forced(drafter, contexts, [7])[0], expected)


def test_a_loaded_drafter_computes_as_its_target_does_unless_told(
    tmp_path: Path, drafter_of: DrafterOf, target: FakeTarget
) -> None:
    drafter = wide(drafter_of, "vanilla")
    save_drafter(drafter, tmp_path, include_embeddings=True)
    assert load_drafter(tmp_path, target).compute_dtype == "float32"
    target.compute_dtype = "int8"
    loaded = load_drafter(tmp_path, target)
    assert loaded.compute_dtype == "int8"
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert load_drafter(tmp_path, target, dtype=torch.float32).compute_dtype == "float32"


def test_a_drafter_that_cannot_is_loaded_in_its_own_type_and_refuses(
    tmp_path: Path, drafter_of: DrafterOf, target: FakeTarget
) -> None:
    drafter = drafter_of("vanilla", head_dim=6)
    assert isinstance(drafter, DSparkDrafter)
    with pytest.raises(ValueError, match=r"head_dim divisible by 8 \(device cpu, head_dim 6\)"):
        drafter.compute_in_int8()
    target.compute_dtype = "int8"
    for variant, changes in (("vanilla", {"head_dim": 6}), ("eagle3", {})):
        save_drafter(drafter_of(variant, **changes), tmp_path / variant, include_embeddings=True)
        assert load_drafter(tmp_path / variant, target).compute_dtype == "float32"
