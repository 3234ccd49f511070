"""The configuration of a robot run: one frozen dataclass that every robot command reads; YAML only names choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sim.environment import ACTION_NAMES
from tasks.starts import POOLS
from tasks.task import get_task, require_known
from vla.imitation import ImitationConfig
from vla.policy import ENCODED, PolicyConfig
from wmrl.correction import CorrectionConfig
from wmrl.critic import CriticConfig
from wmrl.device import check_device_name, check_precision
from wmrl.objective import ObjectiveConfig
from world_model.decoder import DecoderConfig
from world_model.exam import ExamConfig
from world_model.latent import LatentConfig

STARTS_PER_SEED = 20_000
"""Training starts that one run seed may use; run seeds use disjoint ones."""

PURPOSES = {
    "demonstrations": 0,
    "base rollouts": 2_000,
    "gradient benchmark": 3_000,
    "perturbed demonstrations": 6_000,
    "training": 10_000,
}
"""Where each purpose's starts begin within the training starts of a run seed, so that none is used for two."""

PRIVILEGED = ("goal", "objects", "time")
"""Entries of a real observation that no policy reads."""


@dataclass(frozen=True)
class SimulatorConfig:
    """The real world: `width` rollouts at once in `workers` processes; results depend on the width, never on the workers."""

    width: int = 16
    workers: int = 2
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.width < 1 or self.workers < 1:
            raise ValueError(f"expected at least 1 row and 1 worker, got width={self.width}, workers={self.workers}")
        if self.timeout_seconds <= 0:
            raise ValueError(f"expected simulator.timeout_seconds above 0, got {self.timeout_seconds}")


@dataclass(frozen=True)
class CollectConfig:
    """Scripted demonstrations, goals in turn; an episode in which the expert fails is left out.

    `action_noise` is the deviation of the executed from the commanded action.
    """

    demonstrations: int = 160
    action_noise: float = 0.2

    def __post_init__(self) -> None:
        if self.action_noise < 0:
            raise ValueError(f"expected action_noise >= 0, got {self.action_noise}")


