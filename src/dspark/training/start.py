"""The drafter that a run starts from: its draft vocabulary and first weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dspark.drafters.checkpoint import load_drafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.registry import AnyConfig, TrainableDrafter, drafter_from_target
from dspark.models.loading import LoadedTarget
from dspark.training.bigram import MarkovStart, count_bigrams, fit_markov_start
from dspark.training.data.rows import DataRow
from dspark.training.drafter_config import check_given_config, drafter_config
from dspark.training.look_back import look_back
from dspark.training.recipe import DFlashRecipe, DSparkRecipe
from dspark.training.run import Run
from dspark.training.vocabulary import choose_draft_vocabulary, count_response_tokens

__all__ = ["RunStart", "start_drafter"]

# Small enough that tanh is nearly the identity on it.
_RNN_START_SCALE = 0.25
_ROWS = 64  # whose features are averaged


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The drafter that a new run starts from.

    Attributes:
        coverage: share of response tokens inside the draft vocabulary.
        markov: the bigram fit; None when there was none.
    """

    drafter: TrainableDrafter
    coverage: float
    markov: MarkovStart | None


def start_drafter(
    run: Run, tap_scale_T: Tensor, *, on_bigram_step: Callable[[int, float], None] | None = None
) -> RunStart:
    """The drafter a new run starts from: random, with the Markov head fitted to the data's bigrams, or a given one.

    A random ``fc`` gives every tap feature the same part in the context, whatever its size (``tap_scale_T``), the final
    norm starts at ``initial_output_scale``, so that the bigrams are not drowned in the backbone's first noise, and
    the heads of a parallel drafter start out looking back (`look_back`).

    Raises:
        ValueError: ``drafter.initialise_from`` is a drafter of another shape.
    """
    recipe, target = run.recipe, run.target
    config = drafter_config(recipe, target)
    training_ids = {row.id for row in run.training_rows}
    rows = [row for row in run.data_rows if row.id in training_ids]
    counts_V = count_response_tokens(rows, config.vocab_size)
    if recipe.drafter.initialise_from is not None:
        drafter = _given_drafter(recipe.drafter.initialise_from, config, target)
        ids_D = drafter.draft_token_ids_D
        covered = counts_V if ids_D is None else counts_V[ids_D.cpu().numpy()]
        return RunStart(drafter=drafter, coverage=float(covered.sum() / max(1, counts_V.sum())), markov=None)
    vocabulary = choose_draft_vocabulary(
        counts_V, config.draft_vocab_size, always_include=_end_tokens(rows, target.stop_token_ids)
    )
    drafter = drafter_from_target(
        config,
        target.model,
        vocabulary.token_ids if config.has_reduced_vocabulary else None,
        generator=torch.Generator().manual_seed(recipe.seed),
    )
    parameters = dict(drafter.named_parameters())
    with torch.no_grad():
        if "fc.weight" in parameters:
            parameters["fc.weight"].div_(tap_scale_T.to(drafter.device))
        parameters["norm.weight"].fill_(recipe.drafter.initial_output_scale)
    if isinstance(drafter, DSparkDrafter) and isinstance(recipe.drafter, DSparkRecipe | DFlashRecipe):
        sample = run.source.read(run.training_rows[:_ROWS])
        look_back(
            drafter,
            torch.cat([states.taps_ST for states in sample]).to(drafter.device),
            torch.cat([states.token_ids_S.long() for states in sample]).to(drafter.device),
            strength=recipe.drafter.initial_look_back,
        )
    markov = None
    if isinstance(drafter, DSparkDrafter) and drafter.config.markov_rank > 0 and recipe.bigram.steps > 0:
        markov = fit_markov_start(
            count_bigrams(rows, vocabulary.columns_of_target_ids(config.vocab_size)),
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            rank=drafter.config.markov_rank,
            steps=recipe.bigram.steps,
            draws_per_step=recipe.bigram.draws_per_step,
            learning_rate=recipe.bigram.learning_rate,
            seed=recipe.seed,
            device=drafter.device,
            on_step=on_bigram_step,
        )
        _put_markov_start(drafter, markov)
    return RunStart(drafter=drafter, coverage=vocabulary.coverage, markov=markov)


@torch.no_grad()
def _put_markov_start(drafter: DSparkDrafter, start: MarkovStart) -> None:
    """Give the sequential head the fitted bigrams: exactly (vanilla), or what it computes before it has learnt more.

    A gate of zero bias halves its input, so W2 is doubled. The recurrent head's output passes W1's row, small enough
    for tanh, and W2 makes up for it.
    """
    head_type, rank = drafter.config.markov_head_type or "vanilla", drafter.config.markov_rank
    factor = {"vanilla": 1.0, "gated": 2.0, "rnn": 1.0 / _RNN_START_SCALE}[head_type]
    drafter.get_parameter("markov_head.markov_w1.weight").copy_(start.w1_Vr)
    drafter.get_parameter("markov_head.markov_w2.weight").copy_(start.w2_Dr * factor)
    if head_type == "rnn":
        output_rows, embedding_columns = slice(2 * rank, 3 * rank), slice(rank, 2 * rank)
        projection = drafter.get_parameter("markov_head.joint_proj.weight")
        projection[output_rows, embedding_columns] = _RNN_START_SCALE * torch.eye(rank)


def _end_tokens(rows: Sequence[DataRow], stop_token_ids: frozenset[int]) -> set[int]:
    """Tokens that end answers: the target's own, and what the data's finished answers end with."""
    ends = {
        row.token_ids[end - 1]
        for row in rows
        for (_, end), reason in zip(row.response_spans, row.finish_reasons, strict=True)
        if reason == "stop"
    }
    return ends | stop_token_ids


def _given_drafter(directory: Path, config: AnyConfig, target: LoadedTarget) -> TrainableDrafter:
    """The drafter in ``directory``, with the embedding and LM head of this target whatever its file holds of them."""
    check_given_config(directory, config)
    drafter = load_drafter(directory, target.model, device=target.model.device, dtype=torch.float32, calibrated=False)
    embedding_VH, head_VH = target.model.embedding_weight_VH, target.model.lm_head_weight_VH
    ids_D = drafter.draft_token_ids_D
    head_DH = head_VH if ids_D is None else head_VH[ids_D.to(head_VH.device)]
    for module, weight in ((drafter.embed_tokens, embedding_VH), (drafter.lm_head, head_DH)):
        module.weight = nn.Parameter(weight.detach().to(drafter.device, torch.float32), requires_grad=False)
    return drafter
