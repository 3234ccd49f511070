"""Imagination from keyframes: proposed updates are judged by real decisions, kept while they help, and taken back otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.wmrl.toys import CHAIN, make_trainer, states_equal
from wmrl.collect import collect, expand
from wmrl.correction import Correction, CorrectionConfig, TrustState
from wmrl.objective import Objective, ObjectiveConfig
from wmrl.proposal import Proposal, relative_change
from wmrl.toy import ChainWorld
from wmrl.trainer import Trainer
from wmrl.types import Rollouts, Status

HONEST = ChainWorld(width=96, decoy=0.05)
"""The model moves otherwise than the real world, but believes in no decoy."""


def dreaming(world: ChainWorld, **changes: Any) -> Trainer:
    torch.set_num_threads(1)
    return make_trainer(world, at_keyframes=True, refresh=1, **{"max_dose": 4, **changes})


def regret_after(steps: int, world: ChainWorld, **changes: Any) -> tuple[float, dict[str, Any]]:
    trainer = dreaming(world, **changes)
    for _ in range(steps):
        record = trainer.step()
    return world.optimum - world.value(trainer.parts.policy), record  # type: ignore[arg-type]


def played(groups: int, seed: int = 2) -> Rollouts:
    starts, members = expand(CHAIN.starts(0, groups), 8)
    return collect(CHAIN.environment(), CHAIN.policy(), starts, members, seed=seed)


def doubt(correction: Correction) -> None:
    """Ten standard errors of evidence against the model."""
    values = torch.linspace(-1, 1, 200)
    correction.trust.agreement.add(values, -values, torch.zeros(200, dtype=torch.long), torch.ones(200, dtype=torch.bool))
    assert correction.trust.update(0.0) is TrustState.DISTRUST


def test_probes_alone_open_the_gate_of_an_honest_model_and_real_decisions_are_saved() -> None:
    regret, record = regret_after(10, HONEST, mode="auto")
    alone, real = regret_after(10, HONEST, mode="real")
    assert record["trust"] == "fuse" and record["rho_low"] > 0.1 and record["imagined_share"] > 0.5
    assert regret < 0.04 and alone > 0.2
    assert record["real_decisions"] < 1.2 * real["real_decisions"]


@pytest.mark.parametrize("world", [CHAIN, ChainWorld(width=96, useless=True)])
def test_a_model_that_reality_contradicts_is_distrusted_where_the_raw_one_is_believed(world: ChainWorld) -> None:
    regret, record = regret_after(30, world, mode="auto")
    raw, _ = regret_after(30, world, mode="model", dose=4, debias=False, denoise=False)
    assert record["trust"] == "distrust" and record["rho_high"] < 0 and record["imagined_share"] == 0
    assert regret < 0.13 and raw > 0.4


def test_what_is_not_trusted_is_taken_back_to_the_last_bit() -> None:
    doubting, real = dreaming(CHAIN, mode="auto"), dreaming(CHAIN, mode="real")
    doubt(doubting.parts.correction)
    for _ in range(4):
        record = doubting.step()
        real.step()
    assert record["dose"] == 0 and record["imagined_decisions"] > 4 * 2 * 12 * 8 and record["pair_degrees"] > 300
    assert states_equal(doubting.parts.policy.state_dict(), real.parts.policy.state_dict())
    assert states_equal(doubting.state_dict()["objective"], real.state_dict()["objective"])


def test_a_veto_ends_imagination_but_for_the_twins_that_show_the_gap() -> None:
    trainer = dreaming(CHAIN, mode="auto")
    trainer.parts.correction.veto(True)
    for _ in range(2):
        trainer.step()
    assert trainer.step()["imagined_episodes"] == 3 * 4 * 8


@pytest.mark.parametrize("kept", [True, False])
def test_a_proposal_says_how_much_more_probable_it_makes_a_decision(kept: bool) -> None:
    policy = CHAIN.policy()
    proposal = Proposal(policy, Objective(ObjectiveConfig(), policy))
    proposal.begin(kept=kept)
    policy.logits.data[:, 1] += 0.5
    proposal.end()
    assert float(policy.logits.detach()[0, 1]) == (0.5 if kept else 0.0)
    starts, members = expand(CHAIN.starts(0, 4), 8)
    change = proposal.change(collect(CHAIN.environment(), policy, starts, members, seed=1))[:, 0].unique()
    before, after = torch.zeros(3).softmax(-1), torch.tensor([0.0, 0.5, 0.0]).softmax(-1)
    expected = 1 - before / after if kept else after / before - 1
    torch.testing.assert_close(change, expected.unique())


def two_states(outcomes: Tensor, actions: Tensor) -> Rollouts:
    """Rollouts of two decisions whose first is always the same; the second is taken in one of two states."""
    start = played(4)
    rows = torch.zeros(len(outcomes), dtype=torch.long)
    base = replace(start[rows], member=torch.arange(len(outcomes)))
    rewards = torch.stack([torch.zeros_like(outcomes), outcomes], dim=1)
    chosen = torch.stack([torch.zeros_like(actions), actions], dim=1)[..., None].repeat(1, 1, 3).float()
    logs = torch.full((len(outcomes), 2, 1), -torch.log(torch.tensor(2.0)).item())
    return replace(
        base,
        rewards=rewards,
        actions=chosen,
        log_probs=logs,
        inputs={"index": torch.zeros(len(outcomes), 2, dtype=torch.long)},
        token_mask=torch.ones_like(logs, dtype=torch.bool),
        mask=torch.ones(len(outcomes), 2),
        status=torch.full((len(outcomes),), int(Status.FAILURE)),
    )


def test_a_decision_without_influence_is_not_correlated_with_any_update() -> None:
    """Success depends on the state alone, the update changes one state alone: the logarithm of the ratio would correlate."""
    random = torch.Generator().manual_seed(0)
    state, actions = (torch.randint(0, 2, (20_000,), generator=random) for _ in range(2))
    outcomes = (torch.rand(20_000, generator=random) < torch.where(state == 1, 0.8, 0.2)).float()
    real = two_states(outcomes, actions)
    updated = torch.where(actions == 1, 0.95, 0.05)
    logs = torch.where(state == 1, updated, 0.5).log()
    other = torch.stack([real.log_probs[:, 0, 0], logs], dim=1)[..., None]
    correction = Correction(CorrectionConfig(), judged_by_updates=True)
    correction.judge_updates(real, relative_change(other, real))
    assert abs(correction.trust.agreement.standard_errors) < 2
    careless = Correction(CorrectionConfig(), judged_by_updates=True)
    careless.judge_updates(real, (other - real.log_probs).sum(-1))
    assert careless.trust.agreement.standard_errors < -5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_update_along_the_real_advantages_is_endorsed_and_its_opposite_is_not(sign: float) -> None:
    correction, real = Correction(CorrectionConfig(), judged_by_updates=True), played(16)
    helpful = (real.actions[..., 0] == 1) & (real.inputs["index"] % CHAIN.num_states == CHAIN.num_states - 1)
    correction.judge_updates(real, sign * helpful.float())
    low, high = correction.trust.bounds
    assert low > 0.1 if sign > 0 else high < -0.1
    correction.update(None, real)
    assert correction.dose() == (8 if sign > 0 else 0)


def test_a_probe_says_as_much_as_a_full_dose_and_no_change_says_nothing() -> None:
    random, real = torch.Generator().manual_seed(3), played(16)
    change = torch.randn(real.rewards.shape, generator=random)
    small, large, none = (Correction(CorrectionConfig(), judged_by_updates=True) for _ in range(3))
    small.judge_updates(real, change / 8)
    large.judge_updates(real, change)
    none.judge_updates(real, torch.zeros_like(change))
    assert small.trust.agreement.product == pytest.approx(large.trust.agreement.product)
    assert none.trust.agreement.degrees == 0 and none.trust.bounds == (-1.0, 1.0)


def test_without_influence_doubt_stays_in_its_share_however_many_decisions_there_are() -> None:
    doses = []
    for seed in range(60):
        correction, random = Correction(CorrectionConfig(), judged_by_updates=True), torch.Generator().manual_seed(seed)
        for block in range(1 + seed % 3):
            real = played(16, seed=10 * seed + block)
            correction.judge_updates(real, torch.randn(real.rewards.shape, generator=random))
        correction.update(None, real)
        doses.append(correction.dose() / 8)
    shut = sum(dose == 0 for dose in doses)  # of a standard normal: P(z < -0.5) = 0.31, of 60
    assert 9 < shut < 28 and sum(dose == 1 for dose in doses) > 20


def test_the_real_rows_stand_alone_at_the_pace_that_trust_leaves_them() -> None:
    trainer = dreaming(HONEST, mode="auto")
    while trainer.parts.correction.dose() == 0:
        trainer.step()
    record = trainer.step()
    correction, real = trainer.parts.correction, played(4)
    plan = correction.plan(CHAIN.starts, 0, 0, trainer.parts.keyframes)
    anchors = correction.choose_anchors(plan, None)
    batch = correction.correct(plan, anchors, real, real, same_samples=False)
    assert plan.at_keyframes and len(batch.sources) == 1 and len(plan.extra) == correction.dose()
    assert 0.25 < batch.pace < 1 and batch.pace == pytest.approx(1 - correction.combination().kappa)
    assert record["optimizer_updates"] == 1 and 0.5 < record["imagined_share"] < 1


def test_rollouts_without_an_outcome_judge_nothing() -> None:
    correction, real = Correction(CorrectionConfig(), judged_by_updates=True), played(2)
    broken = replace(real, status=torch.full_like(real.status, int(Status.INFRASTRUCTURE)))
    correction.judge_updates(broken, torch.randn(real.rewards.shape, generator=torch.Generator().manual_seed(0)))
    assert correction.trust.agreement.degrees == 0 and correction.trust.bounds == (-1.0, 1.0)


@pytest.mark.parametrize("mode", ["ppi", "fusion"])
def test_modes_that_need_pairs_are_refused_at_keyframes(mode: str) -> None:
    with pytest.raises(ValueError, match=f"expected correction.mode real, model or auto .*, got {mode}, which needs pairs"):
        Correction(CorrectionConfig(mode=mode), judged_by_updates=True)


def test_a_resumed_dream_equals_the_uninterrupted_one_bit_for_bit() -> None:
    whole, first, second = (dreaming(HONEST, mode="auto") for _ in range(3))
    records = [whole.step() for _ in range(8)]
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    resumed = [second.step() for _ in range(5)]
    assert states_equal(whole.state_dict(), second.state_dict()) and states_equal(records[3:], resumed)
    assert records[-1]["dose"] > 0
