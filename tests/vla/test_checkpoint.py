"""What a policy on disk promises: it comes back bit for bit or not at all, and LeRobot recognises it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vla.checkpoint import read_policy, write_policy
from vla.policy import ChunkPolicy


@pytest.fixture
def folder(small_policy: ChunkPolicy, tmp_path: Path) -> Path:
    small_policy.encoder.proprio_mean.fill_(0.25)
    write_policy(tmp_path, small_policy, fps=20, robot="panda")
    return tmp_path


def test_a_policy_comes_back_bit_for_bit(folder: Path, small_policy: ChunkPolicy) -> None:
    again = read_policy(folder)
    assert again.config == small_policy.config and not again.training
    state, restored = small_policy.state_dict(), again.state_dict()
    assert state.keys() == restored.keys() and all(torch.equal(state[name], restored[name]) for name in state)


def test_config_json_has_the_keys_of_lerobot(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["type"] == "wmrl_chunk" and config["n_obs_steps"] == 1
    assert config["chunk_size"] == config["n_action_steps"] == 3
    assert config["input_features"]["observation.images.wrist"] == {"type": "VISUAL", "shape": [3, 32, 32]}
    assert config["input_features"]["observation.state"] == {"type": "STATE", "shape": [4]}
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [7]}}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=r"expected config.json and model.safetensors in .*; name a checkpoint's"):
        read_policy(folder)


def test_a_policy_of_another_type_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "type": "act"}))
    with pytest.raises(ValueError, match="expected a policy of type wmrl_chunk in .*, got 'act'"):
        read_policy(folder)


def test_missing_foreign_and_misshapen_weights_are_refused_by_name(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    kept = {name: tensor for name, tensor in weights.items() if name != "head.layers.0.bias"}
    for changed, name in (
        (kept, "head.layers.0.bias"),
        ({**weights, "critic.weight": torch.zeros(2)}, "critic.weight"),
        ({**weights, "centres": torch.zeros(3)}, "centres"),
    ):
        save_file(changed, path)
        with pytest.raises(ValueError, match=f"the weights in .* do not fit its config.json: {name}; use another checkpoint"):
            read_policy(folder)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_file_cut_short_is_named(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"model.safetensors, the file is cut off or damaged .*; use another checkpoint"):
        read_policy(folder)


@pytest.mark.parametrize("content", ['{"type": "wmrl_chunk", "pol', '{"type": "wmrl_chunk"}'])
def test_a_broken_configuration_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json"):
        read_policy(folder)
