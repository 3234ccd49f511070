"""What the critic promises: it never judges what it learned from, finds where success is decided, and resumes exactly."""

from dataclasses import replace

import pytest
import torch

from wmrl.correction.advantages import real_advantages
from wmrl.critic import CriticConfig, CrossFittedCritic
from wmrl.types import Rollouts, Start, Status

CONFIG = CriticConfig(inputs=("features",), steps=150)


def lottery(groups: int = 16, members: int = 8, *, seed: int = 0) -> Rollouts:
    """Three decisions; the first feature shows from the second decision on whether the rollout will succeed."""
    generator = torch.Generator().manual_seed(seed)
    rows = groups * members
    success = (torch.rand(rows, generator=generator) < 0.5).float()
    features = torch.randn(rows, 3, 2, generator=generator) * 0.1
    features[:, 1:, 0] += (2 * success - 1)[:, None]
    rewards = torch.zeros(rows, 3)
    rewards[:, 2] = success
    ones = torch.ones(rows, 3, 1)
    return Rollouts(
        starts=tuple(Start("lottery", seed * 1000 + g) for g in range(groups) for _ in range(members)),
        member=torch.arange(members).repeat(groups),
        actions=ones,
        inputs={"features": features},
        final={"features": features[:, -1]},
        log_probs=ones * 0,
        token_mask=ones.bool(),
        rewards=rewards,
        mask=torch.ones(rows, 3),
        status=torch.where(success > 0, int(Status.SUCCESS), int(Status.TIME_LIMIT)),
        seconds=torch.zeros(rows),
    )


def test_credit_goes_to_the_decision_that_made_the_difference() -> None:
    real = CrossFittedCritic(CONFIG, num_decisions=3).judge(lottery(), seed=0)
    assert real.values is not None and real.values.shape == (128, 4)
    outcome = real.returns()
    assert (real.values[:, 1] - outcome).abs().mean() < 0.15
    assert (real.values[:, 0] - 0.5).abs().mean() < 0.2
    assert real.values[:, 3].abs().max() == 0
    advantage = real_advantages(real, decay=0.0)
    signed = advantage * (2 * outcome - 1)[:, None]
    assert signed[:, 0].mean() > 0.3
    assert signed[:, 1:].mean(0).abs().max() < 0.15


def test_a_rollout_is_judged_by_networks_that_never_saw_its_outcome() -> None:
    real = lottery(groups=2)
    changed = real.rewards.clone()
    changed[0, 2] = 1 - changed[0, 2]
    first = CrossFittedCritic(CONFIG, num_decisions=3).judge(real, seed=0)
    second = CrossFittedCritic(CONFIG, num_decisions=3).judge(replace(real, rewards=changed), seed=0)
    assert first.values is not None and second.values is not None
    same_fold = real.member % CONFIG.folds == 0
    assert torch.equal(first.values[same_fold], second.values[same_fold])
    assert (first.values[~same_fold] - second.values[~same_fold]).abs().max() > 0.01


def test_without_values_advantages_are_leave_one_out_and_with_decay_one_outcome_minus_value() -> None:
    real = lottery(groups=1)
    group = real.returns()
    loo = group - (group.sum() - group) / 7
    assert torch.allclose(real_advantages(real, decay=0.9)[:, 0].float(), loo, atol=1e-6)
    judged = CrossFittedCritic(CONFIG, num_decisions=3).judge(real, seed=0)
    assert judged.values is not None
    expected = group[:, None] - judged.values[:, :3]
    assert torch.allclose(real_advantages(judged, decay=1.0).float(), expected, atol=1e-5)


def test_rollouts_without_what_the_critic_reads_are_an_error() -> None:
    critic = CrossFittedCritic(replace(CONFIG, inputs=("features", "goal")), num_decisions=3)
    with pytest.raises(ValueError, match="that record 'goal' for the critic.*collect them again"):
        critic.judge(lottery(), seed=0)


def test_a_resumed_critic_judges_like_the_uninterrupted_one() -> None:
    whole = CrossFittedCritic(CONFIG, num_decisions=3)
    whole.judge(lottery(seed=1), seed=0)
    second = CrossFittedCritic(CONFIG, num_decisions=3)
    second.load_state_dict(whole.state_dict())
    first_values = whole.judge(lottery(seed=2), seed=1).values
    second_values = second.judge(lottery(seed=2), seed=1).values
    assert first_values is not None and second_values is not None
    assert torch.equal(first_values, second_values)


def test_one_fold_is_refused() -> None:
    with pytest.raises(ValueError, match="folds >= 2"):
        CriticConfig(folds=1)
