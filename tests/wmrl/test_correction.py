"""The composed correction: predictability, unbiasedness on the toys, modes, edge cases (method 3.11), resuming."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wmrl.collect import collect, expand
from wmrl.correction import Anchors, Batch, Correction, CorrectionConfig, Plan, TrustState
from wmrl.pairing import Replay, Twin, replay
from wmrl.toy import BanditWorld, ChainWorld, SoftmaxPolicy, rollouts_of
from wmrl.types import Rollouts, Start


def plan_of(rollouts: Rollouts) -> Plan:
    return Plan(0, 0, tuple(dict.fromkeys(rollouts.starts)), ())


def anchors_of(rollouts: Rollouts, total: int) -> Anchors:
    starts = tuple(dict.fromkeys(rollouts.starts))
    return Anchors(starts, (len(starts) / total,) * len(starts))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def seasoned(config: CorrectionConfig, *, agreement: float = 0.8, steps: int = 10) -> Correction:
    """A correction that has seen pairs with some agreement, groups of 4."""
    correction = Correction(config)
    for step in range(steps):
        real = noise(4, 4, seed=2 * step)
        predicted = agreement * real + (1 - agreement) * noise(4, 4, seed=2 * step + 1)
        correction.update(rollouts_of(predicted, imagined=True), rollouts_of(real))
    return correction


def small(mode: str = "auto", **changes: object) -> CorrectionConfig:
    return replace(CorrectionConfig(mode=mode, group_size=4, real_groups=2, imagined_groups=4), **changes)  # type: ignore[arg-type]


def correct(correction: Correction, imagined: Rollouts | None, real: Rollouts, *, same_samples: bool = True) -> Batch:
    plan = plan_of(real if imagined is None else imagined)
    return correction.correct(plan, anchors_of(real, len(plan.starts)), imagined, real, same_samples=same_samples)


# Predictability and unbiasedness


def test_outcomes_of_a_step_change_nothing_that_the_step_itself_uses() -> None:
    """E8: with other real rewards, map, weights, scale, (kappa, l), anchors and the imagined coefficients stay the same."""
    correction = seasoned(small())
    imagined = rollouts_of(noise(4, 4, seed=90), imagined=True)
    plan = plan_of(imagined)
    first_anchors = correction.choose_anchors(plan, imagined)
    first = correct(correction, imagined, rollouts_of(noise(2, 4, seed=91)), same_samples=False)
    assert first.info["kappa"] > 0 and first.info["l"] > 0
    second = correct(correction, imagined, rollouts_of(noise(2, 4, seed=92)), same_samples=False)
    assert torch.equal(first.sources[1].coefficients, second.sources[1].coefficients)
    assert not torch.equal(first.sources[0].coefficients, second.sources[0].coefficients)
    assert {k: first.info[k] for k in ("kappa", "l")} == {k: second.info[k] for k in ("kappa", "l")}
    assert correction.choose_anchors(plan, imagined) == first_anchors


def frozen_policy(world: ChainWorld | BanditWorld) -> SoftmaxPolicy:
    policy = world.policy()
    with torch.no_grad():
        policy.logits.add_(0.7 * torch.randn(policy.logits.shape, generator=torch.Generator().manual_seed(3)))
    return policy


def one_gradient(world: ChainWorld | BanditWorld, config: CorrectionConfig, kind: str, step: int) -> Tensor:
    """The gradient of the logits that one step of a correction without evidence would take (task scale 0.5).

    kind: twin (valid for sequences), replay (valid for one decision), or wrong (plain replay as control variate in a sequence).
    """
    policy, correction = frozen_policy(world), Correction(config)
    model = world.imagination().environment()
    pairing = Replay() if kind == "replay" else Twin()
    plan = correction.plan(world.starts, step, 0)
    rows, members = expand(plan.starts, config.group_size)
    imagined = collect(model, policy, rows, members, seed=step)
    anchors = correction.choose_anchors(plan, imagined)
    real = pairing.execute(world.environment(), policy, anchors.starts, config.group_size, imagined, seed=step)
    batch = correction.correct(plan, anchors, imagined, real, same_samples=pairing.same_samples)
    if kind != "wrong":
        return 0.5 * torch.stack([_score_sum(policy, s.rollouts, s.coefficients) for s in batch.sources]).sum(dim=0)
    real_part = _score_sum(policy, real, batch.sources[0].coefficients)
    replayed = replay(model, real)
    everything = _score_sum(policy, imagined, _even(correction, imagined))
    anchored = _score_sum(policy, replayed, _even(correction, replayed))
    return 0.5 * (real_part + everything - anchored)


def _even(correction: Correction, imagined: Rollouts) -> Tensor:
    return correction.imagined_batch(imagined).sources[0].coefficients


def _score_sum(policy: SoftmaxPolicy, rollouts: Rollouts, coefficients: Tensor) -> Tensor:
    log_probs = policy.log_prob(rollouts.inputs, rollouts.actions)[..., 0]
    (gradient,) = torch.autograd.grad((log_probs * coefficients * (rollouts.mask > 0)).sum(), [policy.logits])
    return gradient.double()


def worst_z(world: ChainWorld | BanditWorld, config: CorrectionConfig, kind: str, steps: int = 40) -> float:
    """Largest |mean - exact gradient| over the logits, in standard errors of the mean over independent steps."""
    logits = frozen_policy(world).logits.detach().requires_grad_(True)
    (exact,) = torch.autograd.grad(world.expected_return(logits), [logits])
    draws = torch.stack([one_gradient(world, config, kind, step) for step in range(steps)])
    error = draws.std(0) / math.sqrt(steps)
    return float(((draws.mean(0) - exact).abs() / error.clamp(min=1e-5)).max())


WIDE = CorrectionConfig(mode="ppi", denoise=False, group_size=4, real_groups=24, imagined_groups=72, max_coefficient=1e6)


def test_twins_leave_the_sequential_gradient_unbiased_whatever_the_model() -> None:
    """T13: kappa = 0, l = 1, a model that believes in the decoy: the mean gradient is the exact one of the real world."""
    assert worst_z(ChainWorld(width=288), WIDE, "twin") < 4


def test_the_harness_sees_the_bias_of_the_raw_model_and_of_plain_replay() -> None:
    assert worst_z(ChainWorld(width=288), replace(WIDE, mode="model", debias=False, dose=0), "twin", steps=20) > 30
    assert worst_z(ChainWorld(width=288), WIDE, "wrong", steps=20) > 5


def test_replays_leave_the_one_decision_gradient_unbiased_whatever_the_model() -> None:
    """T1: with kappa = 0 and l = 1 the over-scored arms do not matter; the raw model is far off."""
    world = BanditWorld(num_tasks=3, num_arms=4, width=288)
    assert worst_z(world, WIDE, "replay") < 4
    assert worst_z(world, replace(WIDE, mode="model", debias=False, dose=0), "replay") > 30


def test_a_constant_per_group_on_all_predictions_changes_nothing() -> None:
    """E4: offsets cancel inside whole groups."""
    correction = seasoned(small("ppi"))
    predicted, real = noise(4, 4, seed=1), rollouts_of(noise(2, 4, seed=2))
    plain = correct(correction, rollouts_of(predicted, imagined=True), real)
    shifted = correct(correction, rollouts_of(predicted + torch.tensor([[3.0], [-2.0], [0.5], [0.0]]), imagined=True), real)
    torch.testing.assert_close(plain.sources[1].coefficients, shifted.sources[1].coefficients, atol=1e-6, rtol=0)


# Modes and states


def test_real_mode_is_the_classic_leave_one_out_gradient() -> None:
    real = rollouts_of(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    batch = correct(Correction(small("real")), None, real)
    expected = torch.tensor([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0], dtype=torch.float64) / 0.5 / 8
    torch.testing.assert_close(batch.sources[0].coefficients[:, 0], expected)
    assert batch.info["groups_without_information"] == 1 and batch.info["groups"] == 2


def test_auto_without_evidence_is_real_only() -> None:
    real, imagined = rollouts_of(noise(2, 4, seed=1)), rollouts_of(noise(4, 4, seed=2), imagined=True)
    auto = correct(Correction(small("auto")), imagined, real, same_samples=False)
    classic = correct(Correction(small("real")), None, real)
    torch.testing.assert_close(auto.sources[0].coefficients, classic.sources[0].coefficients)
    assert not bool(auto.sources[1].coefficients.any())
    assert Correction(small("auto")).dose() == 0


def test_auto_opens_on_agreement_and_takes_a_dose() -> None:
    correction = seasoned(small("auto"))
    assert correction.trust.state is TrustState.FUSE
    combination = correction.combination()
    assert 0.2 < combination.kappa <= 0.7 and 0.5 < combination.l <= 1.0
    assert 1 <= correction.dose() <= 8
    assert correction.metrics()["trust"] == "fuse"


def test_auto_distrusts_a_useless_model_and_falls_back_to_real_only() -> None:
    correction = seasoned(small("auto"), agreement=0.0, steps=25)
    assert correction.trust.state is TrustState.DISTRUST
    assert correction.combination().kappa == correction.combination().l == 0.0 and correction.dose() == 0


def test_a_veto_shuts_the_gate_and_a_forced_gate_opens_it() -> None:
    vetoed = seasoned(small("auto"))
    vetoed.veto(True)
    vetoed.update(rollouts_of(noise(4, 4, seed=1), imagined=True), rollouts_of(noise(2, 4, seed=1)))
    assert vetoed.combination().kappa == 0 and vetoed.metrics()["trust"] == "distrust"
    forced = Correction(small("auto", gate="open"))
    assert forced.combination().kappa == pytest.approx(0.35) and forced.dose() == 4
    assert forced.metrics()["trust"] == "fuse" and forced.metrics()["trust_measured"] == "cold"
    assert seasoned(small("auto", gate="shut")).combination().kappa == 0


def test_first_evidence_opens_trust_before_the_first_step() -> None:
    real = noise(12, 8, seed=1)
    predicted = 0.8 * real + 0.2 * noise(12, 8, seed=2)
    correction = Correction(small("auto"))
    correction.seed_evidence(rollouts_of(predicted, imagined=True), rollouts_of(real))
    assert correction.trust.state is TrustState.FUSE


def test_debiasing_and_denoising_are_switches() -> None:
    plain = seasoned(small("ppi", debias=False, denoise=False))
    assert plain.combination().l == 1.0 and plain.metrics()["debiasing"] is False
    full = seasoned(small("ppi"))
    assert full.metrics()["debiasing"] is True and full.combination().l < 1.0


def test_model_mode_ignores_real_outcomes_and_fusion_keeps_most_of_the_models_mean() -> None:
    real, imagined = rollouts_of(noise(2, 4, seed=1)), rollouts_of(noise(4, 4, seed=2), imagined=True)
    model = correct(Correction(small("model")), imagined, real, same_samples=False)
    assert not bool(model.sources[0].coefficients.any()) and model.info["mass_real"] == 0
    fused = Correction(small("fusion", denoise=False)).combination()
    assert (fused.kappa, fused.l) == (0.5, 1.0)


# Edge cases of method 3.11


def test_without_any_real_outcome_an_unbiased_mode_makes_no_update() -> None:
    imagined = rollouts_of(noise(4, 4, seed=2), imagined=True)
    batch = correct(seasoned(small("auto")), imagined, rollouts_of(torch.full((2, 4), math.nan)))
    assert all(not bool(source.coefficients.any()) for source in batch.sources)


def test_a_group_that_lost_its_outcomes_is_stood_in_for_by_the_others() -> None:
    real = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, math.nan, math.nan, math.nan]])
    batch = correct(Correction(small("real")), None, rollouts_of(real))
    expected = torch.tensor([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0], dtype=torch.float64) / 0.5 / 4
    torch.testing.assert_close(batch.sources[0].coefficients[:, 0], expected)


def test_predictions_that_are_not_finite_are_neutral_and_many_of_them_shut_the_gate() -> None:
    correction = seasoned(small("auto"))
    predicted = noise(4, 4, seed=1)
    predicted[:, 0] = math.nan
    imagined, real = rollouts_of(predicted, imagined=True), rollouts_of(noise(2, 4, seed=2))
    batch = correct(correction, imagined, real, same_samples=False)
    assert all(bool(torch.isfinite(source.coefficients).all()) for source in batch.sources)
    assert not bool(batch.sources[1].coefficients[::4].any())
    for _ in range(3):
        correction.update(imagined, real)
    assert correction.trust.state is TrustState.DISTRUST


@pytest.mark.parametrize("mode", ["model", "ppi", "fusion", "auto"])
def test_constant_outcomes_or_predictions_give_finite_coefficients(mode: str) -> None:
    for predicted, outcomes in ((torch.ones(4, 4), noise(2, 4, seed=1)), (noise(4, 4, seed=1), torch.zeros(2, 4))):
        correction = seasoned(small(mode))
        imagined, real = rollouts_of(predicted, imagined=True, variance=torch.zeros(4, 4)), rollouts_of(outcomes)
        for _ in range(3):
            batch = correct(correction, imagined, real)
            assert all(bool(torch.isfinite(source.coefficients).all()) for source in batch.sources)
            correction.update(imagined, real)


def test_constant_anchors_are_kept_because_they_show_spurious_spread() -> None:
    """All real rewards equal: the real part is 0, but -l A^F of the twins stays."""
    correction = seasoned(small("ppi"))
    imagined = rollouts_of(noise(4, 4, seed=1), imagined=True)
    batch = correct(correction, imagined, rollouts_of(torch.ones(2, 4)), same_samples=False)
    twins, others = batch.sources[1].coefficients[:8], batch.sources[1].coefficients[8:]
    advantage_signs = torch.sign(correction.imagined_batch(imagined).sources[0].coefficients)
    assert torch.equal(torch.sign(twins), -advantage_signs[:8])
    assert torch.equal(torch.sign(others), advantage_signs[8:])


def test_extreme_coefficients_are_capped_and_counted() -> None:
    real = rollouts_of(torch.tensor([[1000.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))
    batch = correct(Correction(small("real")), None, real)
    assert float(batch.sources[0].coefficients.max()) == pytest.approx(20 / 8)
    assert batch.info["clipped_coefficients"] == 4


# Configuration, planning, resuming


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "fusoin"}, "got 'fusoin', did you mean fusion"),
        ({"group_size": 1}, "expected correction.group_size of at least 2"),
        ({"group_size": 0}, "expected correction.group_size of at least 2"),
        ({"real_groups": 0}, "expected correction.real_groups of at least 1"),
        ({"imagined_groups": 1}, "expected correction.imagined_groups of at least correction.real_groups=2"),
        ({"mode": "ppi", "gate": "open"}, "expected correction.gate=auto with correction.mode=ppi, got open"),
        ({"kappa_cap": 1.5}, "expected correction.kappa_cap between 0.0 and 1.0, got 1.5"),
        ({"dose": -1}, "expected correction.dose between 0"),
    ],
)
def test_bad_settings_fail_at_once(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(small(), **changes)  # type: ignore[arg-type]


def test_plans_have_the_same_number_of_real_groups_in_every_mode() -> None:
    world = BanditWorld()
    for mode in ("real", "model", "ppi", "fusion", "auto"):
        correction = Correction(small(mode, dose=3))
        plan = correction.plan(world.starts, 4, 0)
        imagined = None
        if mode != "real":
            rows, members = expand(plan.starts, 4)
            imagined = collect(world.imagination().environment(), world.policy(), rows, members, seed=0)
        assert len(correction.choose_anchors(plan, imagined).starts) == 2
        assert len(plan.extra) == (3 if mode in ("model", "fusion") else 0)


def test_pairs_that_do_not_fit_are_refused() -> None:
    imagined, real = rollouts_of(noise(2, 4, seed=1), imagined=True), rollouts_of(noise(2, 4, seed=2))
    with pytest.raises(ValueError, match="expected imagined rollouts first and real ones second"):
        Correction(small()).seed_evidence(real, imagined)
    longer = collect(ChainWorld().environment(), ChainWorld().policy(), ChainWorld().starts(0, 2), [0, 0], seed=0)
    with pytest.raises(ValueError, match="one number of decisions, got 1 and 4"):
        Correction(small()).seed_evidence(imagined, longer)


def test_repeated_starts_in_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 4 different starts for step 0, got 1"):
        Correction(small("ppi")).plan(lambda step, count: [Start("a", 1)] * count, 0, 0)


def test_a_restored_correction_continues_bit_for_bit() -> None:
    first = seasoned(small("auto"))
    second = Correction(small("auto"))
    second.load_state_dict(first.state_dict())
    for step in range(5):
        imagined, real = rollouts_of(noise(4, 4, seed=step), imagined=True), rollouts_of(noise(2, 4, seed=step + 50))
        pair = [correct(c, imagined, real) for c in (first, second)]
        assert all(torch.equal(a.coefficients, b.coefficients) for a, b in zip(pair[0].sources, pair[1].sources, strict=True))
        for c in (first, second):
            c.update(imagined, real)
            c.model_refreshed()
    assert first.metrics() == second.metrics()
