"""A training recipe: everything that decides what a run computes, read from YAML and checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dspark.models.hardware import multiplies_bfloat16
from dspark.training.objective import ObjectiveSettings

__all__ = [
    "BatchRecipe",
    "BigramRecipe",
    "CheckpointRecipe",
    "DFlashRecipe",
    "DSparkRecipe",
    "DistributedRecipe",
    "DrafterRecipe",
    "Eagle3Recipe",
    "HeldOutRecipe",
    "LossRecipe",
    "MtpRecipe",
    "OptimiserRecipe",
    "Recipe",
    "StatesRecipe",
    "load_recipe",
]

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Moment = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _AnyDrafter(_Section):
    """What recipes of all drafters have. Sizes that are not given are those of the target's own layers.

    draft_vocab_size: most frequent response tokens that can be drafted; null for the target's whole vocabulary.
    initial_output_scale: of the final norm at the start; the target's own is usually above it.
    initialise_from: directory of a drafter to go on from (same kind and shape); null starts anew.
    """

    intermediate_size: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    draft_vocab_size: Positive | None = None
    initial_output_scale: PositiveFloat = 0.5
    initialise_from: Path | None = None


class _ParallelDrafter(_AnyDrafter):
    """Drafters that predict a whole block in one pass.

    mask_token: token id, or the token's text, whose embedding stands for "not yet known"; one that text never holds.
    tap_layers: target layers whose outputs are the context features; the final layer is not allowed.
    sample_from_anchor: true: the anchor's slot predicts the first draft token; false: the original DFlash layout.
    initial_look_back: how strongly heads start out looking at the tokens just before the block, whatever those are; 0
        for heads that start at random.
    """

    mask_token: int | str
    tap_layers: tuple[NonNegative, ...] = Field(min_length=1)
    num_layers: Positive = 2
    block_size: Positive = 7
    sample_from_anchor: bool = True
    initial_look_back: NonNegativeFloat = 3.0


class DSparkRecipe(_ParallelDrafter):
    """DSpark: parallel backbone, sequential head, confidence head."""

    kind: Literal["dspark"] = "dspark"
    markov_head: Literal["vanilla", "gated", "rnn", "none"] = "vanilla"
    markov_rank: Positive = 256
    confidence_head: bool = True
    confidence_head_with_markov: bool = True


class DFlashRecipe(_ParallelDrafter):
    """DFlash: the parallel backbone alone."""

    kind: Literal["dflash"]


class Eagle3Recipe(_AnyDrafter):
    """Eagle3: one autoregressive layer, trained on its own outputs for ``block_size`` steps (training-time test).

    tap_layers: target layers whose outputs are fused into its features; the final layer is not allowed.
    """

    kind: Literal["eagle3"]
    tap_layers: tuple[NonNegative, ...] = Field(min_length=1)
    block_size: Positive = 7


class MtpRecipe(_AnyDrafter):
    """MTP-1: one extra token from the target's last hidden state, by one layer."""

    kind: Literal["mtp"]

    @property
    def block_size(self) -> int:
        """One, by what it is."""
        return 1


DrafterRecipe = DSparkRecipe | DFlashRecipe | Eagle3Recipe | MtpRecipe


class StatesRecipe(_Section):
    """Teacher states: what the target computes on the data.

    source: ``offline`` computes them once and keeps them on disk; ``online`` computes them again in every step, with no
        disk at all.
    directory: of the store; null keeps it in ``states/`` of the run. Several runs can share one.
    tap_layers: layers to store, a superset of the drafter's, so that runs of other drafters can use the same store;
        null stores the drafter's.
    max_gib: most disk that the store may take; null for what is free.
    dtype: type the target computes in.
    """

    source: Literal["offline", "online"] = "offline"
    directory: Path | None = None
    tap_layers: tuple[NonNegative, ...] | None = None
    max_gib: PositiveFloat | None = None
    dtype: Literal["float32", "bfloat16", "int8"] = "bfloat16"
    max_length: Annotated[int, Field(ge=2)] = 1024
    tokens_per_batch: Positive = 2048
    shard_mib: Positive = 64


