"""What the decoder promises: frames of the right shape that it can learn, upright."""

import torch

from world_model.decoder import DecoderConfig, FrameDecoder, fit_decoder


def test_it_learns_where_the_red_half_is() -> None:
    torch.manual_seed(0)
    frames = torch.zeros(16, 32, 32, 3, dtype=torch.uint8)
    frames[:, :16, :, 0] = 255
    frames[8:] = frames[8:].flip(1)
    state = torch.cat([torch.ones(8, 3), -torch.ones(8, 3)])
    decoder = FrameDecoder(3, ("agentview",), 32)
    error = fit_decoder(decoder, state, {"agentview": frames}, DecoderConfig(steps=80, batch_size=8), seed=0)
    assert error < 0.05
    decoded = decoder.frames(state[[0, 8]])["agentview"]
    assert decoded.shape == (2, 32, 32, 3) and decoded.dtype == torch.uint8
    assert decoded[0, 4, 16, 0] > 200 and decoded[0, 28, 16, 0] < 50
    assert decoded[1, 4, 16, 0] < 50 and decoded[1, 28, 16, 0] > 200
