"""Frames keep one orientation from the simulator to the dataset and the videos (pain report D07)."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sim.experts import Demonstration, collect_demonstrations
from sim.real import RealEnvironment
from tasks.starts import make_starts
from vla.collect import join
from vla.lerobot_dataset import read_dataset, write_dataset
from wmrl.types import Start


def centre(frame: Tensor, channel: int) -> Tensor:
    """(2,) mean row and column of the pixels (S, S, 3) in which one colour channel clearly leads."""
    leading_first = frame.int().roll(-channel, dims=-1)
    pixels = torch.nonzero(leading_first[..., 0] - leading_first[..., 1:].amax(-1) > 35)
    assert len(pixels) >= 4, "the cube is not in the picture"
    return pixels.float().mean(0)


def apart(objects: Tensor) -> Tensor:
    """(2,) metres from the green to the red cube: towards the camera (x), to its right (y)."""
    return objects[:2] - objects[5:7]


@pytest.fixture(scope="module")
def start(real: RealEnvironment) -> Start:
    """A start whose cubes lie well apart in both directions."""
    starts = make_starts("lift_cube", "train", 16, offset=400)
    for begin in range(0, len(starts), real.width):
        observation = real.reset(starts[begin : begin + real.width])
        for row, objects in enumerate(observation["objects"]):
            if (apart(objects).abs() > 0.05).all():
                return starts[begin + row]
    raise AssertionError("no such start")


@pytest.fixture(scope="module")
def demonstration(real: RealEnvironment, start: Start) -> Demonstration:
    return collect_demonstrations(real, [start], action_noise=0.0, seed=0)[0]


def test_the_camera_looks_at_the_robot_the_right_way_up(real: RealEnvironment, start: Start) -> None:
    """The robot's base lies at negative x: upright, the cube nearer to it is higher in the picture, larger y further right."""
    observation = real.reset([start])
    frame, metres = observation["pixels/agentview"][0], apart(observation["objects"][0])
    pixels = centre(frame, 0) - centre(frame, 1)
    assert torch.equal(pixels.sign(), metres.sign())
    assert frame[:16].min() < 40 and frame[-16:].min() > 200, "the dark hand comes in from the top, the white table is below"


def test_stored_and_live_frames_of_the_same_state_are_equal(
    real: RealEnvironment, start: Start, demonstration: Demonstration, tmp_path: Path
) -> None:
    data = join([demonstration])
    write_dataset(tmp_path / "dataset", data, fps=20, robot="panda", names={}, facts={})
    stored, live = read_dataset(tmp_path / "dataset"), real.reset([start])
    for camera, frames in stored.frames.items():
        assert torch.equal(frames[0], live[f"pixels/{camera}"][0]), camera
        assert torch.equal(frames, data.frames[camera]), camera
    assert torch.equal(stored.objects[0], live["objects"][0])


@pytest.mark.parametrize("full", [False, True])
def test_video_frames_have_the_orientation_of_the_policys_frames(real: RealEnvironment, start: Start, full: bool) -> None:
    real.record_frames([0], size=128, full=full)
    live = real.reset([start])["pixels/agentview"][0]
    real.step(torch.zeros(1, 8, 7))
    video = torch.from_numpy(real.frames()[0])
    real.record_frames([])
    assert video.shape[1:] == (128, 128, 3) and len(video) == 9
    for channel in (0, 1):
        assert (centre(video[0], channel) / 2 - centre(live, channel)).abs().max() < 1.5