class LossRecipe(_Section):
    """Coefficients of the objective.

    distillation: of the cross-entropy against the target's distribution, the loss of EAGLE-3.
    confidence_reaches_backbone: whether the confidence loss also trains backbone and sequential head.
    """

    cross_entropy: NonNegativeFloat = 0.1
    total_variation: NonNegativeFloat = 0.9
    distillation: NonNegativeFloat = 0.0
    confidence: NonNegativeFloat = 1.0
    decay: PositiveFloat = 4.0
    confidence_reaches_backbone: bool = False

    def settings(self) -> ObjectiveSettings:
        """The same numbers for the pure objective."""
        return ObjectiveSettings(
            cross_entropy=self.cross_entropy,
            total_variation=self.total_variation,
            distillation=self.distillation,
            confidence=self.confidence,
            decay=self.decay,
        )


class BigramRecipe(_Section):
    """Fit of the Markov head alone before training; 0 steps for none."""

    steps: NonNegative = 600
    draws_per_step: Positive = 2048
    learning_rate: PositiveFloat = 0.02


class OptimiserRecipe(_Section):
    """Muon for matrices inside layers and ``fc``, Adam by row for W1, AdamW for the rest.

    muon_learning_rate: 0 gives the matrices to AdamW too.
    """

    muon_learning_rate: NonNegativeFloat = 0.02
    muon_momentum: Moment = 0.95
    learning_rate: PositiveFloat = 0.001
    beta1: Moment = 0.9
    beta2: Moment = 0.98
    weight_decay: NonNegativeFloat = 0.0
    gradient_clip: PositiveFloat | None = 1.0


class BatchRecipe(_Section):
    """A step: whole sequences until they give ``blocks_per_step`` blocks.

    anchor_every_tokens: a visit to a sequence takes one anchor for that many response tokens; with the block size,
        every response token is learnt about once per visit.
    accumulate: parts that a step is cut into, one after another, to save memory; the result is the same.
    autocast: products in bfloat16 where that is fast (`autocasts_on`); the weights and their optimiser stay float32.
    compile: run the step through ``torch.compile``.
    """

    steps: Positive
    blocks_per_step: Positive = 128
    anchor_every_tokens: Positive = 7
    warmup_steps: NonNegative = 50
    final_learning_rate_fraction: Fraction = 0.05
    accumulate: Positive = 1
    autocast: bool = True
    compile: bool = False

    def autocasts_on(self, device: torch.device) -> bool:
        """Whether products are in bfloat16 there: if asked for, and not on a CPU that has no instructions for it."""
        return self.autocast and multiplies_bfloat16(device)

    @model_validator(mode="after")
    def _check(self) -> BatchRecipe:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be smaller than steps ({self.steps})")
        return self


class HeldOutRecipe(_Section):
    """Held-out sequences: chosen by a hash of the row's id, so they stay held out when the data set grows.

    patience: stop after that many evaluations without a better accepted length at temperature 1; null never stops.
    """

    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    blocks: Positive = 512
    every_steps: Positive = 100
    patience: Positive | None = None


class CheckpointRecipe(_Section):
    """A checkpoint every ``every_steps``; the last ``keep`` stay, and the best one by held-out accepted length."""

    every_steps: Positive = 100
    keep: Positive = 2


class DistributedRecipe(_Section):
    """Several processes under ``torchrun``.

    strategy: ``ddp`` keeps a whole drafter in every process, ``fsdp`` a part of its weights and optimiser.
    timeout_minutes: a process that is not heard of for so long ends the run of all.
    """

    strategy: Literal["ddp", "fsdp"] = "ddp"
    timeout_minutes: PositiveFloat = 10.0


