"""The target decoder: Llama, Qwen2, Qwen3 and Gemma 3 over one forward pass on flattened tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from dspark.heap import trim_heap
from dspark.models.attention import AttentionPlan, attend
from dspark.models.attention_kernel import HEAD_MULTIPLE
from dspark.models.block_tables import BlockTables
from dspark.models.config import DecoderConfig
from dspark.models.decoder_kernel import DecoderKernel, embed_rows
from dspark.models.decoder_layer import DecoderLayer, LayersShape
from dspark.models.fingerprint import Fingerprint
from dspark.models.instructions import INT8_VARIABLE, has_dot_products
from dspark.models.int8_linear import GroupedInt8Linear
from dspark.models.kv_cache import KVCache
from dspark.models.linear import FloatLinear, Linear
from dspark.models.rope import RopeTable, rotate
from dspark.models.target import TargetCache, TargetOutput, check_pass
from dspark.types import Segment

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
COMPUTE_DTYPES = ("float32", "bfloat16", "int8")


def why_not_int8(config: DecoderConfig) -> str | None:
    """What this process or the target lacks for int8 on a CPU; None: nothing."""
    if not has_dot_products():
        return (
            "a processor with AVX2 or AVX512-VNNI instructions, and an environment that does not forbid them "
            f"({INT8_VARIABLE}, NUMBA_...)"
        )
    if config.head_dim % HEAD_MULTIPLE:
        return f"heads of a multiple of {HEAD_MULTIPLE} dimensions, and those of this target have {config.head_dim}"
    return None


class Decoder:
    """A frozen decoder-only target with flattened, ragged batches (implements :class:`~dspark.models.target.Target`).

    Args:
        config: shape and variant.
        weights: tensors by their Hugging Face names (``model.layers.0.self_attn.q_proj.weight`` and so on).
        compute_dtype: ``float32``, ``bfloat16``, or ``int8`` (int8 products, float32 between them; CPU only).
        device: where to keep and run it.

    Raises:
        ValueError: if a tensor is missing, left over, or has the wrong shape, or the compute type is unknown.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        compute_dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        if compute_dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype {compute_dtype!r} is not one of {COMPUTE_DTYPES}")
        self._config = config
        self._device = torch.device(device)
        self._quantised = compute_dtype == "int8"
        if self._quantised and self._device.type != "cpu":
            raise ValueError(f"dtype int8 runs on the CPU only, not on {device}; use bfloat16 there")
        if self._quantised and (reason := why_not_int8(config)) is not None:
            raise ValueError(f"dtype int8 needs {reason}; use bfloat16 here")
        self._dtype = torch.bfloat16 if compute_dtype == "bfloat16" else torch.float32
        self.compute_dtype = compute_dtype
        reader = _WeightReader(weights, self._dtype, self._device, copies_kept=self._quantised)
        c = config
        self._embedding_VH = reader.take("model.embed_tokens.weight", (c.vocab_size, c.hidden_size), kept=True)
        self._layers = [self._read_layer(reader, index) for index in range(c.num_layers)]
        self._final_norm_H = self._read_norm(reader, "model.norm.weight", c.hidden_size)
        if c.tie_word_embeddings:
            reader.drop("lm_head.weight")
            self._lm_head_VH = self._embedding_VH
        else:
            self._lm_head_VH = reader.take("lm_head.weight", (c.vocab_size, c.hidden_size), kept=True)
        self._lm_head = self._linear(self._lm_head_VH, None)
        reader.finish()
        self._fingerprint = reader.fingerprint()
        self._activation = _ACTIVATIONS[c.activation]
        self._rope = RopeTable(c.rope, self._dtype, self._device)
        self._sliding_rope = RopeTable(c.sliding_rope, self._dtype, self._device) if c.sliding_rope else self._rope
        self._kernel: DecoderKernel | None = None
        if self._quantised:
            shape = LayersShape(
                num_layers=c.num_layers,
                intermediate_size=c.intermediate_size,
                num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                norm_eps=c.norm_eps,
                query_scale=c.query_scale,
                activation=c.activation,
            )
            assert isinstance(self._lm_head, GroupedInt8Linear), "int8 products go with int8 layers"
            self._kernel = DecoderKernel(shape, self._layers, self._final_norm_H, self._lm_head)
            trim_heap()  # of what the float weights took

    @property
    def config(self) -> DecoderConfig:
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
        return self._embedding_VH

    @property
    def lm_head_weight_VH(self) -> torch.Tensor:
        return self._lm_head_VH

    @property
    def lm_head_bias_V(self) -> torch.Tensor | None:
        return None

    @property
    def shares_blocks(self) -> bool:
        return True

    @property
    def _memory_dtype(self) -> torch.dtype:
        return self._dtype if self._kernel is None else torch.float16

    def new_cache(self, num_slots: int, max_length: int, tables: BlockTables | None = None) -> KVCache:
        """Allocate key/value memory (see :meth:`dspark.models.target.Target.new_cache`).

        The compiled int8 pass keeps float16 there, with keys as columns.
        """
        return KVCache(
            num_layers=self._config.num_layers,
            num_slots=num_slots,
            num_kv_heads=self._config.num_kv_heads,
            max_length=max_length,
            head_dim=self._config.head_dim,
            dtype=self._memory_dtype,
            device=self._device,
            tables=tables,
            has_key_columns=self._kernel is not None,
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings ``[..., H]`` as the first layer reads them."""
        embedded = functional.embedding(token_ids, self._embedding_VH)
        if self._config.embedding_scale != 1.0:
            # Gemma rounds the factor to the weights' type before multiplying.
            embedded = embedded * torch.tensor(self._config.embedding_scale, dtype=self._dtype, device=self._device)
        return embedded

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """LM head on the given rows: ``[M, V]`` float32."""
        cap = self._config.final_softcap
        if cap is None and isinstance(self._lm_head, GroupedInt8Linear):
            return self._lm_head(hidden_MH)  # without gradients anyway, and not worth entering a mode for
        with torch.inference_mode():
            logits_MV = self._lm_head(hidden_MH).float()
            return logits_MV if cap is None else _capped(logits_MV, cap)

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
        if not isinstance(cache, KVCache):
            raise TypeError(f"the cache is a {type(cache).__name__} of another target; take one from new_cache")
        cache.check_layout(
            num_layers=c.num_layers,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            dtype=self._memory_dtype,
            has_key_columns=self._kernel is not None,
        )
        if self._kernel is None:
            with torch.inference_mode():
                x_NH = self.embed(token_ids_N)  # before the cache counts anything: an id may be unknown
        else:
            x_NH = self._copied_embeddings(token_ids_N)
        cache.reserve(segments)
        plan = AttentionPlan(segments, cache, window=c.sliding_window)
        if self._kernel is None:
            return self._forward(x_NH, plan, cache, tap_layers, logit_rows)
        places = plan.places
        ropes = self._rope.table(places.last_position), self._sliding_rope.table(places.last_position)
        output = self._kernel(x_NH, ropes, plan, cache, tap_layers, logit_rows)
        if output.logits_MV is not None and c.final_softcap is not None:
            return replace(output, logits_MV=_capped(output.logits_MV, c.final_softcap), best_M=None)
        return output

    def _copied_embeddings(self, token_ids_N: torch.Tensor) -> torch.Tensor:
        """`embed` of a compiled pass: without PyTorch's threads, which would go on spinning beside its own."""
        x_NH = torch.empty(token_ids_N.shape[0], self._config.hidden_size)
        if not embed_rows(token_ids_N, self._embedding_VH, x_NH):
            raise IndexError(f"token_ids_N has an id outside the vocabulary 0..{self._config.vocab_size - 1}")
        return x_NH if self._config.embedding_scale == 1.0 else x_NH.mul_(self._config.embedding_scale)

    @torch.inference_mode()
    def _forward(
        self,
        x_NH: torch.Tensor,
        plan: AttentionPlan,
        cache: KVCache,
        tap_layers: Sequence[int],
        logit_rows: Sequence[int],
    ) -> TargetOutput:
        """The pass in PyTorch's operations, on embedded tokens."""
        places = plan.places
        rope = self._rope.lookup(places.positions_N, places.last_position)
        sliding_rope = rope
        if self._sliding_rope is not self._rope:
            sliding_rope = self._sliding_rope.lookup(places.positions_N, places.last_position)

        taps: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._layers):
            layer_rope = sliding_rope if layer.is_sliding else rope
            attended_NH = self._attention(layer, index, x_NH, layer_rope, plan, cache)
            if layer.post_attention_norm_H is not None:
                attended_NH = self._norm(attended_NH, layer.post_attention_norm_H)
            x_NH = x_NH + attended_NH
            gate_NM, up_NM = layer.gate_up(self._norm(x_NH, layer.mlp_norm_H)).chunk(2, dim=-1)
            mlp_NH = layer.down(self._activation(gate_NM) * up_NM)
            if layer.post_mlp_norm_H is not None:
                mlp_NH = self._norm(mlp_NH, layer.post_mlp_norm_H)
            x_NH = x_NH + mlp_NH
            if index in tap_layers:
                taps[index] = x_NH
        hidden_NH = self._norm(x_NH, self._final_norm_H)
        return TargetOutput(
            hidden_NH=hidden_NH,
            taps_NT=torch.cat([taps[layer] for layer in tap_layers], dim=-1) if tap_layers else None,
            logits_MV=self.logits(hidden_NH[list(logit_rows)]) if len(logit_rows) else None,
        )

    def _attention(
        self,
        layer: DecoderLayer,
        index: int,
        x_NH: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        c = self._config
        qkv_NhD = layer.qkv(self._norm(x_NH, layer.attention_norm_H)).unflatten(-1, (-1, c.head_dim))
        qk_NhD, v_NhD = qkv_NhD.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.qk_norm_hD is not None:
            qk_NhD = functional.rms_norm(qk_NhD, (c.head_dim,), None, c.norm_eps) * layer.qk_norm_hD
        q_NhD, k_NhD = rotate(qk_NhD, *rope).split([c.num_heads, c.num_kv_heads], dim=1)
        attended_NhD = attend(
            q_NhD,
            k_NhD,
            v_NhD,
            cache.keys[index],
            cache.values[index],
            plan,
            scale=c.query_scale,
            sliding=layer.is_sliding,
        )
        return layer.output(attended_NhD.flatten(1))

    def _norm(self, x_NH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x_NH, (x_NH.shape[-1],), weight_H, self._config.norm_eps)

    def _linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
        return (GroupedInt8Linear if self._quantised else FloatLinear)(weight_OI, bias_O)

    def _read_norm(self, reader: _WeightReader, name: str, size: int) -> torch.Tensor:
        weight = reader.take(name, (size,), kept=True)
        return weight + 1.0 if self._config.norm_adds_one else weight

    def _read_layer(self, reader: _WeightReader, index: int) -> DecoderLayer:
        c = self._config
        prefix = f"model.layers.{index}"
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def projection(names: tuple[str, ...], outs: tuple[int, ...], size_in: int, bias: bool) -> Linear:
            full = [f"{prefix}.{name}" for name in names]
            weight = torch.cat([reader.take(f"{n}.weight", (o, size_in)) for n, o in zip(full, outs, strict=True)])
            if not bias:
                return self._linear(weight, None)
            return self._linear(
                weight, torch.cat([reader.take(f"{n}.bias", (o,)) for n, o in zip(full, outs, strict=True)])
            )

        def norm(name: str, size: int = c.hidden_size) -> torch.Tensor:
            return self._read_norm(reader, f"{prefix}.{name}.weight", size)

        qk_norm_hD = None
        if c.qk_norm:
            q_norm_D, k_norm_D = (norm(f"self_attn.{n}_norm", c.head_dim) for n in ("q", "k"))
            qk_norm_hD = torch.cat([q_norm_D.expand(c.num_heads, -1), k_norm_D.expand(c.num_kv_heads, -1)])
        attention = tuple(f"self_attn.{n}_proj" for n in "qkv")
        return DecoderLayer(
            attention_norm_H=norm("input_layernorm"),
            qkv=projection(attention, (q_size, kv_size, kv_size), c.hidden_size, c.qkv_bias),
            qk_norm_hD=qk_norm_hD,
            output=projection(("self_attn.o_proj",), (c.hidden_size,), q_size, c.output_bias),
            # Llama names the norm before the MLP "post attention"; Gemma has one in each place.
            post_attention_norm_H=norm("post_attention_layernorm") if c.sandwich_norms else None,
            mlp_norm_H=norm("pre_feedforward_layernorm" if c.sandwich_norms else "post_attention_layernorm"),
            gate_up=projection(("mlp.gate_proj", "mlp.up_proj"), (c.intermediate_size,) * 2, c.hidden_size, c.mlp_bias),
            down=projection(("mlp.down_proj",), (c.hidden_size,), c.intermediate_size, c.mlp_bias),
            post_mlp_norm_H=norm("post_feedforward_layernorm") if c.sandwich_norms else None,
            is_sliding=bool(c.sliding_layers) and c.sliding_layers[index],
        )


def _capped(logits_MV: torch.Tensor, cap: float) -> torch.Tensor:
    """Logits that stay within ``±cap``, smoothly."""
    return cap * torch.tanh(logits_MV / cap)


class _WeightReader:
    """Hands out checkpoint tensors once each, checked for shape, and names what is missing or left over.

    Args:
        copies_kept: of what will be kept hand out none that lies in the checkpoint's own memory. It would keep a mapped
            file in memory, of which little is needed once the other weights are quantised.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device, *, copies_kept: bool
    ) -> None:
        self._weights = weights
        self._left = set(weights)
        self._fingerprint = Fingerprint()
        self._dtype = dtype
        self._device = device
        self._copies_kept = copies_kept

    def take(self, name: str, shape: tuple[int, ...], *, kept: bool = False) -> torch.Tensor:
        if name not in self._weights:
            raise ValueError(f"the checkpoint has no tensor {name}")
        tensor = self._weights[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, the config asks for {shape}")
        self._left.discard(name)
        self._fingerprint.update(name, tensor)
        copy = kept and self._copies_kept
        return tensor.to(device=self._device, dtype=self._dtype, copy=copy).contiguous()

    def drop(self, name: str) -> None:
        self._left.discard(name)

    def fingerprint(self) -> str:
        return self._fingerprint.hexdigest()

    def finish(self) -> None:
        left = sorted(name for name in self._left if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(
                f"the checkpoint holds {len(left)} tensors that this model does not use, the first is {left[0]}"
            )
