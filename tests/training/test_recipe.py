from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from dspark.training.recipe import load_recipe
from dspark.training.schedule import learning_rate_factor

SHIPPED = Path(__file__).parents[2] / "recipes"
MINIMAL = "data: d\nout: o\ndrafter: {mask_token: 0, tap_layers: [1, 2]}\nbatch: {steps: 100}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(SHIPPED.rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    load_recipe(path)


def test_every_kind_has_its_keys(tmp_path: Path) -> None:
    text = "data: d\nout: o\nbatch: {steps: 100}\n"
    mtp = load_recipe(write(tmp_path, text + "drafter: {kind: mtp}\n"))
    assert (mtp.drafter.kind, mtp.drafter.block_size, mtp.tap_layers(12)) == ("mtp", 1, (11,))
    eagle3 = load_recipe(write(tmp_path, text + "drafter: {kind: eagle3, tap_layers: [1, 5]}\n"))
    assert (eagle3.drafter.kind, eagle3.drafter.block_size, eagle3.tap_layers(12)) == ("eagle3", 7, (1, 5))
    unnamed = load_recipe(write(tmp_path, MINIMAL))
    assert unnamed.drafter.kind == "dspark"
    with pytest.raises(ValueError, match=r"drafter.tap_layers is missing"):
        load_recipe(write(tmp_path, text + "drafter: {kind: eagle3}\n"))


def test_overrides_reach_any_depth_and_are_yaml(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, MINIMAL),
        ["batch.steps=7", "batch.warmup_steps=1", "loss.decay=1e1", "drafter.tap_layers=[3, 5]", "held_out.patience=4"],
    )
    assert recipe.batch.steps == 7
    assert recipe.loss.decay == 10.0
    assert recipe.drafter.tap_layers == (3, 5)
    assert recipe.held_out.patience == 4
    assert recipe.states_directory == Path("o/states")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.step=3"], r"unknown key batch.step; did you mean batch.steps\?"),
        (["learning_rate=3"], r"unknown key learning_rate; did you mean optimiser.learning_rate\?"),
        (["optimizer.learning_rate=3"], r"unknown key optimizer; did you mean optimiser\?"),
        (["loss.zzz=3"], r"unknown key loss.zzz; known keys are .*decay"),
        (["batch.steps=many"], r"batch.steps is 'many'"),
        (["batch.steps=20"], r": batch: warmup_steps \(50\) must be smaller than steps \(20\)"),
        (["drafter.kind=eagle4"], r"drafter.kind is 'eagle4': it must be one of dspark, dflash, eagle3, mtp"),
        (["drafter.kind=mtp"], r"unknown key drafter.mask_token for drafter.kind=mtp.*unknown key drafter.tap_layers"),
        (["drafter.kind=dflash", "drafter.markov_rank=3"], r"unknown key drafter.markov_rank for drafter.kind=dflash"),
        (["drafter.kind=eagle3"], r"unknown key drafter.mask_token for drafter.kind=eagle3"),
        (["states.source=disk"], r"states.source is 'disk'.*online"),
        (["tracking=wandb"], r"tracking is 'wandb'.*tensorboard"),
        (["drafter.markov_head=lstm"], r"drafter.markov_head is 'lstm'.*vanilla"),
        (["batch.steps"], r"not of the form key=value"),
        (["seed=1", "seed.steps=1"], r"override 'seed.steps=1': seed is a value, not a section"),
        (["drafter.tap_layers=[1"], r"not valid YAML"),
        (["device=nonsense"], r"device is 'nonsense': give cpu, cuda"),
        (["seed=99999999999999999999"], r"seed is 99999999999999999999: Input should be less than"),
        (["optimiser.learning_rate=.inf"], r"optimiser.learning_rate is inf: Input should be a finite number"),
        (["optimiser.beta1=1.0"], r"optimiser.beta1 is 1.0: Input should be less than 1"),
    ],
)
def test_mistakes_are_named_with_a_remedy(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path, MINIMAL), overrides)


WITHOUT_HEADS = ["drafter={kind: dflash, mask_token: 0, tap_layers: [1, 2]}"]
NO_CONFIDENCE = ["drafter.confidence_head=false"]
NO_MARKOV = ["drafter.markov_head=none"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [*WITHOUT_HEADS, "loss.confidence=0.5"],
            r"loss.confidence is 0.5, but .* no confidence head: leave it out or",
        ),
        ([*NO_CONFIDENCE, "loss.confidence=1"], r"loss.confidence is 1, but the drafter has no confidence head"),
        (
            [*NO_CONFIDENCE, "loss.confidence_reaches_backbone=true"],
            r"loss.confidence_reaches_backbone is true, but.*or give false",
        ),
        ([*NO_MARKOV, "bigram.learning_rate=0.1"], r"bigram.learning_rate given, but .* give bigram.steps=0"),
        ([*WITHOUT_HEADS, "bigram={steps: 3, draws_per_step: 4}"], r": bigram.draws_per_step, bigram.steps given, but"),
        (["drafter={kind: mtp}", "bigram.steps=1", "loss.confidence=1"], r"loss.confidence is 1.*; bigram.steps given"),
    ],
)
def test_what_the_drafter_has_no_use_for_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write(tmp_path, MINIMAL), overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        WITHOUT_HEADS,
        [*NO_CONFIDENCE, *NO_MARKOV],
        [*WITHOUT_HEADS, "loss.confidence=0", "loss.confidence_reaches_backbone=false", "bigram.steps=0"],
        [*NO_CONFIDENCE, "bigram.steps=1"],
        [*NO_MARKOV, "loss.confidence=1"],
    ],
)
def test_defaults_and_values_that_ask_for_nothing_are_not(tmp_path: Path, overrides: list[str]) -> None:
    load_recipe(write(tmp_path, MINIMAL), overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: d", "out is missing"),
        ("- a", "must be a YAML mapping"),
        ("a: [", "not valid YAML"),
        ("seed: 3\n" + MINIMAL + "seeds: 4\n", "unknown key seeds; did you mean seed"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(write(tmp_path, text))
    assert "recipe.yaml" in str(caught.value)


def test_the_rate_warms_up_and_falls_to_its_final_fraction() -> None:
    factors = [learning_rate_factor(s, warmup_steps=4, total_steps=20, final_fraction=0.1) for s in range(20)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a >= b for a, b in pairwise(factors[4:]))
    assert factors[-1] == pytest.approx(0.1)
