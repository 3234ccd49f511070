"""Small robot data for the tests of the policy (random frames, real shapes), and the real world."""

from collections.abc import Iterator

import pytest
import torch

from sim.real import RealEnvironment
from vla.demonstrations import Demonstrations
from vla.encoder import EncoderConfig
from vla.policy import ChunkPolicy, PolicyConfig

INSTRUCTIONS = ("lift the red cube", "lift the green cube")


def make_demonstrations(lengths: tuple[int, ...] = (5, 7), *, side: int = 32, seed: int = 0) -> Demonstrations:
    """Episodes of the given lengths with random content."""
    generator = torch.Generator().manual_seed(seed)
    steps = sum(lengths)
    return Demonstrations(
        frames={
            camera: torch.randint(0, 256, (steps, side, side, 3), dtype=torch.uint8, generator=generator)
            for camera in ("agentview", "wrist")
        },
        proprio=torch.randn(steps, 4, generator=generator),
        actions=torch.rand(steps, 7, generator=generator) * 2 - 1,
        objects=torch.rand(steps, 6, generator=generator) * 0.1,
        episode=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        instructions=tuple(INSTRUCTIONS[i % 2] for i in range(len(lengths))),
        seeds=tuple(range(len(lengths))),
    )


@pytest.fixture
def small_config() -> PolicyConfig:
    """A policy that a test can train in a second."""
    encoder = EncoderConfig(image_size=32, proprio_size=4, token_size=16, layers=1, heads=2)
    return PolicyConfig(encoder=encoder, chunk=3, head_size=32)


@pytest.fixture
def small_policy(small_config: PolicyConfig) -> ChunkPolicy:
    """Seeded weights."""
    torch.manual_seed(0)
    return ChunkPolicy(small_config)


@pytest.fixture(scope="session")
def real() -> Iterator[RealEnvironment]:
    """The real world, four rows in two workers."""
    with RealEnvironment("lift_cube", width=4, num_workers=2) as environment:
        yield environment


@pytest.fixture(scope="session")
def camera_policy(real: RealEnvironment) -> ChunkPolicy:
    """Seeded weights in the shapes of the real world."""
    encoder = EncoderConfig(proprio_size=real.proprio_size, object_size=real.object_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ChunkPolicy(PolicyConfig(encoder=encoder)).eval()
