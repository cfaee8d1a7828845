from __future__ import annotations

import pytest

from dspark.models.loading import LoadedTarget
from dspark.training.anchors import anchor_positions
from dspark.training.states import StoredRow, store_spec
from tests.training.tiny import tiny_target


def test_settings_that_the_target_cannot_have_are_refused(target: LoadedTarget) -> None:
    with pytest.raises(ValueError, match=r"tap_layers has 3: .*0\.\.3, and the final one is not allowed"):
        store_spec(target.model, tap_layers=(0, 3), max_length=100, target_dtype="float32")
    with pytest.raises(ValueError, match=r"tap_layers has 1 more than once"):
        store_spec(target.model, tap_layers=(1, 2, 1), max_length=100, target_dtype="float32")
    with pytest.raises(ValueError, match="max_length is 1000"):
        store_spec(target.model, tap_layers=(0,), max_length=1000, target_dtype="float32")


def test_the_final_layer_is_for_those_who_ask_for_it(target: LoadedTarget) -> None:
    spec = store_spec(target.model, tap_layers=(0, 3), max_length=100, target_dtype="float32", allow_final=True)
    assert spec.tap_layers == (0, 3)
    with pytest.raises(ValueError, match=r"tap_layers has 4: the target has layers 0\.\.3$"):
        store_spec(target.model, tap_layers=(4,), max_length=100, target_dtype="float32", allow_final=True)


def test_another_checkpoint_of_the_same_shape_is_noticed() -> None:
    """A fine-tuned target keeps its sizes and often its embedding; its states are other states."""
    first, again, other = (
        store_spec(tiny_target(sharpness=sharpness).model, tap_layers=(0,), max_length=100, target_dtype="float32")
        for sharpness in (1.0, 1.0, 1.1)
    )
    assert first == again
    assert first != other


def test_predictions_of_a_part_of_a_row() -> None:
    row = StoredRow(id="a", length=20, response_spans=((3, 7), (9, 10), (12, 20)), digest="")
    positions = anchor_positions(row.response_spans)
    assert row.predictions == len(positions)
    for end in range(21):
        assert row.predictions_before(end) == (positions < end).sum()
