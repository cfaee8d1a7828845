"""The drafter a run starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.drafters.dspark import DSparkDrafter
from dspark.models.loading import LoadedTarget
from dspark.models.rope import RopeSettings, RopeTable, rotate
from dspark.training.run import Run, plan_run, prepare_run
from dspark.training.start import RunStart, start_drafter
from dspark.training.tap_scale import tap_scale
from tests.training.tiny import greedy_rows, tiny_recipe, tiny_target, write_rows


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target(sharpness=8.0)


@pytest.fixture(scope="module")
def data(target: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("start") / "data", greedy_rows(target, rows=8, copies=3))


def start(data: Path, out: Path, target: LoadedTarget, head: str) -> tuple[Run, RunStart]:
    recipe = tiny_recipe(data, out, drafter={"markov_head": head}, states={"source": "online"})
    run = prepare_run(plan_run(recipe, target), resume=False)
    return run, start_drafter(run, tap_scale(run.source, run.training_rows))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_every_sequential_head_starts_with_the_bigrams(
    head: str, target: LoadedTarget, data: Path, tmp_path: Path
) -> None:
    _, begun = start(data, tmp_path / "run", target, head)
    assert isinstance(begun.drafter, DSparkDrafter)
    assert begun.markov is not None
    previous_N = torch.arange(2, 60)
    hidden_NGH = torch.zeros(len(previous_N), 1, target.model.config.hidden_size)  # of no opinion: no base logits
    logits_ND = begun.drafter.teacher_forced(hidden_NGH, previous_N[:, None])[0][:, 0].detach()
    expected_ND = begun.markov.w1_Vr[previous_N] @ begun.markov.w2_Dr.T
    assert expected_ND.abs().max() > 1.0
    # The others have random weights beside those that pass the bigrams on.
    smallest, largest, alike = {"vanilla": (1.0, 1.0, 1.0), "gated": (0.8, 1.25, 0.95), "rnn": (0.4, 1.25, 0.9)}[head]
    size = float(logits_ND.norm() / expected_ND.norm())
    assert smallest - 1e-5 < size < largest + 1e-5
    assert float(torch.cosine_similarity(logits_ND.flatten(), expected_ND.flatten(), dim=0)) > alike - 1e-5


def test_every_tap_feature_has_the_same_part_in_the_context(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    run, begun = start(data, tmp_path / "run", target, "none")
    assert isinstance(begun.drafter, DSparkDrafter)
    weights_T = begun.drafter.fc.weight.detach().std(dim=0) * tap_scale(run.source, run.training_rows)
    assert weights_T.max() / weights_T.min() < 4.0  # each from 32 random numbers
    assert (begun.drafter.norm.weight == run.recipe.drafter.initial_output_scale).all()


def test_heads_start_out_looking_back(target: LoadedTarget, data: Path, tmp_path: Path) -> None:
    def near(strength: float) -> list[float]:
        """What each head of a mask slot behind the context gives to its last eight tokens, were all tokens average."""
        heads = {"head_dim": 32, "num_heads": 3, "num_kv_heads": 3, "initial_look_back": strength}
        recipe = tiny_recipe(data, tmp_path / f"run{strength}", drafter=heads, states={"source": "online"})
        run = prepare_run(plan_run(recipe, target), resume=False)
        drafter = start_drafter(run, tap_scale(run.source, run.training_rows)).drafter
        assert isinstance(drafter, DSparkDrafter)
        taps_NT = torch.cat([states.taps_ST for states in run.source.read(run.training_rows)]).float()
        layer, config, length = drafter.layers[0], drafter.config, 48
        mask_1H = drafter.embed_tokens.weight[config.mask_token_id][None]
        query_1hd = layer.self_attn.q_proj(layer.input_layernorm(mask_1H)).unflatten(-1, (3, 32))
        average_SH = drafter.context_features(taps_NT).mean(dim=0).expand(length, -1)
        keys_Shd = layer.self_attn.k_proj(average_SH).unflatten(-1, (3, 32))
        rope = RopeTable(RopeSettings.default(32, config.rope_theta), torch.float32, torch.device("cpu"))
        query_1hd = rotate(layer.self_attn.q_norm(query_1hd), *rope.lookup(torch.tensor([length]), length))
        keys_Shd = rotate(layer.self_attn.k_norm(keys_Shd), *rope.lookup(torch.arange(length), length))
        scores_hS = torch.einsum("hd,shd->hs", query_1hd[0], keys_Shd) * 32**-0.5
        return scores_hS.softmax(dim=-1)[:, -8:].sum(dim=-1).tolist()

    with torch.no_grad():
        assert min(near(3.0)) > 0.6
        assert max(near(0.0)) < 0.5
