"""Nothing of one episode leaks into the next, and every row is told its own instruction (pain reports D01 and D04)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vla.worlds import ConstantPolicy, RuleWorld
from vla.encoded import EncodedEnvironment
from vla.language import SentenceEncoder
from wmrl.collect import collect
from wmrl.types import Decision, Observation, Start, Status

STARTS = [Start("stub", seed, "lift") for seed in range(2)]


class ScriptedPlans(ConstantPolicy):
    """Its k-th plan is the eight numbers 10k .. 10k + 7. A plan counts when the world executes it."""

    def __init__(self, world: RuleWorld) -> None:
        super().__init__()
        self.world = world

    def act(self, observation: Observation, noise: Tensor | None) -> Decision:
        plan = 10.0 * len(self.world.executed) + torch.arange(8.0)
        return Decision(plan.expand(len(observation["seed"]), 8), torch.zeros(len(observation["seed"]), 1), {})


class ChunkWorld(RuleWorld):
    """Executes chunks open loop, ends every episode after three control steps, and notes which actions were executed."""

    def __init__(self, width: int) -> None:
        super().__init__(lambda start, action, decision: (0.0, Status.FAILURE), width=width)
        self.controls: list[list[float]] = []

    def step(self, actions: Tensor) -> Any:
        self.controls += actions[:, :3].tolist()
        return super().step(actions)


def test_no_action_of_one_episode_leaks_into_the_next() -> None:
    world = ChunkWorld(width=1)
    rollouts = collect(world, ScriptedPlans(world), STARTS, [0, 0], seed=0)
    assert world.controls == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    assert len(world.executed) == 2 and rollouts.num_decisions() == 2
    assert rollouts.actions[:, 0, 0].tolist() == [0.0, 10.0]


def test_an_episode_that_the_caller_stops_early_leaves_nothing_behind() -> None:
    world = ChunkWorld(width=1)
    policy = ScriptedPlans(world)
    world.step(policy.act(world.reset(STARTS[:1]), None).actions)
    rollouts = collect(world, policy, STARTS[1:], [0], seed=0)
    assert world.controls[1] == [10.0, 11.0, 12.0] and rollouts.actions[0, 0].tolist() == [10.0 + i for i in range(8)]


class WordIndex(ConstantPolicy):
    """Answers the index of the colour that its instruction names, read from the sentence embedding."""

    COLOURS = ("red", "green", "blue")

    def __init__(self) -> None:
        super().__init__()
        self.sentences = SentenceEncoder()
        self.known = self.sentences([f"lift the {colour} cube" for colour in self.COLOURS])

    def encode(self, observation: Observation) -> dict[str, Tensor]:
        return {"language": self.sentences(observation["instruction"])}

    def act(self, observation: Observation, noise: Tensor | None) -> Decision:
        index = (observation["language"] @ self.known.T).argmax(-1, keepdim=True)
        return Decision(index.float(), torch.zeros(len(index), 1), {"seed": observation["seed"]})


def right_colour(start: Start, action: Tensor, decision: int) -> tuple[float, Status]:
    right = start.instruction == f"lift the {WordIndex.COLOURS[int(action[0])]} cube"
    return (1.0, Status.SUCCESS) if right else (0.0, Status.FAILURE)


@pytest.mark.parametrize("texts", [list, tuple, np.array], ids=["list", "tuple", "array"])
@pytest.mark.parametrize("colours", [("red", "green", "blue"), ("blue", "blue", "blue")], ids=["own", "shared"])
def test_every_row_acts_on_its_own_instruction(colours: tuple[str, ...], texts: Any) -> None:
    policy: Any = WordIndex()
    starts = [Start("stub", seed, f"lift the {colour} cube") for seed, colour in enumerate(colours)]
    world = EncodedEnvironment(RuleWorld(right_colour, width=3, texts=texts), policy)
    rollouts = collect(world, policy, starts, [0, 0, 0], seed=0)
    assert rollouts.actions[:, 0, 0].tolist() == [float(WordIndex.COLOURS.index(colour)) for colour in colours]
    assert rollouts.returns().tolist() == [1.0, 1.0, 1.0]