class Recipe(_Section):
    """A whole run.

    target: what ``--target`` takes.
    data: one data directory or more.
    out: directory of the run.
    tracking: where progress goes besides ``log.jsonl`` and the terminal.
    """

    target: str = "embedded"
    data: Annotated[tuple[Path, ...], Field(min_length=1)]
    out: Path
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "cpu"
    tracking: Literal["none", "tensorboard", "trackio"] = "none"
    drafter: Annotated[DrafterRecipe, Field(discriminator="kind")]
    batch: BatchRecipe
    distributed: DistributedRecipe = DistributedRecipe()
    states: StatesRecipe = StatesRecipe()
    loss: LossRecipe = LossRecipe()
    bigram: BigramRecipe = BigramRecipe()
    optimiser: OptimiserRecipe = OptimiserRecipe()
    held_out: HeldOutRecipe = HeldOutRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return [value] if isinstance(value, str | Path) else value

    @field_validator("device")
    @classmethod
    def _kind_of_device(cls, value: str) -> str:
        try:
            torch.device(value)
        except RuntimeError:
            raise ValueError("give cpu, cuda, cuda:0, mps or another device of PyTorch") from None
        return value

    @field_validator("drafter", mode="before")
    @classmethod
    def _dspark_by_default(cls, value: object) -> object:
        return {"kind": "dspark", **value} if isinstance(value, dict) else value

    def tap_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Target layers that the drafter sees; MTP sees the final one."""
        if isinstance(self.drafter, MtpRecipe):
            return (num_target_layers - 1,)
        return self.drafter.tap_layers

    @property
    def states_directory(self) -> Path:
        """Where the teacher states are."""
        return self.states.directory or self.out / "states"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply ``key=value`` overrides (``batch.steps=200``, values in YAML).

    Raises:
        ValueError: not YAML, an unknown key (with the nearest known one), a missing or an invalid value, or one that
            the drafter has no use for.
        OSError: the file cannot be read.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a YAML mapping of settings, as recipes/smollm2-135m.yaml is")
    for override in overrides:
        _apply(values, override)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{path}: " + "; ".join(_messages(error))) from None
    if useless := [*_useless(recipe)]:
        raise ValueError(f"{path}: " + "; ".join(useless))
    return recipe


def _useless(recipe: Recipe) -> Iterable[str]:
    """What was given, not left at its default, for a head that the drafter lacks; values that ask for nothing aside."""
    drafter, loss, bigram = recipe.drafter, recipe.loss, recipe.bigram
    if not (isinstance(drafter, DSparkRecipe) and drafter.confidence_head):
        remedy = "but the drafter has no confidence head: leave it out or give"
        if "confidence" in loss.model_fields_set and loss.confidence > 0.0:
            yield f"loss.confidence is {loss.confidence:g}, {remedy} 0"
        if loss.confidence_reaches_backbone:
            yield f"loss.confidence_reaches_backbone is true, {remedy} false"
    has_markov_head = isinstance(drafter, DSparkRecipe) and drafter.markov_head != "none"
    if bigram.model_fields_set and bigram.steps > 0 and not has_markov_head:
        given = ", ".join(f"bigram.{name}" for name in sorted(bigram.model_fields_set))
        yield f"{given} given, but the drafter has no Markov head: leave bigram out or give bigram.steps=0"


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"override {override!r} is not of the form key=value, for example batch.steps=200")
    *sections, name = key.strip().split(".")
    place = values
    for depth, section in enumerate(sections):
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ValueError(f"override {override!r}: {'.'.join(sections[: depth + 1])} is a value, not a section")
        place = inner
    try:
        place[name] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML ({error})") from error


def _messages(error: ValidationError) -> Iterable[str]:
    for problem in error.errors(include_url=False):
        location = [str(part) for part in problem["loc"]]
        kind = location.pop(1) if location[:1] == ["drafter"] and location[1:2] and location[1] in _KINDS else None
        name = ".".join(location)
        if problem["type"] == "extra_forbidden":
            of_kind = "" if kind is None else f" for drafter.kind={kind}"
            yield f"unknown key {name}{of_kind}; {_nearest(location, kind)}"
        elif problem["type"] == "missing":
            yield f"{name} is missing"
        elif problem["type"] == "union_tag_invalid":
            yield f"drafter.kind is {problem['input']['kind']!r}: it must be one of {', '.join(_KINDS)}"
        elif problem["type"] == "value_error" and isinstance(problem["input"], dict):
            # Of a whole section, whose message names its keys.
            yield f"{name}: {problem['msg'].removeprefix('Value error, ')}"
        else:
            yield f"{name} is {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"


_KINDS: dict[str, type[_AnyDrafter]] = {
    "dspark": DSparkRecipe,
    "dflash": DFlashRecipe,
    "eagle3": Eagle3Recipe,
    "mtp": MtpRecipe,
}


def _nearest(location: Sequence[str], kind: str | None) -> str:
    """The known key most like the unknown one: in its own section first, then anywhere."""
    known = [*_known_keys(Recipe), *_known_keys(_KINDS[kind or "dspark"], "drafter.")]
    section = ".".join(location[:-1])
    prefix = section + "." if section else ""
    siblings = {key.removeprefix(prefix): key for key in known if key.startswith(prefix)}
    names = {key.rsplit(".", 1)[-1]: key for key in known}
    for candidates in ({name: key for name, key in siblings.items() if "." not in name}, names):
        if close := get_close_matches(location[-1], candidates, n=1, cutoff=0.6):
            return f"did you mean {candidates[close[0]]}?"
    return f"known keys are {', '.join(sorted(name for name in siblings if '.' not in name) or known)}"


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys
