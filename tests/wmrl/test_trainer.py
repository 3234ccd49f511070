"""The trainer on worlds with a known optimum: correction finds it where the raw model does not; resuming changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.wmrl.toys import BANDIT, CHAIN, QUICK, make_trainer, states_equal
from wmrl.buffer import Buffer
from wmrl.collect import collect, expand
from wmrl.correction import Correction, CorrectionConfig
from wmrl.ledger import Ledger
from wmrl.objective import ObjectiveConfig
from wmrl.pairing import Replay, Twin, replay
from wmrl.toy import BanditWorld, ChainWorld, SoftmaxPolicy, ToyModel
from wmrl.trainer import Parts, Trainer, TrainerConfig
from wmrl.types import Environment, Observation, Rollouts, Start, Status, Step


def trained(world: BanditWorld | ChainWorld, steps: int, **changes: Any) -> tuple[float, dict[str, Any]]:
    """Regret against the exact optimum after training, and the last record."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, **changes)
    for _ in range(steps):
        record = trainer.step()
    assert isinstance(trainer.parts.policy, SoftmaxPolicy)
    return world.optimum - world.value(trainer.parts.policy), record


@pytest.mark.parametrize("mode", ["real", "ppi", "fusion", "auto"])
def test_the_bandits_optimum_is_reached_with_the_correction(mode: str) -> None:
    regret, record = trained(BANDIT, 60, mode=mode)
    assert regret < 0.03
    assert (record["imagined_share"] > 0) is (mode != "real")


def test_the_bandits_optimum_is_missed_by_the_raw_model() -> None:
    regret, record = trained(BANDIT, 60, mode="model", debias=False, denoise=False)
    assert regret > 0.08
    assert record["imagined_success"] > record["real_success"] + 0.1


@pytest.mark.parametrize("mode", ["real", "ppi", "fusion", "auto"])
def test_the_chains_optimum_is_reached_with_the_correction(mode: str) -> None:
    regret, _ = trained(CHAIN, 60, mode=mode)
    assert regret < 0.06


def test_the_chains_optimum_is_missed_by_the_raw_model_which_believes_in_the_decoy() -> None:
    regret, record = trained(CHAIN, 60, mode="model", debias=False, denoise=False)
    assert regret > 0.5
    assert record["imagined_success"] > 0.9 and record["real_success"] < 0.4
    assert record["bias"] > 0.5 and record["exploitation_alarm"]


@pytest.mark.parametrize("world", [BanditWorld(num_tasks=4, width=96, useless=True), ChainWorld(width=96, useless=True)])
def test_a_useless_model_does_no_harm(world: BanditWorld | ChainWorld) -> None:
    regret, record = trained(world, 60, mode="auto")
    alone, _ = trained(world, 60, mode="real")
    assert regret < max(0.06, alone + 0.03)
    assert record["kappa"] <= 0.2


def test_a_shut_gate_is_real_only_rl_to_the_last_bit() -> None:
    policies = []
    for mode, gate in (("real", "auto"), ("auto", "shut")):
        trainer = make_trainer(CHAIN, mode=mode, gate=gate)
        for _ in range(4):
            trainer.step()
        policies.append(trainer.parts.policy.state_dict())
    assert states_equal(*policies)


def test_a_warm_start_learns_from_rollouts_of_the_untrained_policy_and_keeps_them() -> None:
    trainer = make_trainer(CHAIN, mode="real")
    before = {name: tensor.clone() for name, tensor in trainer.parts.policy.state_dict().items()}
    starts, members = expand(CHAIN.starts(0, 8), 8)
    base = collect(CHAIN.environment(), trainer.parts.policy, starts, members, seed=5)
    numbers = trainer.warm_start(base)
    assert numbers["optimizer_updates"] == 1 and len(trainer.parts.buffer) == 64 and trainer.step_index == 0
    assert not states_equal(before, trainer.parts.policy.state_dict())


def test_equal_steps_are_equal_real_decisions_in_every_mode() -> None:
    spent = {}
    for mode in ("real", "model", "ppi", "fusion", "auto"):
        _, record = trained(BANDIT, 3, mode=mode, dose=1)
        spent[mode] = record["real_decisions"]
        assert record["imagined_decisions"] == {"real": 0, "model": 2, "fusion": 2}.get(mode, 1) * 3 * 12 * 8
    assert set(spent.values()) == {3 * 4 * 8}


@pytest.mark.parametrize("world", [BANDIT, CHAIN])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(world: BanditWorld | ChainWorld) -> None:
    objective = ObjectiveConfig(learning_rate=0.1, minibatches=3, imagined_minibatches=2)
    settings: dict[str, Any] = {"objective": objective, "refresh": 2, "max_dose": 2, "gate": "open"}
    whole = make_trainer(world, **settings)
    records = [whole.step() for _ in range(12)]
    first = make_trainer(world, **settings)
    for _ in range(7):
        first.step()
    second = make_trainer(world, **settings)
    second.load_state_dict(first.state_dict())
    resumed = [second.step() for _ in range(5)]
    assert states_equal(whole.state_dict(), second.state_dict())
    assert states_equal(records[7:], resumed)
    assert records[-1]["dose"] > 0


class AllOrNothing(ToyModel):
    """A model that calls every choice of arm 0 a success (D12)."""

    def __init__(self) -> None:
        super().__init__(Paying(0, imagined=True))


class Paying:
    """One decision that succeeds exactly for one arm; arm -1: never, arm -2: always."""

    max_decisions = 1
    width = 32

    def __init__(self, arm: int, *, imagined: bool = False) -> None:
        self.arm, self.imagined = arm, imagined

    def reset(self, starts: Sequence[Start]) -> Observation:
        return {"index": torch.zeros(len(starts), dtype=torch.long)}

    def step(self, actions: Tensor) -> Step:
        reward = ((actions[:, 0] == self.arm) | (self.arm == -2)).float()
        status = torch.where(reward > 0, int(Status.SUCCESS), int(Status.FAILURE))
        nothing = torch.zeros(len(reward))
        return Step({"index": torch.zeros(len(reward), dtype=torch.long)}, reward, status, nothing, nothing)


def paying_trainer(real: Environment, mode: str) -> Trainer:
    world = BanditWorld(num_tasks=1, num_arms=3)
    correction = Correction(CorrectionConfig(mode=mode, group_size=4, real_groups=4, imagined_groups=8, dose=2))
    parts = Parts(real, AllOrNothing(), world.policy(), Replay(), correction, world.starts, Buffer(), Ledger())
    return Trainer(TrainerConfig(), parts, QUICK)


def test_an_exploited_model_shows_in_the_gap_and_never_in_the_real_number() -> None:
    """D12: real success 0.0 under its own name, the imagined 1.0 and the gap beside it, flagged."""
    trainer = paying_trainer(Paying(-1), "model")
    for _ in range(60):
        record = trainer.step()
    assert record["real_success"] == 0.0
    assert record["imagined_success"] > 0.95
    assert record["exploitation_gap"] > 0.9 and record["exploitation_alarm"]


@pytest.mark.parametrize("arm", [-1, -2])
def test_a_world_without_signal_makes_no_update_and_says_so(arm: int) -> None:
    """D10: always failing, always succeeding: no informative group, no optimiser update, no endless sampling."""
    trainer = paying_trainer(Paying(arm), "real")
    for _ in range(3):
        record = trainer.step()
    assert record["groups_without_information"] == record["groups"] == 4
    assert record["optimizer_updates_total"] == 0 and record["skipped_updates_total"] == 3
    assert record["real_success"] == (0.0 if arm == -1 else 1.0)


def test_a_mode_that_imagines_needs_a_world_model() -> None:
    parts = make_trainer(BANDIT).parts
    parts.imagination = None
    with pytest.raises(ValueError, match="expected a world model with correction.mode=auto, got none"):
        Trainer(TrainerConfig(), parts, QUICK)


def test_the_record_of_a_step_is_complete() -> None:
    trainer = make_trainer(CHAIN, refresh=1, max_dose=2, gate="open")
    records: list[dict[str, Any]] = []
    trainer._on_step = records.append
    record = trainer.step()
    wanted = (
        "step real_success imagined_success imagined_share bias bias_low bias_high kappa l rho rho_low rho_high trust dose "
        "groups_without_information clip_rate_real clip_rate_imagined kl gradient_norm seconds real_decisions "
        "imagined_decisions"
    ).split()
    assert [name for name in wanted if name not in record] == []
    assert records == [record]
    assert set(record["seconds"]) == {"imagine", "real", "update", "fit"}
    assert record["model_version"] == 1 and record["dose"] == 1 and 0 < record["imagined_share"] < 1


# Pairing, buffer and ledger


def test_twins_share_the_noise_and_agree_while_the_worlds_do() -> None:
    world = ChainWorld(decoy=0.05, model_advance=0.8)
    rows, members = expand(world.starts(0, 20), 8)
    imagined = collect(world.imagination().environment(), world.policy(), rows, members, seed=3)
    real = Twin().execute(world.environment(), world.policy(), world.starts(0, 20), 8, imagined, seed=3)
    taken = real.mask > 0
    assert torch.equal(real.actions[taken], imagined.actions[taken])


