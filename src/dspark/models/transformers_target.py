"""Any causal language model of transformers as a target: slower than the native decoder, for every other family."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from dspark.models.block_tables import BlockTables
from dspark.models.fingerprint import Fingerprint
from dspark.models.target import TargetCache, TargetOutput, check_pass
from dspark.models.transformers_anatomy import (
    TOLERANCES,
    check_token_ids,
    examine,
    layer_outputs,
    model_name,
    text_model,
)
from dspark.models.transformers_cache import SlotCache, layer_kinds
from dspark.types import Segment

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NORM_EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """Sizes of the text model (implements :class:`~dspark.models.target.TargetConfig`).

    Where layers differ in size, these are the first one's, and with experts the config's ``intermediate_size``; they
    only size a drafter.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    final_softcap: float | None


class TransformersTarget:
    """A causal language model of transformers with slots (implements :class:`~dspark.models.target.Target`).

    The forward pass is the model's own; this class keeps its keys and values, taps its layers, and applies its LM head
    to the asked rows. Segments that start at the same position are one right-padded batch, others one pass each.

    What it assumes of the model is checked on a few tokens: that LM head, scale and soft cap give the model's logits,
    that the layers' outputs are its ``hidden_states``, and that passes in pieces, with a rollback, equal a whole one.
    A logit scale is part of the hidden states here, so that the LM head's weight stays the checkpoint's.

    Args:
        model: as ``AutoModelForCausalLM`` gives it, in float32 or bfloat16; it is frozen, and its text model is kept.
        device: where to run it.
        fingerprint: of the checkpoint as it is stored; by default it is taken from ``model``.

    Raises:
        ValueError: if the model has a state that cannot be rolled back, or does not pass the check, saying where.
    """

    def __init__(
        self, model: PreTrainedModel, *, device: torch.device | str = "cpu", fingerprint: str | None = None
    ) -> None:
        raw = model.config.get_text_config(decoder=True)
        name = model_name(model)
        self._layer_kinds = layer_kinds(raw)
        self._device = torch.device(device)
        model.eval().requires_grad_(False).to(self._device)
        with _as_refusal(name):
            self._anatomy = examine(model)
        self._decoder, self._lm_head = self._anatomy.decoder, self._anatomy.lm_head
        self._dtype = self._lm_head.weight.dtype
        names = {dtype: compute_dtype for compute_dtype, dtype in COMPUTE_DTYPES.items()}
        if self._dtype not in names:
            raise ValueError(f"{name} is in {self._dtype}; load it in one of {sorted(COMPUTE_DTYPES)}")
        self.compute_dtype = names[self._dtype]
        self._config = _read_config(raw, self._anatomy.final_softcap)
        self._fingerprint = transformers_fingerprint(model) if fingerprint is None else fingerprint
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        with _as_refusal(name):
            self._check_pieces(check_token_ids(model), name)

    @property
    def config(self) -> TransformersConfig:
        return self._config

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def embedding_weight_VH(self) -> torch.Tensor:
        return self._anatomy.embedding.weight

    @property
    def lm_head_weight_VH(self) -> torch.Tensor:
        return self._lm_head.weight

    @property
    def lm_head_bias_V(self) -> torch.Tensor | None:
        bias: torch.Tensor | None = self._lm_head.bias
        return bias

    @property
    def shares_blocks(self) -> bool:
        return False

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> SlotCache:
        """Key/value memory for ``num_slots`` requests of up to ``max_length`` tokens each, taken as layers use it.

        Raises:
            ValueError: if ``max_length`` is more than the model's context, or there are ``tables``.
        """
        if tables is not None:
            raise ValueError("a transformers target keeps its own memory and cannot share blocks: leave tables out")
        if max_length > self._config.max_position_embeddings:
            raise ValueError(
                f"max_length is {max_length}, the target's context holds {self._config.max_position_embeddings} tokens"
            )
        return SlotCache(layer_kinds=self._layer_kinds, num_slots=num_slots, max_length=max_length)

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings ``[..., H]`` as the first layer reads them.

        Raises:
            ValueError: if the model adds something that depends on the position.
        """
        if self._anatomy.embedding_scale is None:
            raise ValueError(
                "the target's first layer reads more than the token's embedding: positions, or a norm of it"
            )
        embedded: torch.Tensor = self._anatomy.embedding(token_ids) * self._anatomy.embedding_scale
        return embedded

    @torch.inference_mode()
    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """LM head on the given rows: ``[M, V]`` float32."""
        logits_MV: torch.Tensor = self._lm_head(hidden_MH).float()
        cap = self._config.final_softcap
        return logits_MV if cap is None else cap * torch.tanh(logits_MV / cap)

    @torch.inference_mode()
    def forward(
        self,
        token_ids_N: torch.Tensor,
        segments: Sequence[Segment],
        cache: TargetCache,
        tap_layers: Sequence[int] = (),
        logit_rows: Sequence[int] = (),
    ) -> TargetOutput:
        """One pass over the tokens of all segments (see :meth:`dspark.models.target.Target.forward`)."""
        segments = list(segments)
        c = self._config
        check_pass(token_ids_N, segments, tap_layers, logit_rows, c.num_layers)
        if not isinstance(cache, SlotCache):
            raise TypeError(f"the cache is a {type(cache).__name__} of another target; take one from new_cache")
        if not 0 <= int(token_ids_N.min()) <= int(token_ids_N.max()) < c.vocab_size:
            raise IndexError(f"token_ids_N has an id outside the vocabulary 0..{c.vocab_size - 1}")
        cache.reserve(segments)
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for index, segment in enumerate(segments):
            groups[segment.start].append(index)
        tokens = token_ids_N.split([segment.length for segment in segments])
        hidden: list[torch.Tensor] = [token_ids_N] * len(segments)
        taps: list[torch.Tensor] = [token_ids_N] * len(segments)
        for start, indices in groups.items():
            slots = [segments[index].slot for index in indices]
            ids_RQ = pad_sequence([tokens[index] for index in indices], batch_first=True)
            hidden_RQH, taps_RQT = self._run(ids_RQ, slots, start, cache, tap_layers)
            for row, index in enumerate(indices):
                hidden[index] = hidden_RQH[row, : segments[index].length]
                if taps_RQT is not None:
                    taps[index] = taps_RQT[row, : segments[index].length]
        hidden_NH = torch.cat(hidden)
        return TargetOutput(
            hidden_NH=hidden_NH,
            taps_NT=torch.cat(taps) if tap_layers else None,
            logits_MV=self.logits(hidden_NH[list(logit_rows)]) if len(logit_rows) else None,
        )

    def _run(
        self, ids_RQ: torch.Tensor, slots: Sequence[int], start: int, cache: SlotCache, tap_layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One padded batch; padding stands behind the tokens, where no token sees it, and is overwritten later."""
        memory = {self._cache_argument: cache.rows(slots, start)}
        with layer_outputs(self._anatomy.layers, tap_layers) as outputs:
            states = self._decoder(input_ids=ids_RQ, use_cache=True, **memory)
        hidden_RQH = (states.last_hidden_state * self._anatomy.hidden_scale).to(self._dtype)
        taps_RQT = torch.cat([outputs[layer] for layer in tap_layers], dim=-1) if tap_layers else None
        return hidden_RQH, taps_RQT

    def _check_pieces(self, token_ids: list[int], name: str) -> None:
        """A pass in two pieces with a rollback between them must equal a whole one, or the cache does not hold all."""
        length = len(token_ids)
        half = length // 2
        ids_N = torch.tensor(token_ids, device=self._device)
        whole_NH = self.forward(ids_N, [Segment(0, 0, length)], self.new_cache(1, length)).hidden_NH
        cache = self.new_cache(1, length)
        first_NH = self.forward(ids_N[:half], [Segment(0, 0, half)], cache).hidden_NH
        self.forward(ids_N.flip(0)[: length - half], [Segment(0, half, length - half)], cache)
        cache.truncate(0, half)
        second_NH = self.forward(ids_N[half:], [Segment(0, half, length - half)], cache).hidden_NH
        difference_N = (torch.cat([first_NH, second_NH]) - whole_NH).float().norm(dim=-1)
        # The median: in low precision a token at the border between two experts may go to the other one.
        error = float((difference_N / whole_NH.float().norm(dim=-1)).median())
        if not error <= TOLERANCES[self._dtype]:
            raise ValueError(
                f"{name} cannot be a target: a text in two passes, with tokens rolled back between them, gives other "
                f"states than in one (relative error {error:.2g}). Its attention is not causal, or it keeps a state "
                "outside its key/value cache"
            )


