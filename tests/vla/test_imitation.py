"""What imitation promises: right windows, right loss, it learns, and a resumed run equals the uninterrupted one."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from tests.vla.conftest import make_demonstrations
from vla.imitation import Imitation, ImitationConfig, check_compatible, soft_cross_entropy
from vla.policy import ChunkPolicy, PolicyConfig


def test_action_windows_stop_at_the_end_of_their_episode() -> None:
    data = make_demonstrations((3, 2))
    chunks, present = data.chunks(3)
    assert present.tolist() == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [True, True, False],
        [True, False, False],
    ]
    assert torch.equal(chunks[0], data.actions[:3])
    assert torch.equal(chunks[2], data.actions[[2, 2, 2]])
    assert torch.equal(chunks[4], data.actions[[4, 4, 4]])


def test_soft_cross_entropy_of_uniform_logits_is_log_bins_and_ignores_absent_steps() -> None:
    actions, present = torch.zeros(2, 3, 7), torch.tensor([[True, True, False], [True, False, False]])
    logits = torch.zeros(2, 21, 25)
    assert soft_cross_entropy(logits, actions, present, 0.7).item() == pytest.approx(math.log(25), abs=1e-5)
    logits[0, 14:] = 100 * torch.randn(7, 25, generator=torch.Generator().manual_seed(0))
    assert soft_cross_entropy(logits, actions, present, 0.7).item() == pytest.approx(math.log(25), abs=1e-5)


def test_cloning_learns_an_action_that_only_the_instruction_tells(small_policy: ChunkPolicy) -> None:
    data = make_demonstrations((6, 6))
    data = replace(data, actions=torch.where(data.episode == 0, 0.75, -0.75)[:, None].expand(-1, 7).contiguous())
    data = replace(data, frames={camera: frames[:1].expand(12, -1, -1, -1) for camera, frames in data.frames.items()})
    data = replace(data, proprio=torch.zeros(12, 4))
    config = ImitationConfig(steps=250, batch_size=12, learning_rate=3e-3, shift_pixels=0)
    Imitation(small_policy, data, config, seed=0).run(lambda step, losses: None)
    frames = {f"pixels/{camera}": tensor[:2] for camera, tensor in data.frames.items()}
    inputs = small_policy.encode({**frames, "proprio": data.proprio[:2], "instruction": list(data.instructions)})
    greedy = small_policy.act(inputs, None).actions
    assert (greedy[0] - 0.75).abs().max() < 0.2 and (greedy[1] + 0.75).abs().max() < 0.2


def test_a_resumed_run_equals_the_uninterrupted_one(small_config: PolicyConfig) -> None:
    def build() -> Imitation:
        torch.manual_seed(0)
        return Imitation(ChunkPolicy(small_config), make_demonstrations(), ImitationConfig(steps=6, batch_size=4), seed=1)

    whole = build()
    whole.run(lambda step, losses: None)
    first = build()
    for _ in range(3):
        first.step()
    state = copy.deepcopy(first.state_dict())
    second = build()
    second.load_state_dict(state)
    second.run(lambda step, losses: None)
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, second.policy.state_dict()[name]), name


def test_a_policy_may_use_one_of_the_recorded_cameras(small_config: PolicyConfig) -> None:
    one = replace(small_config, encoder=replace(small_config.encoder, cameras=("agentview",)))
    data, seen = make_demonstrations(), []
    for frames in (data.frames, {"agentview": data.frames["agentview"]}):
        torch.manual_seed(0)
        imitation = Imitation(ChunkPolicy(one), replace(data, frames=frames), ImitationConfig(steps=1, batch_size=4), seed=1)
        seen.append(imitation.step())
    assert seen[0] == seen[1]


def test_data_that_does_not_fit_is_refused_by_name(small_policy: ChunkPolicy) -> None:
    data = make_demonstrations()
    with pytest.raises(ValueError, match=r"action_size: the policy expects 7, the dataset has 6"):
        check_compatible(small_policy, replace(data, actions=data.actions[:, :6]))
    with pytest.raises(ValueError, match=r"image_size: the policy expects 32, the dataset has 48"):
        check_compatible(small_policy, make_demonstrations(side=48))
    with pytest.raises(ValueError, match="NaN"):
        replace(data, proprio=data.proprio * float("nan"))
    with pytest.raises(ValueError, match=r"cameras: the policy expects \['agentview', 'wrist'\], the dataset has \['wrist'\]"):
        check_compatible(small_policy, replace(data, frames={"wrist": data.frames["wrist"]}))
    constant = data.actions.clone()
    constant[:, 4] = -1.0
    assert replace(data, actions=constant).constant_dimensions() == ["action[4]"]
