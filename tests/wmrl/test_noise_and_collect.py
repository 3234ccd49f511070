"""Keyed noise and `collect`: waves, padding, soft and hard endings, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from wmrl.collect import collect, expand
from wmrl.noise import derive_seed, uniforms
from wmrl.toy import BanditWorld, ChainWorld, SoftmaxPolicy
from wmrl.types import Observation, Start, Status, Step

STARTS = [Start("chain", seed) for seed in range(5)]


def test_noise_is_the_philox_stream_of_its_key() -> None:
    got = uniforms(5, STARTS[:1], [3], decision=2, size=9)[0]
    key = np.array([5, int(STARTS[0].scene_hash, 16)], dtype=np.uint64)
    counter = np.array([0, 2, 3, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(9)
    np.testing.assert_array_equal(got.numpy(), (((raw >> np.uint64(41)) + 0.5) / 2**23).astype(np.float32))


def test_noise_does_not_depend_on_the_other_rows_and_is_inside_the_unit_interval() -> None:
    together = uniforms(1, STARTS, [0, 1, 2, 3, 4], decision=0, size=20_000)
    alone = uniforms(1, STARTS[3:4], [3], decision=0, size=20_000)
    assert torch.equal(together[3], alone[0])
    assert 0.0 < together.min() and together.max() < 1.0
    assert abs(float(together.mean()) - 0.5) < 0.005
    assert abs(float(torch.corrcoef(together)[0, 1])) < 0.03


def test_noise_ignores_the_instruction_so_that_scenes_pair_up() -> None:
    red, green = Start("t", 1, "lift the red cube"), Start("t", 1, "lift the green cube")
    assert torch.equal(uniforms(0, [red], [0], 0, 4), uniforms(0, [green], [0], 0, 4))


def test_derived_seeds_differ_by_purpose_and_repeat() -> None:
    assert derive_seed(1, 2, "anchors") == derive_seed(1, 2, "anchors")
    assert len({derive_seed(s, t, p) for s in range(5) for t in range(5) for p in ("a", "b")}) == 50


@pytest.mark.parametrize("width", [1, 3, 4, 64])
def test_results_do_not_depend_on_the_width_of_the_environment(width: int) -> None:
    policy = SoftmaxPolicy(12, 3)
    rows, members = expand(STARTS, 4)
    reference = collect(ChainWorld(width=20).environment(), policy, rows, members, seed=7)
    other = collect(ChainWorld(width=width).environment(), policy, rows, members, seed=7)
    assert len(other) == 20
    assert [s.seed for s in other.starts] == [s.seed for s in rows]
    for name in ("actions", "rewards", "mask", "status", "log_probs"):
        assert torch.equal(getattr(reference, name), getattr(other, name)), name
    assert torch.equal(reference.inputs["index"], other.inputs["index"])
    assert torch.equal(reference.final["index"], other.final["index"])


def test_progress_counts_up_to_all_rollouts_and_changes_none() -> None:
    policy, world = SoftmaxPolicy(12, 3), ChainWorld(width=8)
    rows, members = expand(STARTS, 4)
    finished: list[int] = []
    watched = collect(world.environment(), policy, rows, members, seed=7, on_wave=finished.append)
    assert finished == [8, 16, 20] and len(watched) == 20
    alone = collect(world.environment(), policy, rows, members, seed=7)
    assert torch.equal(watched.actions, alone.actions) and torch.equal(watched.rewards, alone.rewards)


def test_real_rollouts_have_hard_masks_and_one_reward_at_the_success() -> None:
    rows, members = expand(STARTS, 40)
    real = collect(ChainWorld().environment(), SoftmaxPolicy(12, 3), rows, members, seed=0)
    assert set(real.mask.unique().tolist()) == {0.0, 1.0}
    won = real.status == Status.SUCCESS
    assert torch.equal(real.returns(), won.float())
    assert 0 < int(won.sum()) < len(real)
    assert set(real.status.tolist()) == {int(Status.SUCCESS), int(Status.TIME_LIMIT)}
    last_taken = (real.mask.sum(dim=1) - 1).long()
    assert torch.equal(real.rewards.argmax(dim=1)[won], last_taken[won])


def test_soft_endings_are_the_expectation_of_hard_ones() -> None:
    """An exact model (no decoy, true kernel): mean imagined return equals the exact value of the policy."""
    world = ChainWorld(decoy=0.05, model_advance=0.8)
    rows, members = expand([Start("chain", s) for s in range(600)], 8)
    imagined = collect(world.imagination().environment(), world.policy(), rows, members, seed=0)
    exact = world.value(world.policy())
    error = float(imagined.returns().std()) / len(imagined) ** 0.5
    assert abs(float(imagined.returns().mean()) - exact) < 4 * error
    torch.testing.assert_close(1 - imagined.returns(), imagined.mask[:, -1] - imagined.rewards[:, -1])


class Faulty:
    """A bandit whose second row reports a reward that is not finite."""

    max_decisions = 1
    width = 4

    def __init__(self, imagined: bool, value: float) -> None:
        self.imagined, self._value = imagined, value

    def reset(self, starts: Sequence[Start]) -> Observation:
        return {"index": torch.zeros(len(starts), dtype=torch.long), "extra": np.full((len(starts), 2), 7.0)}

    def step(self, actions: Tensor) -> Step:
        reward = torch.tensor([1.0, self._value, 0.0, 1.0])
        nothing = torch.zeros(4)
        return Step(self.reset([STARTS[0]] * 4), reward, torch.full((4,), int(Status.FAILURE)), nothing, nothing)


@pytest.mark.parametrize(("imagined", "status"), [(False, Status.INFRASTRUCTURE), (True, Status.CENSORED)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_never_pass(imagined: bool, status: Status, value: float) -> None:
    rollouts = collect(Faulty(imagined, value), SoftmaxPolicy(1, 2), STARTS[:4], [0] * 4, seed=0, record=("extra",))
    assert rollouts.rewards[:, 0].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert rollouts.status.tolist() == [2, int(status), 2, 2]
    assert rollouts.valid().tolist() == [True, False, True, True]
    assert rollouts.inputs["extra"].shape == (4, 1, 2) and rollouts.final["extra"].shape == (4, 2)


def test_a_name_to_record_that_is_not_observed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected observations with \['pixels'\].*got \['extra', 'index'\]"):
        collect(Faulty(False, 0.0), SoftmaxPolicy(1, 2), STARTS[:1], [0], seed=0, record=("pixels",))


class Conditional(Faulty):
    """Reports the survival of the step alone: 0.5, then 0.9."""

    max_decisions = 2

    def reset(self, starts: Sequence[Start]) -> Observation:
        self._alive = 0.5
        return super().reset(starts)

    def step(self, actions: Tensor) -> Step:
        alive = self._alive
        reply = super().step(actions)
        self._alive = 0.9
        return replace(reply, alive=torch.full((4,), alive))


def test_conditional_survival_is_refused() -> None:
    with pytest.raises(ValueError, match="expected Step.alive to be the probability of running after all decisions"):
        collect(Conditional(True, 0.0), SoftmaxPolicy(1, 2), STARTS[:4], [0] * 4, seed=0)


def test_no_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected at least one start"):
        collect(BanditWorld().environment(), SoftmaxPolicy(12, 6), [], [], seed=0)


def test_greedy_is_deterministic_and_takes_the_likeliest() -> None:
    policy = SoftmaxPolicy(12, 6)
    with torch.no_grad():
        policy.logits[:, 4] = 1.0
    starts = BanditWorld().starts(0, 12)
    rollouts = collect(BanditWorld().environment(), policy, starts, [0] * 12, seed=0, greedy=True)
    assert rollouts.actions[:, 0, 0].tolist() == [4.0] * 12
