"""What the learned step promises: its lines are exact where the truth is linear, and each part reads only what it may.

Shape legend: E members, B rows, F features, L low state, S = F + L, H control steps, A action dimensions, C = H x A.
"""

import pytest
import torch
from torch import Tensor

from world_model.network import LIMIT, ChunkEnsemble, change_loss

FEATURES, LOW, CHUNK, ACTIONS, MEMBERS = 3, 2, 4, 2, 2


def network() -> ChunkEnsemble:
    """Members that add nothing yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ChunkEnsemble(FEATURES, LOW, (CHUNK, ACTIONS), members=MEMBERS, width=8)


def trained() -> ChunkEnsemble:
    """Lines and members with random weights: every part says something."""
    made = network()
    generator = torch.Generator().manual_seed(1)
    for tensor in (*made.parameters(), made.low_line, made.feature_line):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return made


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """States (B, S) and chunks (B, C)."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, FEATURES + LOW, generator=generator),
        torch.rand(rows, CHUNK * ACTIONS, generator=generator) * 2 - 1,
    )


def truth(state: Tensor, chunk: Tensor) -> Tensor:
    """A linear step: low state from itself and the chunk's mean and drift from first to last control step, features also from
    features."""
    low, features = state[:, FEATURES:], state[:, :FEATURES]
    steps = chunk.unflatten(1, (CHUNK, ACTIONS))
    mean, drift = steps.mean(1), (steps * torch.linspace(-1.0, 1.0, CHUNK)[:, None]).sum(1)
    moved = torch.stack([low[:, 0] + 0.5 * mean[:, 0] + 0.1, 0.7 * low[:, 1] - 0.3 * low[:, 0] + 0.2 * drift[:, 1]], dim=1)
    seen = torch.stack([features[:, 1], 0.9 * features[:, 0] + low[:, 1], features[:, 2] - mean[:, 1]], dim=1)
    return torch.cat([seen, moved], dim=1)


def test_the_lines_recover_a_known_linear_step_on_unseen_states() -> None:
    made, (state, chunk) = network(), drawn(200, seed=0)
    regressors, features, _ = made.inputs(state, chunk)
    made.solve(regressors, features, truth(state, chunk) - state, low_ridge=1e-6, feature_ridge=1e-6)
    state, chunk = drawn(50, seed=1)
    following, _ = made.imagine(state, chunk)
    torch.testing.assert_close(following, truth(state, chunk), rtol=0.0, atol=1e-4)
    by_member, _ = made(state.expand(MEMBERS, -1, -1), chunk.expand(MEMBERS, -1, -1))
    torch.testing.assert_close(by_member, following.expand(MEMBERS, -1, -1), rtol=0.0, atol=1e-6)


def test_the_ridge_shrinks_by_its_weight() -> None:
    """Four rows whose regressors are orthogonal and of square 4: a slope of 1 becomes 4 / (4 + weight)."""
    made = ChunkEnsemble(1, 1, (1, 1), members=2, width=4)
    low, features = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    regressors = torch.stack([low, torch.zeros(4), torch.zeros(4)], dim=1)
    change = torch.stack([features, low], dim=1)
    made.solve(regressors, features[:, None], change, low_ridge=4.0, feature_ridge=12.0)
    assert made.low_line[:, 0].tolist() == pytest.approx([0.0, 0.5, 0.0, 0.0])
    assert made.feature_line[:, 0].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.25])


def test_without_rows_the_lines_say_that_nothing_moves() -> None:
    made = trained()
    made.solve(torch.zeros(0, LOW + 2 * ACTIONS), torch.zeros(0, FEATURES), torch.zeros(0, 5), low_ridge=1.0, feature_ridge=1.0)
    assert made.low_line.abs().sum() == made.feature_line.abs().sum() == 0.0


def test_features_reach_neither_the_outcome_nor_the_low_state() -> None:
    made, (state, chunk) = trained(), drawn(20, seed=2)
    other = state.clone()
    other[:, :FEATURES] = drawn(20, seed=3)[0][:, :FEATURES]
    (following, hazard), (changed, same) = made.imagine(state, chunk), made.imagine(other, chunk)
    assert torch.equal(hazard, same)
    assert torch.equal(following[:, FEATURES:], changed[:, FEATURES:])
    assert not torch.allclose(following[:, :FEATURES] - state[:, :FEATURES], changed[:, :FEATURES] - other[:, :FEATURES])
    other = state.clone()
    other[:, FEATURES:] += 1.0
    assert (made.imagine(other, chunk)[1] - hazard).abs().min() > 0.0


def test_the_outcome_reads_the_timing_of_a_chunk_and_the_state_only_mean_and_slope() -> None:
    """+1, -1, -1, +1 in one dimension has neither mean nor slope."""
    made, (state, chunk) = trained(), drawn(5, seed=4)
    nudged = chunk.unflatten(1, (CHUNK, ACTIONS)).clone()
    nudged[:, :, 0] += torch.tensor([0.5, -0.5, -0.5, 0.5])
    (following, hazard), (same, other) = made.imagine(state, chunk), made.imagine(state, nudged.flatten(1))
    torch.testing.assert_close(following, same)
    assert (hazard - other).abs().min() > 1e-4


def test_far_from_the_data_the_change_stays_that_of_the_limit() -> None:
    made, (_, chunk) = trained(), drawn(4, seed=5)
    made.state_mean.fill_(2.0)
    made.state_scale.fill_(0.5)
    limit = torch.full((4, FEATURES + LOW), 2.0 + LIMIT * 0.5)
    at_limit, hazard = made.imagine(limit, chunk)
    far, same = made.imagine(limit + 1000.0, chunk)
    torch.testing.assert_close(far - 1000.0, at_limit, rtol=0.0, atol=1e-3)
    assert torch.equal(hazard, same)


def test_the_loss_of_a_change_counts_features_less() -> None:
    """Smooth L1 of 2 is 1.5, of 1 is 0.5."""
    loss = change_loss(torch.zeros(1, 3), torch.tensor([[2.0, 1.0, 2.0]]), feature_size=1, feature_weight=0.2)
    assert loss.tolist() == pytest.approx([(0.2 * 1.5 + 0.5 + 1.5) / 3])
