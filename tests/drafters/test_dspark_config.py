"""Reading and writing config.json, and what is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.drafters import DSparkConfig, Eagle3Config, MtpConfig
from dspark.drafters.registry import read_config

GOLDEN = Path(__file__).parents[1] / "golden"
ConfigOf = Callable[..., DSparkConfig]


@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", [True, False])
def test_round_trip(kind: str, confidence: bool, config_of: ConfigOf) -> None:
    config = config_of(kind, confidence=confidence, reduced=True, sample_from_anchor=False, rope_theta=5e5)
    content = json.loads(json.dumps(config.to_dict("bfloat16")))
    assert DSparkConfig.from_dict(content) == config
    assert content["sample_from_anchor"] is False
    assert content["draft_vocab_size"] == 12
    assert ("markov_head_type" in content) is (kind != "none")
    assert ("confidence_head_with_markov" in content) is confidence


@pytest.mark.parametrize("name", ["dspark-vanilla", "dspark-gated", "dspark-rnn", "dflash-anchor-first"])
def test_published_keys_keep_their_values(name: str) -> None:
    published = json.loads((GOLDEN / name / "config.json").read_text())
    written = DSparkConfig.from_dict(published).to_dict()
    left_out = {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_window_layers",
        "transformers_version",
        "use_cache",
    }
    assert published.keys() - written.keys() == left_out
    assert {key: written[key] for key in published.keys() - left_out} == {
        key: value for key, value in published.items() if key not in left_out
    }
    assert written.keys() - published.keys() == {"draft_vocab_size", "sample_from_anchor"}


def nested(config: DSparkConfig, architecture: str, **extra: Any) -> dict[str, Any]:
    """The same config in form B."""
    content = config.to_dict()
    content["architectures"] = [architecture]
    inside = {}
    for key in ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"):
        if key in content:
            inside[key] = content.pop(key)
    for key in ("sample_from_anchor", "draft_vocab_size"):
        content.pop(key)
    content["dflash_config"] = {**inside, **extra}
    return content


def test_nested_form_defaults_to_the_layout_of_its_architecture(config_of: ConfigOf) -> None:
    config = config_of("gated")
    assert DSparkConfig.from_dict(nested(config, "DSparkDraftModel", projector_type="dspark")) == config
    original = DSparkConfig.from_dict(nested(config, "DFlashDraftModel"))
    assert (original.sample_from_anchor, original.block_size, original.num_block_inputs) == (False, 3, 4)
    stated = DSparkConfig.from_dict(nested(config, "DFlashDraftModel", sample_from_anchor=True))
    assert (stated.sample_from_anchor, stated.block_size, stated.num_block_inputs) == (True, 4, 4)


def test_nested_form_may_have_legacy_rope_and_tied_flag(config_of: ConfigOf) -> None:
    config = config_of(rope_theta=1e6)
    content = nested(config, "DSparkDraftModel")
    del content["rope_parameters"]
    content |= {"rope_theta": 1000000, "rope_scaling": None, "tie_word_embeddings": True, "sliding_window": 4096}
    assert DSparkConfig.from_dict(content) == config


def test_nested_form_must_not_contradict_itself(config_of: ConfigOf) -> None:
    content = nested(config_of(), "DSparkDraftModel")
    with pytest.raises(ValueError, match="mask_token_id is 3 at the top and 50 under dflash_config"):
        DSparkConfig.from_dict({**content, "mask_token_id": 3})
    del content["dflash_config"]
    with pytest.raises(ValueError, match="dflash_config is missing"):
        DSparkConfig.from_dict(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures 'Gemma4DSparkModel' is not a DSpark drafter"),
        ({"architectures": None}, "architectures must name one architecture"),
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"sliding_window": 128, "use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"sliding_window": 128, "use_sliding_window": None}, "sliding_window 128 is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types contains 'sliding_attention'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
        ({"target_hidden_size": 99}, "target_hidden_size 99 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters.rope_type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1.0, "factor": 2.0}}, "rope_parameters.factor is not supported"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {}}, "rope_parameters.rope_theta is missing"),
        ({"rope_parameters": None}, "rope_parameters is missing"),
        ({"rope_parameters": 3}, "rope_parameters must be an object"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling .* is not supported"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping \(30.0\) is not a known setting"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta must be a positive number, got 0.0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, got nan"),
        ({"layer_types": 5}, "layer_types must be a list, got 5"),
        ({"sample_from_anchor": "false"}, "sample_from_anchor must be true or false, got 'false'"),
        ({"enable_confidence_head": 0}, "enable_confidence_head must be true or false, got 0"),
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": "7"}, "block_size must be an integer, got '7'"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"num_target_layers": None}, "num_target_layers is missing"),
        ({"target_layer_ids": 3}, "target_layer_ids must be a list of integers"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [1, 1]}, "names a layer twice"),
        ({"target_layer_ids": [1, 4]}, "target_layer_ids contains 4, the target's final layer"),
        ({"target_layer_ids": [1, 9]}, "target_layer_ids contains 9, but the target has layers 0 to 4"),
        ({"mask_token_id": 53}, "mask_token_id 53 is outside the vocabulary of 53 tokens"),
        ({"draft_vocab_size": 54}, r"draft_vocab_size \(54\) must not exceed vocab_size \(53\)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"markov_rank": -1}, "markov_rank must not be negative"),
        ({"markov_head_type": None}, "markov_head_type is missing although markov_rank is 6"),
        ({"markov_head_type": "attn"}, "markov_head_type 'attn' is not known; it must be one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov needs markov_rank > 0"),
    ],
)
def test_refused_by_name(change: dict[str, Any], message: str, config_of: ConfigOf) -> None:
    content = config_of("vanilla").to_dict() | change
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_dict(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"markov_rank": 0}, "markov_head_type 'vanilla' needs markov_rank > 0"),
        ({"enable_confidence_head": False}, "confidence_head_with_markov needs enable_confidence_head"),
    ],
)
def test_contradictions_in_a_config_made_in_code(change: dict[str, Any], message: str, config_of: ConfigOf) -> None:
    with pytest.raises(ValueError, match=message):
        config_of("vanilla", **change)


@pytest.mark.parametrize("variant", ["vanilla", "eagle3", "mtp"])
def test_null_is_the_default_as_where_a_number_is_missing(variant: str, config_of: Callable[..., Any]) -> None:
    config = config_of(variant)
    names = ["initializer_range", "rms_norm_eps", *(["step_loss_decay"] if variant == "eagle3" else [])]
    content = config.to_dict() | dict.fromkeys(names)
    left_out = {name: value for name, value in content.items() if name not in names}
    assert type(config).from_dict(content) == type(config).from_dict(left_out)


def test_settings_that_are_off_or_private_are_accepted(config_of: ConfigOf) -> None:
    config = config_of()
    content = config.to_dict() | {"final_logit_softcapping": None, "some_feature": False, "_commit_hash": "abc"}
    assert DSparkConfig.from_dict(content) == config


def test_errors_name_the_file(tmp_path: Path, config_of: ConfigOf) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config.json: no such file"):
        read_config(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        read_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        read_config(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"config.json: must hold one JSON object"):
        read_config(path)
    path.write_text(json.dumps(config_of().to_dict() | {"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(
        ValueError, match=r"config.json: architectures 'LlamaForCausalLMEagle3' is not supported; it mu"
    ):
        read_config(path)
    path.write_text(json.dumps(config_of().to_dict() | {"mask_token_id": -1}))
    with pytest.raises(ValueError, match=r"config.json: mask_token_id -1 is outside"):
        read_config(path)


@pytest.mark.parametrize("variant", ["vanilla", "eagle3", "mtp"])
def test_every_kind_is_read_as_what_was_written(variant: str, tmp_path: Path, config_of: Callable[..., Any]) -> None:
    config = config_of(variant, reduced=True, rope_theta=5e5, rms_norm_eps=1e-5)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict("bfloat16")))
    assert read_config(path) == config
    assert type(read_config(path)) is type(config)


def test_published_eagle3_keys_keep_their_values() -> None:
    published = json.loads((GOLDEN / "eagle3" / "config.json").read_text())
    config = Eagle3Config.from_dict(published)
    assert (config.block_size, config.step_loss_decay, config.target_layer_ids) == (5, 0.8, (0, 1, 2, 3, 4))
    written = config.to_dict()
    left_out = {
        "bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "transformers_version", "use_cache",
        "target_model_name_or_path",
    }  # fmt: skip
    assert published.keys() - written.keys() == left_out
    assert all(written[key] == published[key] for key in published.keys() - left_out)
    assert written.keys() - published.keys() == {"draft_vocab_size"}


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("eagle3", {"architectures": ["Qwen3DSparkModel"]}, "'Qwen3DSparkModel' is not an Eagle3 drafter"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; it must be 1"),
        ("eagle3", {"draft_num_hidden_layers": 2}, "draft_num_hidden_layers 2 is not supported; it must be 1"),
        ("eagle3", {"block_size": 5}, r"block_size \(5\) is not a known setting"),
        ("eagle3", {"norm_before_residual": True}, r"norm_before_residual \(True\) is not a known setting"),
        ("eagle3", {"ttt_length": None}, "ttt_length is missing"),
        ("eagle3", {"ttt_length": 0}, "ttt_length must be at least 1, got 0"),
        ("eagle3", {"step_loss_decay": 0}, "step_loss_decay must be above 0 and at most 1"),
        ("eagle3", {"step_loss_decay": "half"}, "step_loss_decay must be a number, got 'half'"),
        ("eagle3", {"target_layer_ids": [1, 4]}, "target_layer_ids contains 4, the target's final layer"),
        ("eagle3", {"draft_vocab_size": 54}, r"draft_vocab_size \(54\) must not exceed vocab_size \(53\)"),
        ("eagle3", {"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
        ("mtp", {"architectures": ["Qwen3Eagle3Model"]}, "'Qwen3Eagle3Model' is not an MTP drafter"),
        ("mtp", {"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; it must be 1"),
        ("mtp", {"block_size": 2}, "block_size 2 is not supported; it must be 1"),
        ("mtp", {"mask_token_id": 5}, r"mask_token_id \(5\) is not a known setting"),
        ("mtp", {"target_layer_ids": [2]}, r"MTP continues from the output of the target's final layer alone.*\[4\]"),
        ("mtp", {"target_layer_ids": [3, 4]}, r"it must be \[4\]"),
        ("mtp", {"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
    ],
)
def test_other_kinds_refuse_by_name(
    variant: str, change: dict[str, Any], message: str, config_of: Callable[..., Any]
) -> None:
    config = config_of(variant)
    with pytest.raises(ValueError, match=message):
        type(config).from_dict(config.to_dict() | change)


def test_mtp_has_one_layer_and_drafts_one_token(config_of: Callable[..., Any]) -> None:
    config = config_of("mtp")
    assert isinstance(config, MtpConfig)
    assert (config.block_size, config.num_hidden_layers) == (1, 1)
