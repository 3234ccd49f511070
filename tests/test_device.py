"""What a device may and may not change: nothing is left behind on the wrong one, results agree with the CPU's, and what leaves
the networks is on the CPU. Everything runs on a stand-in (see tests/second_device.py) and, where there is one, on CUDA.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.second_device import NAME, SecondDevice
from tests.vla.conftest import INSTRUCTIONS, make_demonstrations
from tests.wmrl.test_critic import CONFIG as CRITIC
from tests.wmrl.test_critic import lottery
from tests.world_model import conftest as toy
from vla.checkpoint import read_policy, write_policy
from vla.encoder import EncoderConfig
from vla.imitation import Imitation, ImitationConfig
from vla.policy import ChunkPolicy, PolicyConfig
from wmrl.collect import collect, expand
from wmrl.correction import Weighted
from wmrl.critic import CrossFittedCritic
from wmrl.device import autocast, find_device
from wmrl.objective import Objective, ObjectiveConfig
from wmrl.state_files import load_state, save_state
from wmrl.types import Observation, Rollouts, Start
from world_model.decoder import DecoderConfig, FrameDecoder, fit_decoder
from world_model.latent import LatentConfig, LatentWorldModel

CPU = torch.device("cpu")
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
TOLERANCE = {"meta": 1e-4, "cuda": 2e-3}
"""The stand-in computes with the CPU's kernels, only attention takes another path."""

# torch knows a `meta` that holds nothing, and warns when something is loaded into it
pytestmark = pytest.mark.filterwarnings("ignore:for .*. copying from a non-meta parameter")

PLAYED = tuple(Start("toy", seed, INSTRUCTIONS[seed % 2]) for seed in range(4))