@dataclass(frozen=True)
class WorldModelConfig:
    """What the world model first learns from: groups of rollouts of the base policy and chunk-committed perturbed
    demonstrations."""

    base_groups: int = 16
    perturbed: int = 32
    width: int = 512
    """Rollouts imagined at once."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    exam: ExamConfig = field(default_factory=ExamConfig)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"expected world_model.width >= 1, got {self.width}")
        if self.exam.updates < 1:
            raise ValueError(f"expected world_model.exam.updates >= 1 (else nothing is judged), got {self.exam.updates}")


@dataclass(frozen=True)
class TrainConfig:
    """Reinforcement learning: `steps` steps, each of correction.real_groups groups of correction.group_size real rollouts, in
    every mode.

    Before them the base rollouts, which the base policy itself has just played, give a first real update, in every mode too.
    """

    steps: int = 12
    imagine_from: str = "keyframes"
    """keyframes: states of recorded real rollouts; starts: first states of episodes, where real groups begin too (twins)."""
    training_starts: int = 256
    """Starts that real groups are drawn from; with imagine_from=starts imagined ones too, and each is rendered once."""
    refresh_every: int = 1
    """Steps between fits of the world model."""
    correction: CorrectionConfig = field(default_factory=lambda: CorrectionConfig(imagined_groups=256, max_dose=16, dose=8))
    objective: ObjectiveConfig = field(
        default_factory=lambda: ObjectiveConfig(
            learning_rate=2e-4, imagined_learning_rate=5e-5, imagined_epochs=1, imagined_minibatches=1
        )
    )
    critic: CriticConfig = field(default_factory=CriticConfig)

    def __post_init__(self) -> None:
        for name in self.critic.inputs:
            require_known("critic input", name, (*ENCODED, *PRIVILEGED))
        for name in ("steps", "refresh_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.imagine_from not in ("keyframes", "starts"):
            raise ValueError(f"expected train.imagine_from to be keyframes or starts, got {self.imagine_from!r}")
        if self.imagine_from == "keyframes" and self.correction.mode in ("ppi", "fusion"):
            raise ValueError(
                f"expected train.imagine_from=starts with correction.mode={self.correction.mode}, which needs pairs; "
                "got keyframes"
            )
        dose = {"auto": "max_dose", "model": "dose"}.get(self.correction.mode)
        if self.imagine_from == "keyframes" and self.correction.gate != "shut" and dose and not getattr(self.correction, dose):
            raise ValueError(
                f"expected train.correction.{dose} >= 1 with imagine_from=keyframes, where it is the imagined part of the "
                "update, got 0; to train without imagination set train.correction.gate=shut (mode auto) or mode=real"
            )

    @property
    def starts_per_step(self) -> int:
        """Different starts that a step asks for at most."""
        correction = self.correction
        if self.imagine_from == "keyframes" or correction.mode == "real":
            return correction.real_groups
        return correction.imagined_groups * (1 + max(correction.dose, correction.max_dose))


@dataclass(frozen=True)
class EvaluateConfig:
    """The final exam of the policies on frozen test starts; greedy and sampled decoding, the same starts for every policy.
    `base` false leaves the base policy out (when another run folder has evaluated it on the same starts)."""

    episodes: int = 200
    split: str = "test"
    base: bool = True
    swap_episodes: int = 50
    """Episodes with the wrong instruction, base policy, greedy: success must fall."""
    videos: int = 4

    def __post_init__(self) -> None:
        if self.split not in ("validation", "test"):
            raise ValueError(
                f"expected evaluate.split validation or test, got {self.split!r}: training starts are no evaluation"
            )
        for name, least, split in (("episodes", 1, self.split), ("swap_episodes", 0, self.split), ("videos", 0, "validation")):
            most, got = len(POOLS[split]), getattr(self, name)
            if not least <= got <= most:
                raise ValueError(f"expected evaluate.{name} of {least} to {most} (the {split} starts that exist), got {got}")


@dataclass(frozen=True)
class RunConfig:
    """Everything a robot run depends on. `base` names another run folder whose demonstrations, base policy, base rollouts and
    world model are used instead of making them again: how several arms are compared from one beginning."""

    name: str = "demo"
    runs: Path = Path("runs")
    base: Path | None = None
    seed: int = 0
    threads: int = 2
    device: str = "cpu"
    """Where networks live: cpu, cuda, cuda:N, or auto (cuda where there is one)."""
    autocast: str = "off"
    """off or bfloat16: precision of encoder and head in imitation, and of the world model. Elsewhere float32: log-probabilities
    must be equal at collection and at training."""
    task: str = "lift_cube"
    simulator: SimulatorConfig = field(default_factory=SimulatorConfig)
    collect: CollectConfig = field(default_factory=CollectConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    imitate: ImitationConfig = field(default_factory=ImitationConfig)
    world_model: WorldModelConfig = field(default_factory=WorldModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)

    def __post_init__(self) -> None:
        check_device_name(self.device)
        check_precision(self.autocast)
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(f"expected a run name without slashes, not . or .., got {self.name!r}; the folder is runs/<name>")
        if self.threads < 1:
            raise ValueError(f"expected at least 1 thread, got {self.threads}")
        check_shapes(self)
        check_starts(self)

    @property
    def recorded(self) -> tuple[str, ...]:
        """Observation entries that real rollouts keep beside what the policy asks for: the world model's and the critic's. The
        same in every mode, since arms share base rollouts."""
        wanted = (*self.world_model.latent.privileged, *self.train.critic.inputs)
        return tuple(name for name in dict.fromkeys(wanted) if name not in ENCODED)

    @property
    def folder(self) -> Path:
        """runs/<name>."""
        return self.runs / self.name


def room(purpose: str) -> int:
    """How many training starts of a run seed a purpose has."""
    following = [begin for begin in (*PURPOSES.values(), STARTS_PER_SEED) if begin > PURPOSES[purpose]]
    return min(following) - PURPOSES[purpose]


def check_shapes(config: RunConfig) -> None:
    """Refuse a policy or world model that does not fit the task and its robot."""
    task, policy = get_task(config.task), config.policy
    task.num_decisions(policy.chunk)
    unknown = [camera for camera in policy.encoder.cameras if camera not in task.cameras]
    if unknown:
        raise ValueError(
            f"expected cameras out of {list(task.cameras)} for task {config.task}, got {unknown}; set policy.encoder.cameras"
        )
    if policy.action_size != len(ACTION_NAMES):
        raise ValueError(
            f"expected policy.action_size={len(ACTION_NAMES)}, that of the robot, got {policy.action_size}; leave it out"
        )
    for name in config.world_model.latent.privileged:
        require_known("world_model.latent.privileged entry", name, PRIVILEGED)


def check_starts(config: RunConfig) -> None:
    """Refuse numbers of starts that a stage would find too few, or more than the run seed has for it. Goals take turns."""
    seeds = len(POOLS["train"]) // STARTS_PER_SEED
    if not 0 <= config.seed < seeds:
        raise ValueError(f"expected seed of 0 to {seeds - 1} (each has its own {STARTS_PER_SEED} starts), got {config.seed}")
    goals, folds, per_step = len(get_task(config.task).goals), config.world_model.exam.folds, config.train.starts_per_step
    rounds = -(-per_step // goals)
    asked = (
        ("demonstrations", "collect.demonstrations", goals, "one for each goal"),
        ("base rollouts", "world_model.base_groups", goals * folds, f"one for each goal in each of {folds} exam folds"),
        ("perturbed demonstrations", "world_model.perturbed", 1, "the model must see failures near success"),
        ("training", "train.training_starts", goals * rounds, f"a step asks for {per_step}, {goals} goals in turn"),
    )
    for purpose, key, least, reason in asked:
        group, name = key.split(".")
        got = getattr(getattr(config, group), name)
        if got < least:
            raise ValueError(f"expected {key} >= {least} ({reason}), got {got}")
        if got > room(purpose):
            raise ValueError(f"expected {key} <= {room(purpose)} (the starts that a run seed has for {purpose}), got {got}")
