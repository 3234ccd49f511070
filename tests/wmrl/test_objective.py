"""The policy update: clipping, the leash, minibatches, and that nothing happens without a signal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from wmrl.collect import collect, expand
from wmrl.correction import Weighted
from wmrl.objective import Objective, ObjectiveConfig, assert_on_policy, clipped_loss, k3_divergence
from wmrl.toy import BanditWorld, ChainWorld, SoftmaxPolicy
from wmrl.types import Rollouts

PLAIN = ObjectiveConfig(learning_rate=0.1, kl=0.0, epochs=1, minibatches=1)


def played(world: BanditWorld | ChainWorld, policy: SoftmaxPolicy, seed: int = 0) -> Rollouts:
    rows, members = expand(world.starts(0, 6), 4)
    return collect(world.environment(), policy, rows, members, seed=seed)


def test_the_first_gradient_is_the_score_times_the_coefficients_over_a_constant() -> None:
    world, policy = ChainWorld(), ChainWorld().policy()
    rollouts = played(world, policy)
    coefficients = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    Objective(replace(PLAIN, max_gradient_norm=1e9), policy).update([Weighted(rollouts, coefficients)], seed=0)
    got = policy.logits.grad
    assert got is not None
    fresh = world.policy()
    scores = fresh.log_prob(rollouts.inputs, rollouts.actions)[..., 0]
    (expected,) = torch.autograd.grad(-(scores * coefficients * rollouts.mask).sum() / 4, [fresh.logits])
    torch.testing.assert_close(got, expected.float(), atol=1e-6, rtol=1e-4)


def test_minibatches_add_up_to_the_whole_gradient() -> None:
    """With a step too small to move anything, the mean minibatch gradient is the gradient of the whole batch."""
    world = BanditWorld()
    rollouts = played(world, world.policy())
    coefficients = torch.randn(24, 1, generator=torch.Generator().manual_seed(0))
    norms = {}
    for parts in (1, 4):
        policy = world.policy()
        config = replace(PLAIN, minibatches=parts, learning_rate=1e-12, max_gradient_norm=1e9)
        objective = Objective(config, policy)
        total = torch.zeros_like(policy.logits)
        policy.logits.register_hook(total.add_)
        numbers = objective.update([Weighted(rollouts, coefficients)], seed=0)
        assert numbers["optimizer_updates"] == parts
        norms[parts] = total / numbers["optimizer_updates"]
    torch.testing.assert_close(norms[1], norms[4], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("ratio", "coefficient", "moves"),
    [(1.3, 1.0, False), (1.3, -1.0, True), (0.7, 1.0, True), (0.7, -1.0, False), (1.1, 1.0, True), (0.9, -1.0, True)],
)
def test_clipping_stops_only_moves_that_went_far_enough(ratio: float, coefficient: float, moves: bool) -> None:
    difference = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, clipped = clipped_loss(difference, torch.tensor([coefficient]), torch.ones(1, 1, dtype=torch.bool), 0.2, 0.28)
    loss.backward()
    assert difference.grad is not None
    assert (float(difference.grad) != 0) is moves
    assert bool(clipped) is not moves


def test_k3_is_the_divergence_in_expectation_and_survives_extremes() -> None:
    p, q = torch.tensor([0.2, 0.8]), torch.tensor([0.5, 0.5])
    mask = torch.ones(1, 1, dtype=torch.bool)
    terms = torch.stack([k3_divergence(p[i].log().reshape(1, 1), q[i].log().reshape(1, 1), mask) for i in range(2)])
    assert float((p * terms).sum()) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)
    assert math.isfinite(float(k3_divergence(torch.full((1, 1), -900.0), torch.zeros(1, 1), mask)))
    assert float(k3_divergence(torch.zeros(1, 1), torch.zeros(1, 1), mask)) == 0.0


def test_the_leash_pulls_towards_the_reference() -> None:
    world = BanditWorld()
    drift = {}
    for kl in (0.0, 10.0):
        policy, reference = world.policy(), world.policy()
        objective = Objective(replace(PLAIN, kl=kl, epochs=30, learning_rate=0.05), policy, reference)
        objective.update([Weighted(played(world, policy), torch.full((24, 1), 1 / 24))], seed=0)
        drift[kl] = float((policy.logits - reference.logits).detach().abs().max())
    assert drift[10.0] < 0.5 * drift[0.0]


def test_without_coefficients_nothing_happens_and_it_is_counted() -> None:
    """D10: no informative group, no optimiser update, and both are shown."""
    world, policy = BanditWorld(), BanditWorld().policy()
    objective = Objective(PLAIN, policy)
    numbers = objective.update([Weighted(played(world, policy), torch.zeros(24, 1))], seed=0)
    assert numbers == {"optimizer_updates": 0.0, "skipped_updates": 1.0}
    assert (objective.num_updates, objective.skipped) == (0, 1)
    assert not bool(policy.logits.any())


def test_clipped_tokens_are_counted_by_source() -> None:
    world, policy = BanditWorld(), BanditWorld().policy()
    real = played(world, policy)
    imagined = replace(real, imagined=True)
    objective = Objective(replace(PLAIN, epochs=40, learning_rate=0.3), policy)
    sources = [Weighted(real, torch.full((24, 1), 1e-6)), Weighted(imagined, torch.ones(24, 1))]
    numbers = objective.update(sources, seed=0)
    assert numbers["clip_rate_imagined"] > 0.1
    assert numbers["clipped_tokens_imagined"] == pytest.approx(numbers["clip_rate_imagined"] * 24 * 40)


def test_another_policy_than_the_one_that_acted_is_noticed_before_the_first_update() -> None:
    world, policy = BanditWorld(), BanditWorld().policy()
    rollouts = played(world, policy)
    with torch.no_grad():
        policy.logits[:, 0] += 1.0
    with pytest.raises(AssertionError, match="expected equal log-probabilities at collection and before the first update"):
        Objective(PLAIN, policy).update([Weighted(rollouts, torch.ones(24, 1))], seed=0)
    assert_on_policy(torch.full((3, 2), 1e-4))


def test_frozen_parameters_stay_and_bad_settings_fail() -> None:
    world, policy = BanditWorld(), BanditWorld().policy()
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    policy.register_parameter("frozen", frozen)
    Objective(PLAIN, policy).update([Weighted(played(world, policy), torch.ones(24, 1))], seed=0)
    assert torch.equal(frozen, torch.ones(3)) and bool(policy.logits.any())
    with pytest.raises(ValueError, match="expected objective.learning_rate above 0, got 0"):
        ObjectiveConfig(learning_rate=0.0)
    with pytest.raises(ValueError, match="expected objective.clip_low in"):
        ObjectiveConfig(clip_low=1.5)
