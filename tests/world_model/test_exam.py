"""What the exam promises: known answers, folds that never judge their own data, a veto for a model that believes everything."""

import math
from dataclasses import replace

import pytest
import torch

from tests.world_model.conftest import HORIZON, STARTS, record_rollouts
from wmrl.correction.advantages import advantages
from wmrl.types import Rollouts, Start
from world_model.exam import (
    Exam,
    ExamConfig,
    Fold,
    best_of_group,
    by_columns,
    cross_fit,
    examine,
    hazard_auroc,
    merge,
    sign_agreement,
)


def grouped() -> Rollouts:
    """Eight groups of eight members."""
    starts = [start for start in STARTS[:8] for _ in range(8)]
    return record_rollouts(starts, seed=4)


def twin_of(real: Rollouts, returns: torch.Tensor) -> Rollouts:
    rewards = torch.zeros_like(real.rewards)
    rewards[:, -1] = returns
    return replace(real, rewards=rewards, mask=torch.ones_like(real.mask), imagined=True)


def hazards_of(real: Rollouts, success: torch.Tensor) -> torch.Tensor:
    """Two agreeing members that put all probability on the last taken decision."""
    last = real.mask.sum(1).long() - 1
    hazards = torch.zeros(2, *real.rewards.shape)
    hazards[:, torch.arange(len(real)), last] = success
    return hazards


def exam_of(success: torch.Tensor, real: Rollouts, change: torch.Tensor | None = None) -> Exam:
    return examine(real, hazards_of(real, success), twin_of(real, success), 0.0, ExamConfig(), change=change)


def test_a_perfect_model_is_green_with_known_numbers() -> None:
    real = grouped()
    exam = exam_of(real.returns(), real)
    assert exam.verdict == "GREEN"
    assert (exam.auroc, exam.brier, exam.false_success, exam.gap, exam.sign_agreement) == (1.0, 0.0, 0.0, 0.0, 1.0)
    assert exam.within_start_twin == pytest.approx(1.0)
    group, outcome = real.group_index(), real.returns()
    expected = torch.stack([outcome[group == i].max() - outcome[group == i].mean() for i in range(8)]).mean().item()
    assert exam.best_of_group_gain == pytest.approx(expected)
    assert exam.rollouts == 64 and exam.groups == 8 and len(exam.auroc_by_decision) == HORIZON