@pytest.fixture(scope="module")
def original() -> ChunkPolicy:
    """A small policy with seeded weights."""
    encoder = EncoderConfig(image_size=32, proprio_size=4, token_size=16, layers=1, heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = ChunkPolicy(PolicyConfig(encoder=encoder, chunk=3, head_size=32))
    return with_sentences(policy).eval()


def with_sentences(policy: ChunkPolicy) -> ChunkPolicy:
    """Fixed vectors instead of the language model, which never leaves the CPU."""

    def sentences(instructions: Sequence[str]) -> Tensor:
        return torch.eye(policy.config.encoder.language_size)[[INSTRUCTIONS.index(text) for text in instructions]]

    policy.sentences = sentences  # type: ignore[assignment]
    return policy


@pytest.fixture(params=["meta", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes the stand-in reachable, where it is the device; keeps CUDA from rounding convolutions to 11 bits."""
    return SecondDevice() if device == NAME else torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def both(work: Callable[[torch.device], Any], device: torch.device) -> None:
    """`work` on the CPU and on the device gives, in CPU tensors and numbers, the same."""

    def check(value: Any) -> None:
        if isinstance(value, Tensor):
            assert type(value) is Tensor and value.device == CPU
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                check(item)

    expected = work(CPU)
    with on(device):
        got = work(device)
    check(got)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[device.type], atol=TOLERANCE[device.type])


def lives_on(module: nn.Module, device: torch.device) -> bool:
    """Every parameter and buffer."""
    return all(tensor.device.type == device.type for tensor in [*module.parameters(), *module.buffers()])


def observed(rows: int = 4) -> Observation:
    data = make_demonstrations((rows,))
    frames = {f"pixels/{camera}": tensor for camera, tensor in data.frames.items()}
    return {**frames, "proprio": data.proprio, "instruction": [INSTRUCTIONS[row % 2] for row in range(rows)]}


def decided(policy: ChunkPolicy) -> dict[str, Any]:
    """Everything that leaves a policy. A sampled action is a bin, which the last bit may change: its log-probability tells."""
    inputs = policy.encode(observed())
    greedy = policy.act(inputs, None)
    sampled = policy.act(inputs, torch.rand(4, policy.noise_size, generator=torch.Generator().manual_seed(0)))
    again = policy.log_prob(sampled.inputs, sampled.actions).detach()
    torch.testing.assert_close(again, sampled.log_probs)
    assert sampled.actions.device == CPU
    log_probs = policy.log_prob(inputs, torch.linspace(-1, 1, 4 * policy.noise_size).reshape(4, 3, 7)).detach()
    return {"inputs": inputs, "greedy": greedy.actions, "log_probs": log_probs}


def test_what_leaves_a_policy(device: torch.device, original: ChunkPolicy) -> None:
    both(lambda where: decided(copy.deepcopy(original).to(where)), device)


def test_imitation_and_a_checkpoint_that_loads_anywhere(device: torch.device, original: ChunkPolicy, tmp_path: Path) -> None:
    def work(where: torch.device) -> Any:
        policy = copy.deepcopy(original).to(where)
        config = ImitationConfig(steps=3, batch_size=8, shift_pixels=1)
        imitation, losses = Imitation(policy, make_demonstrations(), config, seed=1), []
        imitation.run(lambda step, numbers: losses.append(numbers))
        assert lives_on(policy, where)
        save_state(tmp_path / where.type, imitation.state_dict())
        write_policy(tmp_path / f"policy-{where.type}", policy, fps=20, robot="panda")
        return losses

    (tmp_path / "policy-cpu").mkdir()
    (tmp_path / f"policy-{device.type}").mkdir()
    both(work, device)
    loaded = with_sentences(read_policy(tmp_path / f"policy-{device.type}"))
    assert lives_on(loaded, CPU)
    with on(device):
        assert lives_on(read_policy(tmp_path / "policy-cpu", device), device)
    resumed = Imitation(loaded, make_demonstrations(), ImitationConfig(steps=4, batch_size=8), seed=1)
    resumed.load_state_dict(load_state(tmp_path / device.type))
    assert resumed.step()["action_loss"] < 5 and lives_on(loaded, CPU)


def toy_model(where: torch.device, **named: Any) -> LatentWorldModel:
    return LatentWorldModel(
        LatentConfig(width=32, passes=3.0, min_steps=1, members=3, batch_size=64),
        sizes=toy.WITH_GOAL,
        chunk=(toy.CHUNK, toy.ACTIONS),
        horizon=toy.HORIZON,
        beginnings=toy.beginnings,
        width=8,
        device=where,
        **named,
    )


def test_world_model(device: torch.device, tmp_path: Path) -> None:
    real = toy.record_rollouts(toy.STARTS[:40])

    def work(where: torch.device) -> Any:
        model = toy_model(where)
        losses = model.fit(real, seed=0)
        save_state(tmp_path / where.type, model.state_dict())
        model.load_state_dict(load_state(tmp_path / "cpu"))
        losses |= {f"again_{name}": value for name, value in model.fit(real, seed=1).items()}
        assert lives_on(model.network, where)
        estimate = model.predict(real)
        world = model.environment()
        steps = [world.reset(toy.STARTS[:8])["features"]]
        for decision in range(toy.HORIZON):
            step = world.step(real.actions[:8, decision])
            steps += [step.observation["features"], step.reward, step.alive, step.status]
        return losses, [estimate.mean, estimate.epistemic, estimate.stochastic], steps

    both(work, device)


def test_critic(device: torch.device) -> None:
    def work(where: torch.device) -> Any:
        critic = CrossFittedCritic(replace(CRITIC, steps=10), num_decisions=3, device=where)
        values = [critic.judge(lottery(seed=seed), seed=seed).values for seed in (1, 2)]
        return values, critic.state_dict()

    both(work, device)


def imagined(policy: ChunkPolicy, where: torch.device) -> Rollouts:
    """Rollouts of a policy in an unfitted world model, in closed loop."""
    first = policy.encode(observed())

    def beginnings(starts: Sequence[Start]) -> Observation:
        return {name: tensor[[start.seed for start in starts]] for name, tensor in first.items()}

    encoder = policy.config.encoder
    model = LatentWorldModel(
        LatentConfig(width=16),
        sizes={"features": encoder.feature_size, "proprio": encoder.proprio_size},
        chunk=(policy.config.chunk, policy.config.action_size),
        horizon=2,
        beginnings=beginnings,
        width=8,
        device=where,
    )
    rows, members = expand(PLAYED, 2)
    return collect(model.environment(), policy, rows, members, seed=0)


def test_policy_update_on_imagined_rollouts(device: torch.device, original: ChunkPolicy) -> None:
    coefficients = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

    def work(where: torch.device) -> Any:
        policy = copy.deepcopy(original).to(where)
        rollouts = imagined(policy, where)
        objective = Objective(ObjectiveConfig(), policy, copy.deepcopy(policy))
        numbers = objective.update([Weighted(rollouts, coefficients)], seed=0)
        objective.load_state_dict(objective.state_dict())
        objective.update([Weighted(imagined(policy, where), coefficients)], seed=1, extra=True)
        assert numbers["kl"] > 0 and lives_on(policy, where)
        return rollouts.rewards, rollouts.mask, numbers["gradient_norm"]

    both(work, device)


def test_decoder(device: torch.device) -> None:
    frames = {"agentview": torch.arange(4 * 32 * 32 * 3).reshape(4, 32, 32, 3).to(torch.uint8)}
    state = torch.eye(4)

    def work(where: torch.device) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            decoder = FrameDecoder(4, ("agentview",), 32)
        error = fit_decoder(decoder.to(where), state, frames, DecoderConfig(steps=3, batch_size=4), seed=0)
        return error, decoder.frames(state)["agentview"].float() / 255

    both(work, device)


def test_the_stand_in_finds_what_was_left_behind() -> None:
    with SecondDevice():
        there, here = torch.arange(3.0).to(NAME), torch.arange(3.0)
        assert torch.equal((there * 2 + torch.tensor(1.0)).cpu(), here * 2 + 1) and there[torch.tensor([1])].item() == 1
        for wrong in (
            lambda: there + here,
            lambda: torch.cat([here, there]),
            lambda: here[there.long()],
            lambda: here.add_(there),
        ):
            with pytest.raises(RuntimeError, match="tensors on two devices"):
                wrong()
        with pytest.raises(RuntimeError, match="draws random numbers on the device"):
            torch.randn(3, device=NAME)


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    machine(0)
    assert find_device("cpu") == find_device("auto") == CPU
    with pytest.raises(ValueError, match="expected a CUDA device for device=cuda, got 0 that PyTorch can use; set device=cpu"):
        find_device("cuda")
    machine(2)
    assert find_device("auto") == find_device("cuda") == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="for device=cuda:2, got 2 that"):
        find_device("cuda:2")
    for name in ("gpu", "cuda:", "cuda:-1", "", "meta"):
        with pytest.raises(ValueError, match="expected device cpu, cuda, cuda:N or auto, got"):
            find_device(name)


def test_bfloat16_rounds_the_layers_and_nothing_else(original: ChunkPolicy) -> None:
    losses: dict[str, dict[str, float]] = {}
    for precision in ("off", "bfloat16"):
        policy = copy.deepcopy(original)
        imitation = Imitation(
            policy, make_demonstrations(), ImitationConfig(steps=1, batch_size=8), seed=1, precision=precision
        )
        losses[precision] = imitation.step()
        assert {tensor.dtype for tensor in policy.parameters()} == {torch.float32}
        assert {tensor.dtype for tensor in decided(policy)["inputs"].values()} == {torch.float32}
    assert losses["bfloat16"] != losses["off"]
    assert losses["bfloat16"] == pytest.approx(losses["off"], rel=2e-2)


def test_positions_in_the_picture_are_not_rounded(original: ChunkPolicy) -> None:
    image = copy.deepcopy(original.encoder.images["agentview"])
    seen: list[Tensor] = []
    image.tokens.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))  # type: ignore[union-attr]
    with autocast(CPU, "bfloat16"), torch.no_grad():
        image(observed()["pixels/agentview"], torch.zeros(4, 384))
    positions = seen[0].unflatten(-1, (-1, 3))[..., :2]
    assert positions.dtype == torch.float32 and (positions != positions.bfloat16()).float().mean() > 0.9


def test_a_world_model_in_bfloat16_predicts_nearly_the_same() -> None:
    real = toy.record_rollouts(toy.STARTS[:40])
    exact, rounded = toy_model(CPU), toy_model(CPU, precision="bfloat16")
    first, second = exact.fit(real, seed=0), rounded.fit(real, seed=0)
    assert second == pytest.approx(first, rel=2e-2) and second != first
    difference = (exact.predict(real).mean - rounded.predict(real).mean).abs().max().item()
    assert 0 < difference < 0.02
    following, logit = rounded.network(torch.zeros(3, 2, 7), torch.zeros(3, 2, 6))
    assert following.dtype == logit.dtype == torch.float32
