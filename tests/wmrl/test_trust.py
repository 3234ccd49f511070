"""Trust: what opens the gate, what shuts it, and that it does neither by chance (method 3.8)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.wmrl.toys import normal
from wmrl.correction.trust import Agreement, Trust, TrustConfig, TrustState


def feed(trust: Trust, *, rho: float, steps: int, offset: float = 0.0, seed: int = 0) -> list[TrustState]:
    """States while 4 groups of 8 pairs of correlation rho come in per step."""
    states = []
    index, valid = torch.arange(4).repeat_interleave(8), torch.ones(32, dtype=torch.bool)
    for step in range(steps):
        real = normal(32, seed=seed + 2 * step)
        predicted = rho * real + math.sqrt(1 - rho**2) * normal(32, seed=seed + 2 * step + 1)
        trust.agreement.add(real, predicted + offset, index, valid)
        trust.watch(predicted + offset - real)
        states.append(trust.update(0.0))
    return states


def test_trust_opens_for_a_good_model_and_does_not_chatter() -> None:
    states = feed(Trust(TrustConfig()), rho=0.8, steps=200)
    assert states[1] is TrustState.COLD
    assert TrustState.FUSE in states[:6]
    assert states.count(TrustState.FUSE) > 190


def test_a_middling_model_is_used_without_bias_only() -> None:
    states = feed(Trust(TrustConfig()), rho=0.35, steps=100)
    assert states[-1] is TrustState.PPI and TrustState.FUSE not in states


def test_a_useless_and_a_harmful_model_are_distrusted() -> None:
    useless = feed(Trust(TrustConfig()), rho=0.0, steps=60)
    assert useless[-1] is TrustState.DISTRUST and TrustState.FUSE not in useless
    assert feed(Trust(TrustConfig()), rho=-0.6, steps=4)[-1] is TrustState.DISTRUST


def test_trust_is_lost_when_the_model_goes_bad_and_can_be_regained() -> None:
    trust = Trust(TrustConfig(discount=0.9))
    assert feed(trust, rho=0.8, steps=30)[-1] is TrustState.FUSE
    assert feed(trust, rho=0.0, steps=40, seed=1000)[-1] is TrustState.DISTRUST
    assert feed(trust, rho=0.8, steps=40, seed=2000)[-1] is TrustState.FUSE


def test_a_growing_gap_takes_the_model_out_of_the_fusing_state_and_a_large_one_raises_the_alarm() -> None:
    trust = Trust(TrustConfig())
    assert feed(trust, rho=0.8, steps=20)[-1] is TrustState.FUSE
    assert not trust.exploited
    assert feed(trust, rho=0.8, steps=3, offset=0.5, seed=500)[-1] is TrustState.PPI
    assert trust.exploited and trust.gap > 0.3


def test_a_gap_that_grows_over_many_model_versions_is_seen() -> None:
    trust = Trust(TrustConfig())
    for step in range(12):
        trust.watch(torch.full((8,), 0.08 * step))
        trust.refreshed()
    assert trust.alarmed


def test_a_veto_and_unusable_predictions_shut_the_gate() -> None:
    trust = Trust(TrustConfig())
    feed(trust, rho=0.8, steps=20)
    trust.vetoed = True
    assert trust.update(0.0) is TrustState.DISTRUST
    trust.vetoed = False
    assert trust.update(0.0) is TrustState.FUSE
    for _ in range(3):
        state = trust.update(0.2)
    assert state is TrustState.DISTRUST


def test_a_new_model_version_discounts_evidence_instead_of_restarting() -> None:
    trust = Trust(TrustConfig())
    feed(trust, rho=0.8, steps=20)
    before = trust.agreement.degrees
    trust.refreshed()
    assert trust.agreement.degrees == pytest.approx(0.5 * before)
    assert trust.update(0.0) is TrustState.FUSE


def test_constant_real_rewards_count_as_spurious_spread_without_narrowing_the_interval() -> None:
    agreement, index, valid = Agreement(), torch.zeros(8, dtype=torch.long), torch.ones(8, dtype=torch.bool)
    real = normal(8)
    agreement.add(real, real, index, valid)
    assert agreement.correlation == pytest.approx(1.0)
    degrees = agreement.degrees
    agreement.add(torch.ones(8, dtype=torch.float64), normal(8, seed=1), index, valid)
    assert agreement.degrees == degrees == 7
    assert agreement.correlation < 0.9
