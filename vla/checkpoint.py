"""Policy files inside a checkpoint, by LeRobot's names (config.json, model.safetensors); every weight is accounted for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vla.policy import ChunkPolicy, PolicyConfig
from wmrl.files import read_json, write_json

POLICY_TYPE = "wmrl_chunk"


def write_policy(folder: Path, policy: ChunkPolicy, *, fps: int, robot: str) -> None:
    """Write `pretrained_model` files: the configuration with LeRobot's feature lists, and the weights."""
    config = policy.config
    side, cameras = config.encoder.image_size, config.encoder.cameras
    inputs = {f"observation.images.{camera}": {"type": "VISUAL", "shape": [3, side, side]} for camera in cameras}
    inputs["observation.state"] = {"type": "STATE", "shape": [config.encoder.proprio_size]}
    write_json(
        folder / "config.json",
        {
            "type": POLICY_TYPE,
            "n_obs_steps": 1,
            "chunk_size": config.chunk,
            "n_action_steps": config.chunk,
            "input_features": inputs,
            "output_features": {"action": {"type": "ACTION", "shape": [config.action_size]}},
            "fps": fps,
            "robot_type": robot,
            "policy": config.to_dict(),
        },
    )
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()}, folder / "model.safetensors"
    )


def read_policy(folder: Path, device: torch.device | str = "cpu") -> ChunkPolicy:
    """The policy in a `pretrained_model` folder, on `device` wherever it was saved; missing or foreign weights are an error,
    never random ones."""
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    if not config_path.is_file() or not weights_path.is_file():
        raise ValueError(f"expected config.json and model.safetensors in {folder}; name a checkpoint's pretrained_model folder")
    values = read_json(config_path)
    if values.get("type") != POLICY_TYPE:
        raise ValueError(f"expected a policy of type {POLICY_TYPE} in {folder}, got {values.get('type')!r}")
    try:
        config = PolicyConfig.from_dict(values["policy"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected every setting of a policy and no other in {config_path}, got {error!r}") from error
    policy = ChunkPolicy(config)
    try:
        weights = load_file(weights_path)
    except SafetensorError as error:
        raise ValueError(
            f"expected whole weights in {weights_path}, the file is cut off or damaged ({error}); use another checkpoint"
        ) from error
    expected = policy.state_dict()
    different = sorted(weights.keys() ^ expected.keys()) + [
        k for k in weights.keys() & expected.keys() if weights[k].shape != expected[k].shape
    ]
    if different:
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: {', '.join(different[:5])}; use another checkpoint"
        )
    policy.load_state_dict(weights)
    return policy.eval().to(device)