@contextmanager
def _as_refusal(name: str) -> Iterator[None]:
    """Models older than the common interface fail in their own ways at what it asks of them."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} cannot be a target: it does not work as models of transformers with a key/value cache do ({error})"
        ) from error


def transformers_fingerprint(model: PreTrainedModel) -> str:
    """Hash over the text model and its LM head that differs between checkpoints."""
    fingerprint = Fingerprint()
    for part in (text_model(model), model.get_output_embeddings()):
        for name, tensor in sorted(part.state_dict().items()):
            fingerprint.update(name, tensor)
    return fingerprint.hexdigest()


def _read_config(raw: Any, final_softcap: float | None) -> TransformersConfig:
    layers = getattr(raw, "per_layer_config", None)
    layer = layers[0] if layers else raw
    num_heads = layer.num_attention_heads
    num_kv_heads = getattr(layer, "num_key_value_heads", None) or num_heads
    intermediate_size = getattr(layer, "intermediate_size", None)
    norm_eps = next((eps for name in _NORM_EPS_NAMES if (eps := getattr(raw, name, None)) is not None), 1e-6)
    return TransformersConfig(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=intermediate_size if isinstance(intermediate_size, int) else 4 * raw.hidden_size,
        num_layers=raw.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=getattr(layer, "head_dim", None) or raw.hidden_size // num_heads,
        norm_eps=norm_eps,
        rope_theta=_rope_theta(raw),
        max_position_embeddings=_context(raw),
        final_softcap=final_softcap,
    )


def _rope_parameters(raw: Any) -> list[dict[str, Any]]:
    """Rotation of every kind of layer, full attention first; empty for models that know positions another way."""
    parameters = getattr(raw, "rope_parameters", None) or {}
    if "rope_theta" in parameters or "rope_type" in parameters:
        return [parameters]
    kinds = sorted(parameters, key=lambda kind: kind != "full_attention")
    return [parameters[kind] for kind in kinds if parameters[kind]]


def _rope_theta(raw: Any) -> float:
    for parameters in _rope_parameters(raw):
        if "rope_theta" in parameters:
            return float(parameters["rope_theta"])
    return 10000.0


def _context(raw: Any) -> int:
    """Tokens that fit: for rotations that change with the length of the text, those before the change.

    Keys in the cache were rotated before it, and rolling back would not bring the old ones back.
    """
    context = getattr(raw, "max_position_embeddings", None) or getattr(raw, "seq_length", None)
    if not isinstance(context, int):
        raise ValueError(
            f"config.json of model_type {raw.model_type!r} has no max_position_embeddings; add how many tokens the "
            "model is good for"
        )
    for parameters in _rope_parameters(raw):
        if parameters.get("rope_type") == "longrope":
            context = min(context, int(parameters.get("original_max_position_embeddings") or context))
    return context
