"""Sequential temperature scaling finds what is known, in the order that matters."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.calibration.judged_rounds import JudgedRounds, sigmoid
from dspark.calibration.metrics import expected_calibration_error
from dspark.calibration.temperature_scaling import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, fit_temperatures
from tests.calibration.synthetic import miscalibrated, rounds_of


def ece(rounds: JudgedRounds, position: int, temperatures: tuple[float, ...]) -> float:
    labelled = rounds.survival(position, temperatures)
    return expected_calibration_error(labelled.confidences_M, labelled.outcomes_M)


@pytest.mark.parametrize("true", [(2.0, 1.0, 0.5), (0.4, 3.0, 1.5), (1.0, 1.0, 1.0)])
def test_known_temperatures_are_recovered(true: tuple[float, ...]) -> None:
    rounds, fresh = miscalibrated(true, seed=1), miscalibrated(true, seed=2)
    fitted = fit_temperatures(rounds)
    np.testing.assert_allclose(fitted, true, rtol=0.2)
    assert all(ece(fresh, position, fitted) < 0.015 for position in (1, 2, 3))
    assert fit_temperatures(rounds) == fitted


def test_no_temperature_of_a_grid_is_much_better() -> None:
    rounds = miscalibrated((2.0, 0.6), count=4000)
    first, second = fit_temperatures(rounds)
    slack = 0.2 / np.sqrt(len(rounds))
    grid = np.geomspace(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE, 300)
    assert ece(rounds, 1, (first, 1.0)) <= min(ece(rounds, 1, (one, 1.0)) for one in grid) + slack
    assert ece(rounds, 2, (first, second)) <= min(ece(rounds, 2, (first, one)) for one in grid) + slack


def test_a_position_makes_up_for_what_the_ones_before_could_not() -> None:
    # Token 1 is claimed at more than 50 % whatever its temperature, and accepted at 35 %: only T_2 can lower a_2.
    count = 20_000
    logits_NG = np.stack([np.full(count, 0.5), np.random.default_rng(0).normal(2.0, 1.0, count)], axis=1)
    probabilities_NG = np.stack([np.full(count, 0.35), sigmoid(logits_NG[:, 1])], axis=1)
    rounds = rounds_of(logits_NG, probabilities_NG)
    sequential = fit_temperatures(rounds)

    reached = rounds.select(rounds.accepted_N >= 1)
    alone = JudgedRounds(
        logits_NG=reached.logits_NG[:, 1:],
        accepted_N=reached.accepted_N - 1,
        judged_N=reached.judged_N - 1,
        verified_N=reached.verified_N - 1,
        prompts_N=reached.prompts_N,
    )
    independent = (sequential[0], *fit_temperatures(alone))
    assert independent[1] == pytest.approx(1.0, rel=0.1)
    assert sequential[0] > 9.0
    assert ece(rounds, 2, independent) > 0.1
    assert ece(rounds, 2, sequential) < 0.5 * ece(rounds, 2, independent)


@pytest.mark.parametrize("probability", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 3, 500])
def test_one_sided_labels_give_usable_temperatures(probability: float, count: int) -> None:
    logits_NG = np.random.default_rng(0).normal(0.0, 2.0, (count, 3))
    fitted = fit_temperatures(rounds_of(logits_NG, np.full((count, 3), probability)))
    assert all(LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE for value in fitted)


def test_logits_that_say_nothing_leave_the_temperature_alone() -> None:
    rounds = rounds_of(np.zeros((200, 2)), np.full((200, 2), 0.5))
    assert fit_temperatures(rounds) == (1.0, 1.0)


def test_a_position_without_a_round_is_named() -> None:
    rounds = miscalibrated((1.0, 1.0), count=10)
    short = JudgedRounds(
        logits_NG=np.where([[True, False]], rounds.logits_NG, np.nan),
        accepted_N=np.minimum(rounds.accepted_N, 1),
        judged_N=np.full(10, 1),
        verified_N=np.full(10, 1),
        prompts_N=rounds.prompts_N,
    )
    with pytest.raises(ValueError, match="no round tells the fate of draft position 2 of 2"):
        fit_temperatures(short)


def test_rounds_serve_the_positions_whose_fate_they_know() -> None:
    """Behind an answer's end, and where a draft was short, there is no label."""
    whole = miscalibrated((2.0, 0.5), count=3000, seed=3)
    accepted = whole.select(whole.accepted_N == 2)
    extra = len(accepted)
    ended = JudgedRounds(
        logits_NG=accepted.logits_NG,
        accepted_N=np.full(extra, 1),
        judged_N=np.full(extra, 1),
        verified_N=np.full(extra, 2),
        prompts_N=accepted.prompts_N,
    )
    assert len(ended.survival(1).outcomes_M) == extra
    assert ended.survival(1).outcomes_M.all()
    assert len(ended.survival(2).outcomes_M) == 0
    assert len(ended.conditional(2).outcomes_M) == 0
