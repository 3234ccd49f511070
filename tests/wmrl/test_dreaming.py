"""Imagination from keyframes: proposed updates are judged by real decisions, kept while they help, and taken back otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.wmrl.toys import CHAIN, make_trainer, states_equal
from wmrl.collect import collect, expand
from wmrl.correction import Correction, CorrectionConfig
from wmrl.objective import Objective, ObjectiveConfig
from wmrl.proposal import Proposal
from wmrl.toy import ChainWorld
from wmrl.trainer import Trainer

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


def test_probes_alone_open_the_gate_of_an_honest_model_and_real_decisions_are_saved() -> None:
    regret, record = regret_after(10, HONEST, mode="auto")
    alone, real = regret_after(10, HONEST, mode="real")
    assert record["trust"] == "fuse" and record["rho_low"] > 0.1 and record["imagined_share"] > 0.5
    assert regret < 0.04 and alone > 0.2
    assert record["real_decisions"] < 1.2 * real["real_decisions"]


@pytest.mark.parametrize("world", [CHAIN, ChainWorld(width=96, useless=True)])
def test_a_model_that_reality_contradicts_is_distrusted_where_the_raw_one_is_believed(world: ChainWorld) -> None:
    regret, record = regret_after(40, world, mode="auto")
    raw, _ = regret_after(40, world, mode="model", dose=4, debias=False, denoise=False)
    assert record["trust"] == "distrust" and record["rho_high"] < 0 and record["imagined_share"] == 0
    assert regret < 0.2 and raw > 0.4


def test_what_is_not_trusted_is_taken_back_to_the_last_bit() -> None:
    doubting, real = dreaming(CHAIN, mode="auto"), dreaming(CHAIN, mode="real")
    doubting.parts.correction.veto(True)
    doubting.parts.correction.trust.update(0.0)
    for _ in range(4):
        record = doubting.step()
        real.step()
    assert record["dose"] == 0 and record["imagined_decisions"] > 0 and record["pair_degrees"] > 100
    assert states_equal(doubting.parts.policy.state_dict(), real.parts.policy.state_dict())
    assert states_equal(doubting.state_dict()["objective"], real.state_dict()["objective"])


@pytest.mark.parametrize("kept", [True, False])
def test_a_proposal_means_the_same_whether_it_is_kept_or_taken_back(kept: bool) -> None:
    policy = CHAIN.policy()
    proposal = Proposal(policy, Objective(ObjectiveConfig(), policy))
    proposal.begin(kept=kept)
    policy.logits.data[:, 1] += 0.5
    proposal.end()
    assert float(policy.logits.detach()[0, 1]) == (0.5 if kept else 0.0)
    starts, members = expand(CHAIN.starts(0, 4), 8)
    change = proposal.change(collect(CHAIN.environment(), policy, starts, members, seed=1))
    updated = torch.tensor([0.0, 0.5, 0.0]).log_softmax(-1) - torch.zeros(3).log_softmax(-1)
    torch.testing.assert_close(change[:, 0].unique(), updated.unique())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_update_along_the_real_advantages_is_endorsed_and_its_opposite_is_not(sign: float) -> None:
    correction = Correction(CorrectionConfig(), judged_by_updates=True)
    starts, members = expand(CHAIN.starts(0, 16), 8)
    real = collect(CHAIN.environment(), CHAIN.policy(), starts, members, seed=2)
    helpful = (real.actions[..., 0] == 1) & (real.inputs["index"] % CHAIN.num_states == CHAIN.num_states - 1)
    correction.judge_updates(real, sign * helpful.float())
    low, high = correction.trust.bounds
    assert low > 0.1 if sign > 0 else high < -0.1
    correction.update(None, real)
    assert (correction.dose() > 0) is (sign > 0)


def test_rollouts_without_an_outcome_judge_nothing() -> None:
    correction = Correction(CorrectionConfig(), judged_by_updates=True)
    starts, members = expand(CHAIN.starts(0, 2), 4)
    real = collect(CHAIN.environment(), CHAIN.policy(), starts, members, seed=2)
    broken = replace(real, status=torch.full_like(real.status, 7))
    correction.judge_updates(broken, torch.ones_like(real.rewards))
    assert correction.trust.agreement.degrees == 0 and correction.trust.bounds == (-1.0, 1.0)


def test_a_resumed_dream_equals_the_uninterrupted_one_bit_for_bit() -> None:
    whole, first, second = (dreaming(HONEST, mode="auto") for _ in range(3))
    records = [whole.step() for _ in range(8)]
    for _ in range(3):
        first.step()
    second.load_state_dict(first.state_dict())
    resumed = [second.step() for _ in range(5)]
    assert states_equal(whole.state_dict(), second.state_dict()) and states_equal(records[3:], resumed)
    assert records[-1]["dose"] > 0
