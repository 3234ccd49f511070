"""What a correction is told: its configuration, the plan of a step, and the words for starts and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from wmrl.correction.combine import Weighted
from wmrl.correction.debias import MapConfig
from wmrl.correction.trust import JUDGED_BY_UPDATES, TrustConfig
from wmrl.names import nearest
from wmrl.types import Rollouts, Start

MODES = ("real", "model", "ppi", "fusion", "auto")
GATES = ("auto", "open", "shut")

StartSource = Callable[[int, int], Sequence[Start]]
"""(step, count) -> `count` training starts of that step, all different; asking for more only appends."""

KeyframeSource = Callable[[int, int, int], Sequence[Start]]
"""(step, block, count) -> `count` states of recorded real rollouts (or all there are), all different; blocks of a step are
drawn independently."""

Features = Callable[[Rollouts], Tensor]
"""rollouts -> (B, F): what the bias of a prediction may depend on; the only seam where a domain speaks to the core."""


@dataclass(frozen=True)
class CorrectionConfig:
    """What is mixed and how.

    mode            real: no world model. model: imagination alone. ppi: unbiased whatever the model does. fusion:
    inverse-variance
                    weights. auto: as trust allows.
    gate            mode auto only: `open` forces the fusing state, `shut` forces real-only
    value_decay     lambda of the critic's advantages of real rollouts; 1 gives no credit between decisions
    debias, denoise switches for ablations; without denoise l = 1 and every baseline is the plain leave-one-out mean
    group_size      members of a group (G)
    real_groups     groups executed per step in every mode (n): equal steps are equal real episodes
    imagined_groups groups imagined per step (m), among which the anchors are chosen
    dose, max_dose  extra imagined updates per step in modes model and fusion; their bound in auto
    probes          in auto, with keyframes, while nothing is trusted: updates made, judged on real decisions, taken back
    kappa_cap       most weight that auto puts on the model's own mean
    uniform_share   share of chance in the choice of anchors (tau)
    memory          discount per step of the moments behind l
    trust           when pairs are judged; update_trust: when proposed updates are (keyframes)
    scale_floor     least task scale, sigma_floor least standard deviation of a prediction, in units of reward
    """

    mode: str = "auto"
    gate: str = "auto"
    debias: bool = True
    denoise: bool = True
    group_size: int = 8
    real_groups: int = 4
    imagined_groups: int = 16
    dose: int = 4
    max_dose: int = 8
    probes: int = 2
    kappa_cap: float = 0.7
    uniform_share: float = 0.5
    memory: float = 0.99
    value_decay: float = 0.9
    scale_floor: float = 0.25
    sigma_floor: float = 0.02
    max_weight_ratio: float = 20.0
    max_coefficient: float = 20.0
    map: MapConfig = field(default_factory=MapConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    update_trust: TrustConfig = JUDGED_BY_UPDATES

    def __post_init__(self) -> None:
        _one_of("correction.mode", self.mode, MODES)
        _one_of("correction.gate", self.gate, GATES)
        if self.gate != "auto" and self.mode != "auto":
            raise ValueError(f"expected correction.gate=auto with correction.mode={self.mode}, got {self.gate}")
        if self.group_size < 2:
            raise ValueError(f"expected correction.group_size of at least 2, since one has no baseline; got {self.group_size}")
        if self.real_groups < 1:
            raise ValueError(f"expected correction.real_groups of at least 1 (trust needs anchors), got {self.real_groups}")
        if self.mode != "real" and self.imagined_groups < self.real_groups:
            raise ValueError(
                f"expected correction.imagined_groups of at least correction.real_groups={self.real_groups}, "
                f"since anchors are chosen among them; got {self.imagined_groups}"
            )
        for name, low, high in _RANGES:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"expected correction.{name} between {low} and {high}, got {getattr(self, name)}")


_RANGES = (
    ("dose", 0, 1000),
    ("max_dose", 0, 1000),
    ("probes", 1, 1000),
    ("kappa_cap", 0.0, 1.0),
    ("uniform_share", 0.2, 1.0),
    ("memory", 0.0, 1.0),
    ("scale_floor", 1e-6, 1e6),
    ("sigma_floor", 1e-6, 1e6),
    ("max_weight_ratio", 1.0, 1e6),
    ("max_coefficient", 1.0, 1e6),
)


@dataclass(frozen=True)
class Plan:
    """Of one step: starts of the groups that may be executed, and those of each extra imagined update. `at_keyframes`: the
    latter are states of recorded rollouts, all of the former are executed, and their twins only show the gap."""

    step: int
    seed: int
    starts: tuple[Start, ...]
    extra: tuple[tuple[Start, ...], ...]
    at_keyframes: bool = False


@dataclass(frozen=True)
class Batch:
    """What the objective learns from, with the numbers for the log, and the pace of the update (see `Objective.update`)."""

    sources: tuple[Weighted, ...]
    info: dict[str, float]
    pace: float = 1.0


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}{nearest(value, allowed)}")
