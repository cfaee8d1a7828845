"""The parts of a transformers model that a target needs, found and then checked against what the model computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

# Relative error up to which two ways of computing the same rows count as the same.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
_CHECK_TOKENS = 8
# Configs call these by several names, and divide by the scale or multiply with it: which, shows in the logits.
_SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_LOGIT_SCALE_NAMES = ("logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Where a model keeps what.

    Attributes:
        decoder: ids to hidden states after the final norm.
        layers: its decoder layers.
        hidden_scale: factor between ``decoder``'s output and what the LM head has to read for the model's logits.
        final_softcap: ``cap * tanh(logits / cap)`` behind the LM head; None for none.
        embedding_scale: factor between ``embedding``'s output and the first layer's input; None if that input depends
            on the position too.
    """

    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    embedding: nn.Embedding
    lm_head: nn.Linear
    hidden_scale: float
    final_softcap: float | None
    embedding_scale: float | None


@torch.inference_mode()
def examine(model: PreTrainedModel) -> Anatomy:
    """Find the parts of ``model`` and check them on a few tokens.

    Raises:
        ValueError: naming the model and the part that is not as expected.
    """
    config = model.config.get_text_config(decoder=True)
    name = model_name(model)
    decoder = text_model(model)
    embedding, lm_head = _ends(model, config, name)
    layers = _layers(decoder, config.num_hidden_layers, name)
    ids_1Q = torch.tensor([check_token_ids(model)], device=lm_head.weight.device)
    logits_QV = model(input_ids=ids_1Q, use_cache=False).logits[0].float()
    with layer_outputs(layers, range(len(layers))) as outputs, _first_input(layers[0]) as first:
        states = decoder(input_ids=ids_1Q, use_cache=False, output_hidden_states=True)
    expected = states.hidden_states
    for index, layer_output in outputs.items():
        fits = layer_output.shape == (*ids_1Q.shape, config.hidden_size)
        # The last of `hidden_states` is after the final norm, and so no layer's output.
        if index < len(layers) - 1:
            fits = fits and len(expected) > index + 1 and _same(layer_output, expected[index + 1])
        if not fits:
            raise ValueError(
                f"{name} cannot be a target: the output of decoder layer {index} is not its hidden_states[{index + 1}]"
                f" of {config.hidden_size} features, so no drafter can be trained on it"
            )
    scale, softcap = _output_formula(states.last_hidden_state[0], lm_head, logits_QV, config, name)
    return Anatomy(
        decoder=decoder,
        layers=layers,
        embedding=embedding,
        lm_head=lm_head,
        hidden_scale=scale,
        final_softcap=softcap,
        embedding_scale=_ratio(first[0], embedding(ids_1Q)),
    )


def model_name(model: PreTrainedModel) -> str:
    """What messages call it: class and model type."""
    return f"{type(model).__name__} (model_type {model.config.model_type!r})"


def text_model(model: PreTrainedModel) -> nn.Module:
    """The part of ``model`` that turns ids into hidden states, without the LM head.

    Raises:
        ValueError: if it has no such part.
    """
    decoder: nn.Module = model.get_decoder()
    if decoder is not model:
        return decoder
    for child in model.children():
        if isinstance(child, PreTrainedModel):
            decoder = child
            return decoder
    raise ValueError(f"{model_name(model)} cannot be a target: it has no text model apart from its LM head")


def check_token_ids(model: PreTrainedModel) -> list[int]:
    """A few different ordinary tokens: none that stands for an image, a pause or a padding."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for key, value in config.to_dict().items():
            if key.endswith(("token_id", "token_index")):
                special.update(value if isinstance(value, list) else [value])
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    step = max(1, vocab_size // (2 * _CHECK_TOKENS))
    ordinary = [token for token in range(0, vocab_size, step) if token not in special]
    return ordinary[1 : _CHECK_TOKENS + 1]


@contextmanager
def layer_outputs(layers: Sequence[nn.Module], indices: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Outputs of the layers at ``indices`` in the pass that runs inside, by index."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[index].register_forward_hook(keep(index)) for index in sorted(set(indices))]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _first_input(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    inputs: list[torch.Tensor] = []

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield inputs
    finally:
        handle.remove()


def _ends(model: PreTrainedModel, config: Any, name: str) -> tuple[nn.Embedding, nn.Linear]:
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(lm_head) is not nn.Linear:
        raise ValueError(
            f"{name} cannot be a target: its embedding and LM head are {type(embedding).__name__} and "
            f"{type(lm_head).__name__}, not an embedding and a linear layer"
        )
    shape = (config.vocab_size, config.hidden_size)
    for what, weight in (("embedding", embedding.weight), ("LM head", lm_head.weight)):
        if tuple(weight.shape) != shape:
            raise ValueError(
                f"{name} cannot be a target: its {what} has shape {tuple(weight.shape)}, vocab_size and hidden_size of "
                f"config.json ask for {shape}"
            )
    return embedding, lm_head


def _layers(decoder: nn.Module, count: int, name: str) -> tuple[nn.Module, ...]:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return tuple(module)
    raise ValueError(f"{name} cannot be a target: it has no list of {count} decoder layers (num_hidden_layers)")


def _output_formula(
    hidden_QH: torch.Tensor, lm_head: nn.Linear, logits_QV: torch.Tensor, config: Any, name: str
) -> tuple[float, float | None]:
    """Scale and soft cap with which the LM head gives the model's logits."""
    scales = _numbers(config, _LOGIT_SCALE_NAMES)
    softcaps = _numbers(config, _SOFTCAP_NAMES)
    # What the config names goes first: at small logits a cap that is there hardly shows.
    for softcap, scale in product([*softcaps, None], [*scales, *(1.0 / scale for scale in scales), 1.0]):
        ours_QV = lm_head((hidden_QH * scale).to(lm_head.weight.dtype)).float()
        if softcap is not None:
            ours_QV = softcap * torch.tanh(ours_QV / softcap)
        if _same(ours_QV, logits_QV, tolerance=TOLERANCES.get(lm_head.weight.dtype)):
            return scale, softcap
    raise ValueError(
        f"{name} cannot be a target: its logits are not those of its LM head on its last hidden state, with logit scale"
        f" one of {scales or 'none'} and soft cap one of {softcaps or 'none'} (from {', '.join(_LOGIT_SCALE_NAMES)}, "
        f"{', '.join(_SOFTCAP_NAMES)} of config.json)"
    )


def _numbers(config: Any, names: Sequence[str]) -> list[float]:
    values = [getattr(config, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float) and value]


def _ratio(ours: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """The number that ``theirs`` has to be multiplied with to give ``ours``; None if there is none."""
    if ours.shape != theirs.shape:
        return None
    a, b = ours.double().flatten(), theirs.double().flatten()
    ratio = round(float(a @ b / (b @ b)), 6)
    return ratio if _same(b * ratio, a, tolerance=TOLERANCES.get(ours.dtype)) else None


def _same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> bool:
    if ours.shape != theirs.shape:
        return False
    if tolerance is None:
        tolerance = TOLERANCES.get(ours.dtype, 1e-3)
    return float(functional.mse_loss(ours.double(), theirs.double()).sqrt()) <= tolerance * float(
        theirs.double().square().mean().sqrt()
    )
