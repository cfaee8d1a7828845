"""A tiny random target, data that it wrote, and a recipe for them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.loading import LoadedTarget
from dspark.training.data.rows import DataRow
from dspark.training.recipe import Recipe
from dspark.types import Segment

VOCAB, HIDDEN, LAYERS, END = 61, 32, 4, 1


def tiny_target(*, sharpness: float = 1.0, seed: int = 0, dtype: str = "float32") -> LoadedTarget:
    """A random Llama of four layers; ``sharpness`` scales its logits."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 6.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN, 3.0 * sharpness),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", 32, HIDDEN),
            ("self_attn.k_proj", 16, HIDDEN),
            ("self_attn.v_proj", 16, HIDDEN),
            ("self_attn.o_proj", HIDDEN, 32),
            ("mlp.gate_proj", 48, HIDDEN),
            ("mlp.up_proj", 48, HIDDEN),
            ("mlp.down_proj", HIDDEN, 48),
        ):
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns, 1.5)
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    config = DecoderConfig.from_huggingface(
        {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    )
    tokenizer: Any = SimpleNamespace(
        convert_tokens_to_ids=lambda text: 60 if text == "<mask>" else 0,
        convert_ids_to_tokens=lambda token: {60: "<mask>", 0: "<unk>"}[token],
    )
    return LoadedTarget(
        model=Decoder(config, weights, compute_dtype=dtype),
        tokenizer=tokenizer,
        name="tiny",
        stop_token_ids=frozenset({END}),
    )


def greedy_rows(
    target: LoadedTarget, *, rows: int, copies: int = 1, response: int = 24, seed: int = 0
) -> list[DataRow]:
    """Rows of two answers each, written greedily by the target; ``copies`` of each under different ids."""
    generator = torch.Generator().manual_seed(seed)
    model = target.model
    written = []
    for _ in range(rows):
        token_ids: list[int] = []
        spans = []
        cache = model.new_cache(1, 128)
        for answer in (response, response // 2):
            prompt = torch.randint(2, 60, (4,), generator=generator).tolist()
            start = len(token_ids) + len(prompt)
            pending = prompt
            for _ in range(answer):
                segment = Segment(slot=0, start=len(token_ids), length=len(pending))
                output = model.forward(torch.tensor(pending), [segment], cache)
                token_ids += pending
                pending = [int(model.logits(output.hidden_NH[-1:])[0].argmax())]
            segment = Segment(slot=0, start=len(token_ids), length=1)
            model.forward(torch.tensor(pending), [segment], cache)
            token_ids += pending
            spans.append((start, len(token_ids)))
        written.append((tuple(token_ids), tuple(spans)))
    return [
        DataRow(
            id=f"toy/{copy}-{index:03d}",
            source="toy",
            token_ids=token_ids,
            response_spans=spans,
            finish_reasons=("length",) * len(spans),
            temperature=0.0,
        )
        for copy in range(copies)
        for index, (token_ids, spans) in enumerate(written)
    ]


def write_rows(directory: Path, rows: list[DataRow]) -> Path:
    """A data directory of one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rows-00000.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    return directory


def tiny_recipe(data: Path, out: Path, **sections: dict[str, Any]) -> Recipe:
    """A recipe of seconds; ``sections`` update its sections."""
    values: dict[str, Any] = {
        "target": "tiny",
        "data": data,
        "out": out,
        "drafter": {
            "num_layers": 1,
            "block_size": 3,
            "tap_layers": [0, 2],
            "mask_token": "<mask>",
            "draft_vocab_size": 40,
            "markov_rank": 8,
        },
        "states": {"dtype": "float32", "max_length": 100, "tokens_per_batch": 200},
        "bigram": {"steps": 20, "draws_per_step": 64},
        "batch": {"steps": 12, "blocks_per_step": 24, "anchor_every_tokens": 3, "warmup_steps": 2, "autocast": False},
        "held_out": {"fraction": 0.25, "blocks": 40, "every_steps": 6},
        "checkpoint": {"every_steps": 4, "keep": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)
