"""Toy worlds whose optimum, bias and noise are known: a one-decision bandit (`Replay` pairs) and a sequential chain (`Twin`
pairs).

All luck rides in the action: an action is (choice, luck, luck), the lucks uniform in (0, 1) and without influence on the
policy. So a re-executed decision repeats its outcome, twins share their luck, and the worlds themselves keep no random state.

Shape legend: B rows, K tasks, A choices, S states, T decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from wmrl.buffer import Buffer
from wmrl.keyframes import decisions_before, observations, place_of
from wmrl.types import Decision, Environment, Estimate, Observation, Rollouts, Start, Status, Step


def rollouts_of(returns: Tensor, *, imagined: bool = False, variance: Tensor | None = None) -> Rollouts:
    """One-decision rollouts with these returns, one group per row (K, G); a nan is a rollout without an outcome."""
    groups, members = returns.shape
    flat = returns.reshape(-1, 1).float()
    finite = torch.isfinite(flat)
    missing = int(Status.CENSORED if imagined else Status.INFRASTRUCTURE)
    return Rollouts(
        starts=tuple(Start("table", group) for group in range(groups) for _ in range(members)),
        member=torch.arange(members).repeat(groups),
        actions=torch.arange(groups * members).reshape(-1, 1, 1).float(),
        inputs={"index": torch.zeros(groups * members, 1, dtype=torch.long)},
        final={"index": torch.zeros(groups * members, dtype=torch.long)},
        log_probs=torch.zeros(groups * members, 1, 1),
        token_mask=torch.ones(groups * members, 1, 1, dtype=torch.bool),
        rewards=torch.where(finite, flat, 0.0),
        mask=torch.ones(groups * members, 1),
        status=torch.where(finite[:, 0], int(Status.FAILURE), missing),
        seconds=torch.zeros(groups * members),
        imagined=imagined,
        variance=None if variance is None else variance.reshape(-1),
    )


class SoftmaxPolicy(nn.Module):
    """A table of logits, one row per observation index; observations are {"index": (B,)}, actions (B, 3) = (choice, luck,
    luck)."""

    noise_size = 3

    def __init__(self, num_indices: int, num_choices: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_indices, num_choices))

    def act(self, observation: Observation, noise: Tensor | None) -> Decision:
        index = observation["index"]
        probabilities = self.logits[index].softmax(-1)
        if noise is None:
            choice, luck = probabilities.argmax(-1), torch.full((len(index), 2), 0.5)
        else:
            below = probabilities.cumsum(-1) < noise[:, :1]
            choice, luck = below.sum(-1).clamp(max=probabilities.shape[1] - 1), noise[:, 1:]
        actions = torch.cat([choice[:, None].float(), luck], dim=1)
        inputs = {"index": index}
        return Decision(actions, self.log_prob(inputs, actions).detach(), inputs)

    def log_prob(self, inputs: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        table = self.logits[inputs["index"]].log_softmax(-1)
        return table.gather(-1, actions[..., :1].long())


class ToyWorld(Protocol):
    """What the tests and benchmarks need of a toy."""

    def environment(self) -> Environment: ...

    def imagination(self) -> ToyModel: ...

    def policy(self) -> SoftmaxPolicy: ...

    def starts(self, step: int, count: int) -> list[Start]: ...

    def features(self, rollouts: Rollouts) -> Tensor: ...

    def expected_return(self, logits: Tensor) -> Tensor:
        """Exact expected real return of a softmax policy, averaged over starts; differentiable."""

    def value(self, policy: SoftmaxPolicy) -> float: ...


class ToyModel:
    """A world model that has learned what it will ever learn: `fit` only raises the version."""

    def __init__(self, world: Environment) -> None:
        self._world = world
        self.version = 0

    def environment(self) -> Environment:
        return self._world

    def predict(self, rollouts: Rollouts) -> Estimate:
        """Expected return (B,) of the recorded decisions, played in the model."""
        from wmrl.pairing import replay

        mean = replay(self._world, rollouts).returns()
        return Estimate(mean, torch.zeros_like(mean), torch.zeros_like(mean))

    def fit(self, rollouts: Rollouts, *, seed: int) -> dict[str, float]:
        self.version += 1
        return {"rollouts": float(len(rollouts))}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


@dataclass(frozen=True)
class BanditWorld:
    """K tasks with A arms each. Real reward: table + noise. Predicted reward: table + bias + model noise.

    Every third arm is over-scored by `overscore` in all tasks, which `features` (one-hot arm) can express; each (task, arm)
    carries a further bias with standard deviation `odd_bias`, which it cannot.
    """

    num_tasks: int = 12
    num_arms: int = 6
    real_noise: float = 0.05
    model_noise: float = 0.1
    overscore: float = 0.6
    odd_bias: float = 0.1
    useless: bool = False
    width: int = 256
    seed: int = 0
    rewards: Tensor = field(init=False)
    predicted: Tensor = field(init=False)

    num_features = property(lambda self: self.num_arms)

    def __post_init__(self) -> None:
        generator = np.random.default_rng(self.seed)
        shape = (self.num_tasks, self.num_arms)
        rewards = generator.random(shape)
        bias = self.odd_bias * generator.standard_normal(shape)
        bias[:, ::3] += self.overscore
        predicted = generator.random(shape) if self.useless else rewards + bias
        object.__setattr__(self, "rewards", torch.tensor(rewards, dtype=torch.float32))
        object.__setattr__(self, "predicted", torch.tensor(predicted, dtype=torch.float32))

    @property
    def optimum(self) -> float:
        return float(self.rewards.max(dim=1).values.mean())

    def environment(self) -> BanditEnvironment:
        return BanditEnvironment(self.rewards, self.real_noise, luck=1, imagined=False, width=self.width)

    def imagination(self) -> ToyModel:
        return ToyModel(BanditEnvironment(self.predicted, self.model_noise, luck=2, imagined=True, width=self.width))

    def policy(self) -> SoftmaxPolicy:
        return SoftmaxPolicy(self.num_tasks, self.num_arms)

    def starts(self, step: int, count: int) -> list[Start]:
        return [Start(task=f"bandit-{(step + i) % self.num_tasks}", seed=step * 100_003 + i) for i in range(count)]

    def features(self, rollouts: Rollouts) -> Tensor:
        """(B, A) one-hot of the chosen arm."""
        return nn.functional.one_hot(rollouts.actions[:, 0, 0].long(), self.num_arms).double()

    def expected_return(self, logits: Tensor) -> Tensor:
        return (logits.softmax(-1) * self.rewards).sum(-1).mean()

    def value(self, policy: SoftmaxPolicy) -> float:
        return float(self.expected_return(policy.logits.detach()))


class BanditEnvironment:
    """One decision, reward from a table (K, A) plus normal noise read off the action's luck; a reward of at least 0.5 is a
    success."""

    max_decisions = 1

    def __init__(self, table: Tensor, noise: float, *, luck: int, imagined: bool, width: int) -> None:
        self.width, self.imagined = width, imagined
        self._table, self._noise, self._luck = table, noise, luck
        self._tasks = torch.zeros(0, dtype=torch.long)

    def reset(self, starts: Sequence[Start]) -> Observation:
        self._tasks = torch.tensor([int(s.task.rsplit("-", 1)[1]) for s in starts])
        return {"index": self._tasks}

    def step(self, actions: Tensor) -> Step:
        luck = torch.special.ndtri(actions[:, self._luck].double()).float()
        reward = self._table[self._tasks, actions[:, 0].long()] + self._noise * luck
        status = torch.where(reward >= 0.5, int(Status.SUCCESS), int(Status.FAILURE))
        return Step({"index": self._tasks}, reward, status, torch.zeros(len(reward)), torch.zeros(len(reward)))


ADVANCE, ATTEMPT, DECOY = range(3)


@dataclass(frozen=True)
class ChainWorld:
    """A corridor of S states, T decisions. ADVANCE moves on, ATTEMPT succeeds near the end, DECOY only seems to succeed.

    The model believes in the decoy (`decoy` success probability per decision instead of 0.05) and moves with another
    probability than the real kernel; `useless` gives it random success probabilities instead. Success ends a rollout. The
    optimum is exact, by backward induction.
    """

    num_states: int = 3
    num_decisions: int = 4
    decoy: float = 0.6
    model_advance: float = 0.7
    useless: bool = False
    width: int = 256
    seed: int = 0

    num_features = 3

    @property
    def success(self) -> Tensor:
        """(S, A) real success probability of one decision."""
        table = torch.zeros(self.num_states, 3)
        table[-1, ATTEMPT], table[-2, ATTEMPT] = 0.7, 0.1
        table[:, DECOY] = 0.05
        return table

    @property
    def imagined_success(self) -> Tensor:
        """(S, A) what the model believes."""
        if self.useless:
            return torch.rand(self.num_states, 3, generator=torch.Generator().manual_seed(self.seed)) * 0.5
        table = self.success.clone()
        table[:, DECOY] = self.decoy
        return table

    def environment(self) -> ChainEnvironment:
        return ChainEnvironment(self.success, 0.8, self.num_decisions, imagined=False, width=self.width)

    def imagination(self, buffer: Buffer | None = None) -> ToyModel:
        """The model; with a buffer it may be entered at keyframes too."""
        chances, advance = self.imagined_success, self.model_advance
        return ToyModel(ChainEnvironment(chances, advance, self.num_decisions, imagined=True, width=self.width, buffer=buffer))

    def policy(self) -> SoftmaxPolicy:
        return SoftmaxPolicy(self.num_decisions * self.num_states, 3)

    def starts(self, step: int, count: int) -> list[Start]:
        return [Start(task="chain", seed=step * 100_003 + i) for i in range(count)]

    def features(self, rollouts: Rollouts) -> Tensor:
        """(B, A) how often each action was taken while the rollout was running."""
        chosen = nn.functional.one_hot(rollouts.actions[..., 0].long(), 3).double()
        return (chosen * rollouts.mask.double()[..., None]).sum(dim=1)

    @property
    def optimum(self) -> float:
        best = torch.zeros(self.num_states)
        for _ in range(self.num_decisions):
            best = self._backup(best).max(dim=1).values
        return float(best[:-1].mean())

    def expected_return(self, logits: Tensor) -> Tensor:
        table = logits.softmax(-1).reshape(self.num_decisions, self.num_states, 3)
        value = torch.zeros(self.num_states)
        for t in reversed(range(self.num_decisions)):
            value = (table[t] * self._backup(value)).sum(dim=1)
        return value[:-1].mean()

    def value(self, policy: SoftmaxPolicy) -> float:
        return float(self.expected_return(policy.logits.detach()))

    def _backup(self, value: Tensor) -> Tensor:
        """(S, A) success now, or the value (S,) of where one gets."""
        onward = torch.cat([value[1:], value[-1:]])
        moved = 0.8 * onward + 0.2 * value
        following = torch.stack([moved, value, value], dim=1)
        return self.success + (1 - self.success) * following


class ChainEnvironment:
    """The corridor, real (a rollout ends when its luck says so) or imagined (it goes on, with the survival probability
    kept)."""

    def __init__(
        self,
        success: Tensor,
        advance: float,
        max_decisions: int,
        *,
        imagined: bool,
        width: int,
        buffer: Buffer | None = None,
    ) -> None:
        self.width, self.imagined, self.max_decisions = width, imagined, max_decisions
        self._success, self._advance, self._buffer = success, advance, buffer
        self._time = torch.zeros(0, dtype=torch.long)
        self._state = torch.zeros(0, dtype=torch.long)
        self._alive = torch.zeros(0)
        self._status = torch.zeros(0, dtype=torch.long)

    def reset(self, starts: Sequence[Start]) -> Observation:
        self._time = decisions_before(starts)
        self._state = torch.tensor([s.seed % (len(self._success) - 1) for s in starts])
        if self._buffer is not None and any(place_of(start) is not None for start in starts):
            self._state = observations(self._buffer.all(), starts, ["index"])["index"] % len(self._success)
        self._alive = torch.ones(len(starts))
        self._status = torch.full((len(starts),), int(Status.RUNNING))
        return self._observation()

    def _observation(self) -> Observation:
        return {"index": self._time.clamp(max=self.max_decisions - 1) * len(self._success) + self._state}

    def step(self, actions: Tensor) -> Step:
        choice, before = actions[:, 0].long(), self._alive
        hazard = self._success[self._state, choice]
        if not self.imagined:
            hazard = (actions[:, 2] < hazard).float()
        reward = before * hazard
        moves = (choice == ADVANCE) & (actions[:, 1] < self._advance)
        self._state = torch.where(moves, (self._state + 1).clamp(max=len(self._success) - 1), self._state)
        self._time = self._time + 1
        self._alive = before * (1 - hazard) * (self._time < self.max_decisions)
        over = (self._time >= self.max_decisions) & (self._status == Status.RUNNING)
        self._status = torch.where(over, int(Status.TIME_LIMIT), self._status)
        if not self.imagined:
            self._status = torch.where(reward > 0, int(Status.SUCCESS), self._status)
        return Step(self._observation(), reward, self._status.clone(), torch.zeros(len(choice)), self._alive)
