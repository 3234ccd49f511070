"""What the policy promises: exact log-probabilities, one instruction per row, finite numbers, greedy and sampled decoding."""

from dataclasses import replace

import pytest
import torch

from tests.vla.conftest import INSTRUCTIONS, make_demonstrations
from vla.encoder import EncoderConfig, shift_frames
from vla.language import SentenceEncoder
from vla.policy import ChunkPolicy, PolicyConfig


def encoded(policy: ChunkPolicy, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "features": torch.randn(rows, policy.config.encoder.feature_size, generator=generator),
        "proprio": torch.randn(rows, 4, generator=generator),
        "language": torch.randn(rows, 384, generator=generator),
    }


def test_recomputed_log_probabilities_equal_those_of_the_decision(small_policy: ChunkPolicy) -> None:
    inputs = encoded(small_policy, 6)
    decision = small_policy.act(inputs, torch.rand(6, small_policy.noise_size, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(small_policy.log_prob(decision.inputs, decision.actions), decision.log_probs)
    over_time = {name: tensor.unflatten(0, (2, 3)) for name, tensor in inputs.items()}
    again = small_policy.log_prob(over_time, decision.actions.unflatten(0, (2, 3)))
    assert torch.allclose(again.flatten(0, 1), decision.log_probs, atol=1e-6)


def test_sampled_frequencies_equal_the_probabilities(small_policy: ChunkPolicy) -> None:
    rows = 4000
    inputs = {name: tensor.expand(rows, -1) for name, tensor in encoded(small_policy, 1).items()}
    noise = torch.rand(rows, small_policy.noise_size, generator=torch.Generator().manual_seed(1))
    chosen = small_policy.act(inputs, noise).actions.flatten(1)[:, 0]
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    for centre in (-1.0, 0.0, 1.0):
        actions = torch.full((1, 3, 7), centre)
        probability = small_policy.log_prob(one, actions)[0, 0].exp().item()
        frequency = ((chosen - centre).abs() < 1e-3).float().mean().item()
        assert abs(frequency - probability) < 4 * (probability * (1 - probability) / rows) ** 0.5 + 1e-3


def test_greedy_is_the_mean_of_the_bins_and_uses_no_noise(small_policy: ChunkPolicy) -> None:
    inputs = encoded(small_policy, 2)
    logits = small_policy.head(inputs["features"], inputs["proprio"])
    mean = (logits.softmax(-1) * torch.linspace(-1, 1, 25)).sum(-1)
    assert torch.allclose(small_policy.act(inputs, None).actions.flatten(1), mean, atol=1e-6)


def test_temperature_sharpens_sampling_and_leaves_greedy_alone(small_policy: ChunkPolicy) -> None:
    inputs = encoded(small_policy, 2)
    greedy = small_policy.act(inputs, None).actions
    logits = small_policy.head(inputs["features"], inputs["proprio"])
    for temperature in (0.25, 2.0):
        small_policy.config = replace(small_policy.config, temperature=temperature)
        assert torch.equal(small_policy.act(inputs, None).actions, greedy)
        expected = (logits / temperature).log_softmax(-1)[..., 12]  # the bin at 0
        assert torch.allclose(small_policy.log_prob(inputs, torch.zeros(2, 3, 7)), expected, atol=1e-6)


def test_every_row_reads_its_own_instruction(small_policy: ChunkPolicy) -> None:
    data = make_demonstrations((1, 1, 1))
    frames = {f"pixels/{camera}": frames[:1].expand(3, -1, -1, -1) for camera, frames in data.frames.items()}
    texts = [INSTRUCTIONS[0], INSTRUCTIONS[1], INSTRUCTIONS[0]]
    observation = {**frames, "proprio": data.proprio[:1].expand(3, -1), "instruction": texts}
    features = small_policy.encode(observation)["features"]
    assert torch.equal(features[0], features[2])
    assert (features[0] - features[1]).abs().max() > 1e-4


def test_sentences_are_told_apart_and_do_not_depend_on_their_batch() -> None:
    encoder = SentenceEncoder()
    both = encoder(list(INSTRUCTIONS))
    assert both.shape == (2, 384)
    assert torch.allclose(both.norm(dim=1), torch.ones(2), atol=1e-5)
    assert (both[0] @ both[1]).item() < 0.95
    assert torch.equal(SentenceEncoder()([INSTRUCTIONS[1]])[0], both[1])
    with pytest.raises(ValueError, match="non-empty instruction"):
        encoder(["lift the red cube", ""])


def test_a_constant_proprioception_dimension_stays_finite(small_policy: ChunkPolicy) -> None:
    proprio = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    proprio[:, 2] = 0.0
    small_policy.encoder.set_statistics(make_demonstrations().frames, proprio)
    unseen = torch.tensor([[0.0, 0.0, 0.3, 0.0]])
    assert small_policy.encoder.normalise(unseen)[0, 2].item() == 8.0
    assert torch.isfinite(small_policy.encoder.normalise(proprio)).all()


def test_a_missing_camera_is_named(small_policy: ChunkPolicy) -> None:
    data = make_demonstrations((1,))
    observation = {"pixels/agentview": data.frames["agentview"], "proprio": data.proprio, "instruction": ["lift the red cube"]}
    with pytest.raises(ValueError, match=r"lacks \['wrist'\] and has \['agentview'\]"):
        small_policy.encode(observation)


def test_shifted_frames_are_the_same_picture_moved() -> None:
    frames = torch.arange(8 * 8 * 3, dtype=torch.uint8).reshape(1, 8, 8, 3)
    shifted = shift_frames(frames, 2, torch.Generator().manual_seed(0))
    assert shifted.shape == frames.shape and shifted.dtype == torch.uint8
    windows = torch.nn.functional.pad(frames.permute(0, 3, 1, 2).float(), (2,) * 4, mode="replicate")[0].permute(1, 2, 0)
    matches = [bool((windows[r : r + 8, c : c + 8] == shifted[0]).all()) for r in range(5) for c in range(5)]
    assert sum(matches) >= 1
    assert torch.equal(shift_frames(frames, 0, torch.Generator()), frames)


def test_config_survives_its_dictionary_and_refuses_nonsense(small_config: PolicyConfig) -> None:
    assert PolicyConfig.from_dict(small_config.to_dict()) == small_config
    with pytest.raises(ValueError, match="divisible by 16"):
        EncoderConfig(image_size=50)
    with pytest.raises(ValueError, match="at least 2 bins"):
        PolicyConfig(bins=1)
    with pytest.raises(ValueError, match="language encoder"):
        ChunkPolicy(PolicyConfig(encoder=EncoderConfig(proprio_size=4), language="no/such/folder"))