def test_a_replay_executes_the_very_decisions_that_were_predicted() -> None:
    world = BanditWorld(real_noise=0.0)
    rows, members = expand(world.starts(0, 6), 4)
    imagined = collect(world.imagination().environment(), world.policy(), rows, members, seed=3)
    chosen = [world.starts(0, 6)[k] for k in (1, 4)]
    real = Replay().execute(world.environment(), world.policy(), chosen, 4, imagined, seed=99)
    assert torch.equal(real.actions, imagined.actions[[4, 5, 6, 7, 16, 17, 18, 19]])
    task = torch.tensor([int(s.task.rsplit("-", 1)[1]) for s in real.starts])
    torch.testing.assert_close(real.returns(), world.rewards[task, real.actions[:, 0, 0].long()])
    assert torch.equal(replay(world.environment(), imagined).returns()[[4, 5, 6, 7]], real.returns()[:4])


def some_rollouts(seed: int = 0) -> Rollouts:
    rows, members = expand(CHAIN.starts(0, 3), 4)
    return collect(CHAIN.environment(), CHAIN.policy(), rows, members, seed=seed)


def test_the_buffer_keeps_the_newest_valid_rollouts_and_its_state_round_trips() -> None:
    buffer = Buffer(capacity=20)
    buffer.add(some_rollouts(0))
    buffer.add(some_rollouts(1))
    assert len(buffer) == 20
    torch.testing.assert_close(buffer.all().actions[-12:], some_rollouts(1).actions)
    other = Buffer(capacity=20)
    other.load_state_dict(buffer.state_dict())
    assert other.all().starts == buffer.all().starts
    assert torch.equal(other.all().rewards, buffer.all().rewards)
    imagined = collect(CHAIN.imagination().environment(), CHAIN.policy(), CHAIN.starts(0, 2), [0, 0], seed=0)
    with pytest.raises(ValueError, match="expected real rollouts, got imagined ones"):
        buffer.add(imagined)
    with pytest.raises(ValueError, match="expected rollouts in the buffer, got none"):
        Buffer().all()


def test_the_ledger_keeps_purposes_apart_and_the_final_evaluation_free() -> None:
    ledger, rollouts = Ledger(), some_rollouts()
    ledger.record("anchors", rollouts)
    ledger.record("exam", rollouts)
    ledger.record("evaluation", rollouts, free=True)
    ledger.record_counts("demonstrations", decisions=80, episodes=10, seconds=3.0)
    with ledger.phase("real"):
        math.factorial(2000)
    taken = int((rollouts.mask > 0).sum())
    assert ledger.real_decisions == 2 * taken + 80
    assert ledger.real_episodes == 34 and ledger.imagined_decisions == 0
    other = Ledger()
    other.load_state_dict(ledger.state_dict())
    assert other.summary() == ledger.summary()
    assert ledger.summary()["seconds"]["real"]["wall"] > 0


def test_training_on_after_an_evaluation_forgets_neither_it_nor_its_seconds() -> None:
    checkpointed, written, rollouts = Ledger(), Ledger(), some_rollouts()
    checkpointed.record("anchors", rollouts)
    for ledger, phases in ((checkpointed, ["real"]), (written, ["real", "evaluate", "videos"])):
        for phase in phases:
            with ledger.phase(phase):
                math.factorial(2000)
    written.record("anchors", rollouts)
    written.record("anchors", rollouts)  # a step that a kill took back
    written.record("evaluation", rollouts, free=True)
    loaded = Ledger()
    loaded.load_state_dict(checkpointed.state_dict())
    loaded.keep_later(written.summary())
    assert loaded.real_episodes == checkpointed.real_episodes
    assert loaded.summary()["free"] == written.summary()["free"]
    after, before, newer = (ledger.summary()["seconds"] for ledger in (loaded, checkpointed, written))
    assert after == {"real": before["real"], "evaluate": newer["evaluate"], "videos": newer["videos"]}


def test_a_gate_that_closed_takes_no_dose_in_the_next_step() -> None:
    trainer = make_trainer(BANDIT, max_dose=3)
    while trainer.parts.correction.dose() == 0:
        trainer.step()
    trainer.parts.correction.veto(True)  # takes effect when a step's pairs have moved the state
    assert trainer.step()["dose"] > 0
    assert trainer.step()["dose"] == 0