def test_replay_is_judged_among_the_rollouts_that_still_run() -> None:
    hazard = torch.tensor([[0.9, 0.0], [0.2, 0.1], [0.1, 0.6], [0.3, 0.2]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    at_risk = torch.tensor([[True, False], [True, True], [True, True], [True, True]])
    assert hazard_auroc(hazard, rewards, at_risk) == ((1.0, 1.0), 1.0)
    assert hazard_auroc(1 - hazard, rewards, at_risk) == ((0.0, 0.0), 0.0)


def test_a_model_that_believes_in_everything_is_vetoed() -> None:
    real = grouped()
    exam = exam_of(torch.full((64,), 0.95), real)
    assert exam.verdict == "RED" and exam.false_success == 1.0
    assert exam.gap == pytest.approx(0.95 - real.returns().mean().item(), abs=1e-5)


def test_a_reversed_model_is_vetoed() -> None:
    real = grouped()
    exam = exam_of(0.4 - 0.3 * real.returns(), real)
    assert exam.verdict == "RED" and exam.within_start_twin == pytest.approx(-1.0)
    assert exam.sign_agreement == 0.0


def test_from_keyframes_proposed_updates_are_judged_instead_of_twins() -> None:
    """A model that believes in everything would be vetoed for its twins."""
    real, believes = grouped(), torch.full((64,), 0.95)
    right = exam_of(believes, real, advantages(real))
    assert right.update_agreement == pytest.approx(1.0) and right.update_decisions == real.num_decisions()
    assert right.verdict == "AMBER" and right.reasons == ("gap not shown to be within 0.1",)
    assert exam_of(real.returns(), real, advantages(real)).verdict == "GREEN"
    wrong = exam_of(real.returns(), real, -advantages(real))
    assert wrong.update_agreement == pytest.approx(-1.0) and wrong.verdict == "RED"
    assert "real decisions speak against the proposed updates" in wrong.reasons[0]
    assert "judged by" in wrong.lines()[-1] and len(wrong.lines()) == len(exam_of(believes, real).lines()) + 1


def test_updates_that_have_nothing_to_do_with_the_outcome_show_nothing() -> None:
    real = grouped()
    exam = exam_of(real.returns(), real, torch.randn(real.mask.shape, generator=torch.Generator().manual_seed(0)))
    assert exam.update_interval[0] < 0.0 < exam.update_interval[1]
    assert exam.verdict == "AMBER" and "not shown to be right" in exam.reasons[0]


@pytest.mark.parametrize("keyframes", [False, True])
def test_the_exam_of_the_folds_is_that_of_all_rollouts(keyframes: bool) -> None:
    real = grouped()
    success, change = 0.5 * real.returns() + 0.2, advantages(real) if keyframes else None
    parts = [slice(0, 24), slice(24, 64)]
    folds = [
        Fold(
            real[part],
            hazards_of(real, success)[:, part],
            twin_of(real, success)[part],
            one_chunk_error,
            None if change is None else change[part],
        )
        for part, one_chunk_error in zip(parts, (0.8, 0.4), strict=True)
    ]
    exam, whole = merge(folds, ExamConfig())
    assert repr(replace(exam, one_chunk_error=0.0)) == repr(exam_of(success, real, change))  # NaN is not equal to itself
    assert exam.one_chunk_error == pytest.approx((24 * 0.8 + 40 * 0.4) / 64)
    assert whole.real.starts == real.starts and torch.equal(whole.twin.returns(), twin_of(real, success).returns())
    torch.testing.assert_close(whole.change, change)


def test_sign_agreement_and_best_of_group_on_paper() -> None:
    outcome, group = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert sign_agreement(outcome, torch.tensor([0.9, 0.1, 0.8, 0.3]), group) == 0.5
    assert sign_agreement(outcome, torch.zeros(4), group) == 0.5
    assert best_of_group(outcome, torch.tensor([0.9, 0.1, 0.8, 0.3]), group)[0] == pytest.approx(0.0)


def test_success_by_decision_counts_the_rollouts_that_still_run() -> None:
    values, at_risk = torch.tensor([[0.0, 1.0], [1.0, 9.0], [0.5, 0.0]]), torch.tensor([[1, 1], [1, 0], [0, 1]]) > 0
    assert by_columns(values, at_risk) == (0.5, 0.5)
    assert math.isnan(by_columns(values, torch.zeros(3, 2, dtype=torch.bool))[0])


def test_every_fold_learns_and_judges_every_instruction() -> None:
    real = grouped()
    told = ("lift the red cube", "lift the green cube")  # goals alternate, as in a manifest
    told_to = [told[number % 2] for number in real.group_index().tolist()]
    starts = tuple(replace(start, instruction=text) for start, text in zip(real.starts, told_to, strict=True))
    sides: list[Rollouts] = []
    cross_fit(replace(real, starts=starts), None, 2, lambda training, held_out: sides.extend((training, held_out)))
    assert len(sides) == 4 and all({start.instruction for start in side.starts} == set(told) for side in sides)


def test_folds_are_whole_groups_and_cover_everything_once() -> None:
    real = grouped()
    seen: list[Start] = []

    def examine_fold(training: Rollouts, held_out: Rollouts) -> None:
        assert not {s.group_key for s in training.starts} & {s.group_key for s in held_out.starts}
        seen.extend(held_out.starts)

    cross_fit(real, None, 2, examine_fold)
    assert sorted(s.seed for s in seen) == sorted(s.seed for s in real.starts)
    with pytest.raises(ValueError, match="at least 9 groups"):
        cross_fit(real, None, 9, examine_fold)
