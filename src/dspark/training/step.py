"""One training step's gradients: in one process or several, in one pass or accumulated over several.

A step's loss is a sum over its parts (processes times accumulation steps) with one global denominator, so gradients
are *summed* over processes, never averaged, and do not depend on how the step was cut.

Shapes: M blocks, G slots of a block, N supervised slots.
"""

from __future__ import annotations

import copy
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dspark.drafters.registry import TrainableDrafter
from dspark.training.accepted_length import AcceptanceSums, AcceptedLength
from dspark.training.batches import StepBlocks, TrainingBatch, load_batch
from dspark.training.distributed import World
from dspark.training.forward import TargetHead, predict_slots
from dspark.training.objective import ObjectiveSettings, objective, slot_weights
from dspark.training.shards import whole_state
from dspark.training.states import StateSource

__all__ = ["ParallelStep", "StepSums", "TrainingStep", "compile_backend", "spread"]

Strategy = Literal["ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """A step's loss and what it is made of, over all parts.

    Attributes:
        loss: the objective.
        cross_entropy, l1_distance, confidence_bce: its terms, means with the objective's weights of slots.
        acceptance: expected accepted length at temperature 1.
        block_tokens: supervised slots.
    """

    loss: float
    cross_entropy: float
    l1_distance: float
    confidence_bce: float
    acceptance: AcceptedLength
    block_tokens: int


class TrainingStep(nn.Module):
    """The loss of one part of a step as a module, which is what data parallelism wraps."""

    def __init__(
        self,
        drafter: TrainableDrafter,
        head: TargetHead,
        settings: ObjectiveSettings,
        *,
        autocast: bool,
        confidence_reaches_backbone: bool,
    ) -> None:
        """See ``predict_slots`` and ``objective``."""
        super().__init__()
        self.drafter = drafter
        self.head = head
        self.settings = settings
        self.autocast = autocast
        self.confidence_reaches_backbone = confidence_reaches_backbone
        self.weights_G = slot_weights(drafter.block_size, settings.decay).to(drafter.device, torch.float32)

    def forward(self, batch: TrainingBatch, total_weight: float, counts: bool) -> tuple[Tensor, Tensor]:
        """The part's share of the loss, and sums for the log.

        Args:
            batch: the part.
            total_weight: ``Σ w_k`` of the whole step.
            counts: False makes every weight zero: the part stands in for one that has no rows, so that its process
                takes part in all communication without changing anything.

        Returns:
            ``(loss, sums)``: scalar, and float64 ``[4 + 3 G]``: loss, its three terms, and those of `AcceptanceSums`.
        """
        slots = predict_slots(
            self.drafter,
            batch,
            self.head,
            autocast=self.autocast,
            confidence_reaches_backbone=self.confidence_reaches_backbone,
        )
        weights_N = self.weights_G[slots.slot_N]
        if not counts:
            weights_N = torch.zeros_like(weights_N)
        terms = objective(
            logits_ND=slots.logits_ND,
            target_logits_ND=slots.target_logits_ND,
            target_log_normaliser_N=slots.target_log_normaliser_N,
            label_columns_N=slots.label_columns_N,
            slot_weights_N=weights_N,
            settings=self.settings,
            confidence_logits_N=slots.confidence_logits_N,
            total_weight=total_weight,
        )
        with torch.no_grad():
            bce_N = terms.confidence_bce_N
            means = [
                terms.loss.detach(),
                weights_N @ terms.draft.cross_entropy_N / total_weight,
                weights_N @ terms.draft.l1_distance_N / total_weight,
                torch.zeros_like(terms.loss) if bce_N is None else weights_N @ bce_N.to(weights_N.dtype) / total_weight,
            ]
            acceptance = AcceptanceSums.of(
                spread(terms.draft.acceptance_N, batch.supervised_MG), batch.supervised_MG & counts
            )
            sums = torch.cat(
                (
                    torch.stack(means).cpu().double(),
                    acceptance.reached_G,
                    acceptance.survival_G,
                    acceptance.acceptance_G,
                )
            )
        return terms.loss, sums


class ParallelStep:
    """Gradients of whole steps, from all processes."""

    def __init__(
        self,
        step: TrainingStep,
        world: World,
        *,
        strategy: Strategy = "ddp",
        accumulate: int = 1,
        compile_backend: str | None = None,
    ) -> None:
        """Give all processes the main one's parameters and spread the drafter over them.

        Args:
            step: its drafter is changed in place: with ``fsdp`` its trained parameters become shards, layer by layer.
            world: the processes.
            strategy: ``ddp`` keeps whole parameters in every process, ``fsdp`` a part of them.
            accumulate: passes of every process for one step.
            compile_backend: compile the draft layers with this backend of ``torch.compile``; None for not at all.
        """
        self._step = step
        self._world = world
        self._accumulate = accumulate
        self._module: nn.Module = step
        self._shell: TrainableDrafter | None = None
        self._loss_scale = 1.0
        trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
        world.broadcast(trained)
        layers = list(step.drafter.layers)
        sharded = strategy == "fsdp" and not world.is_single
        if sharded:
            self._shell = _without_memory(step.drafter)
        if compile_backend is not None:
            for layer in layers:
                # The method, not the module: hooks of data parallelism stay outside.
                layer.forward = torch.compile(layer.forward, dynamic=True, backend=compile_backend)
        if sharded:
            mesh = init_device_mesh(world.device.type, (world.world_size,))
            frozen = {parameter for parameter in step.parameters() if not parameter.requires_grad}
            for module in [*layers, step]:
                wrapped = fully_shard(module, mesh=mesh, ignored_params=frozen)
                wrapped.set_gradient_divide_factor(1.0)
                wrapped.set_force_sum_reduction_for_comms(True)
        elif world.is_single:
            for module in step.modules():
                if isinstance(module, nn.Embedding) and module.weight.requires_grad:
                    module.sparse = True  # a step's gradient has few of the rows
        else:
            # Nothing but the trained parameters ever changes; without this, buffers would travel in every pass.
            same = [*(name for name, _ in step.named_buffers()), *_frozen_names(step)]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, same)
            self._module = DistributedDataParallel(step, init_sync=False, gradient_as_bucket_view=True)
            self._loss_scale = float(world.world_size)  # DDP averages what has to be a sum

    def backward(self, blocks: StepBlocks, source: StateSource) -> StepSums:
        """Add the step's gradients to those of the parameters.

        Args:
            blocks: the whole step, the same in every process; each reads its own parts.
            source: teacher states.
        """
        drafter, world = self._step.drafter, self._world
        num_parts = self._accumulate * world.world_size
        blocks_G = torch.from_numpy(blocks.supervised_blocks(drafter.block_size)).double()
        total_weight = float(slot_weights(drafter.block_size, self._step.settings.decay) @ blocks_G)
        sums = torch.zeros(4 + 3 * drafter.block_size, dtype=torch.float64)
        for index in range(self._accumulate):
            part = blocks.part(index * world.world_size + world.rank, num_parts)
            counts = bool(part.rows)
            if not counts:
                if world.is_single:
                    continue
                part = StepBlocks(rows=blocks.rows[:1], anchors=(blocks.anchors[0][:1],))
            batch = load_batch(source, part, block_size=drafter.block_size, device=world.device)
            with self._without_reduction(last=index == self._accumulate - 1):
                loss, part_sums = self._module(batch, total_weight, counts)
                (loss * self._loss_scale if self._loss_scale != 1.0 else loss).backward()
            sums += part_sums
        sums = world.sum(sums)
        loss, cross_entropy, l1_distance, confidence_bce = sums[:4].tolist()
        reached_G, survival_G, acceptance_G = sums[4:].chunk(3)
        return StepSums(
            loss=loss,
            cross_entropy=cross_entropy,
            l1_distance=l1_distance,
            confidence_bce=confidence_bce,
            acceptance=AcceptanceSums(
                blocks_G=blocks_G, reached_G=reached_G, survival_G=survival_G, acceptance_G=acceptance_G
            ).accepted_length(),
            block_tokens=int(blocks_G.sum()),
        )

    def whole_drafter(self) -> TrainableDrafter:
        """The drafter with whole parameters, for evaluation and for saving; itself where it is not sharded.

        All processes must ask together. A copy shares the frozen parameters.
        """
        if self._shell is None:
            return self._step.drafter
        state = whole_state(self._step.drafter)
        drafter = copy.deepcopy(self._shell)
        drafter.load_state_dict(state, assign=True)
        return drafter

    def _without_reduction(self, *, last: bool) -> AbstractContextManager[object]:
        """Leave the sum over processes to the last part of a step."""
        if isinstance(self._module, FSDPModule):
            self._module.set_requires_gradient_sync(last)
        if isinstance(self._module, DistributedDataParallel) and not last:
            return self._module.no_sync()
        return nullcontext()


def compile_backend() -> str:
    """The backend of ``torch.compile`` to train with.

    Raises:
        ValueError: there is no C++ compiler, without which it fails in the first step.
    """
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler) for compiler in compilers):
        raise ValueError(
            f"batch.compile needs a C++ compiler and {', '.join(compilers)} is not there: install one (g++), or set "
            "batch.compile=false"
        )
    return "inductor"


def spread(values_N: Tensor, supervised_MG: Tensor) -> Tensor:
    """``[M, G]`` from the values of the supervised slots; 0 elsewhere."""
    spread_MG = torch.zeros(supervised_MG.shape, dtype=values_N.dtype, device=values_N.device)
    spread_MG[supervised_MG] = values_N
    return spread_MG


def _frozen_names(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def _without_memory(drafter: TrainableDrafter) -> TrainableDrafter:
    """A copy of the module whose tensors are only shapes."""
    tensors = [*drafter.parameters(), *drafter.buffers()]
    memo = {
        id(tensor): nn.Parameter(tensor.to("meta"), requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("meta")
        for tensor in tensors
    }
    return copy.deepcopy(drafter, memo)
