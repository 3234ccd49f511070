"""`Correction`: plans a step, chooses anchors, turns predicted and real returns into coefficients, and learns how far to
trust the model.

The order of calls is `plan`, `choose_anchors`, `correct`, `judge_updates`, `update` (method 3.12). `correct` reads state,
only the last two move it, so no map, weight, scale or choice of a step ever depends on that step's real outcomes (the
predictability rule of method 3.0).

Shape legend: B rollouts, T decisions, F features of the domain; n anchor groups among m imagined groups, G members each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wmrl.correction.advantages import TaskScale, advantages, group_sum, real_advantages, task_key, uninformative_groups
from wmrl.correction.anchors import Anchors, inclusion_probabilities, systematic_sample
from wmrl.correction.combine import (
    MODEL_ONLY,
    REAL_ONLY,
    Combination,
    Weighted,
    fusion,
    imagined_coefficients,
    mass,
    match,
    merge,
    real_coefficients,
)
from wmrl.correction.control import Moments, same_decisions
from wmrl.correction.debias import Offsets, WithinGroupMap, centred
from wmrl.correction.judging import judged_decisions
from wmrl.correction.settings import Batch, CorrectionConfig, Features, KeyframeSource, Plan, StartSource
from wmrl.correction.trust import Trust, TrustState
from wmrl.correction.variance import VarianceCalibration, baseline_weights, prediction_variance, spread_variance
from wmrl.noise import derive_seed
from wmrl.types import Rollouts, Start


class Correction:
    """The statistics between a world model and a policy gradient. `features` says what the bias may depend on (None: the
    score alone); `judged_by_updates` that imagination begins at keyframes, so that trust rests on `judge_updates`."""

    def __init__(
        self,
        config: CorrectionConfig,
        *,
        features: Features | None = None,
        num_features: int = 0,
        judged_by_updates: bool = False,
    ) -> None:
        self.config = config
        self._features = None if judged_by_updates else features  # without pairs nothing is learned about the bias
        self._num_features = num_features if self._features else 0
        self._map = WithinGroupMap(config.map, self._num_features)
        self._offsets = Offsets()
        self._judged_by_updates = judged_by_updates
        self._unusable = 0.0
        if judged_by_updates and config.mode in ("ppi", "fusion"):
            raise ValueError(
                f"expected correction.mode real, model or auto where imagination begins at keyframes, got {config.mode}, "
                "which needs pairs: let it begin at starts (train.imagine_from=starts)"
            )
        self.trust = Trust(config.update_trust if judged_by_updates else config.trust, of_updates=judged_by_updates)
        self._scale = TaskScale(floor=config.scale_floor)
        self._moments = Moments(config.memory)
        self._calibration = VarianceCalibration()

    @property
    def uses_model(self) -> bool:
        return self.config.mode != "real"

    def plan(self, starts: StartSource, step: int, seed: int, keyframes: KeyframeSource | None = None) -> Plan:
        """Starts of this step; the dose follows from what trust was after the step before.

        With `keyframes`, extra updates begin at states of recorded real rollouts. Where no prediction has a say, a few are
        planned all the same: to be judged, and taken back.
        """
        config, dose = self.config, self.dose()
        if keyframes is not None and self.uses_model:
            probing = config.mode == "auto" and config.gate == "auto" and not self.trust.vetoed
            blocks = range(dose or (config.probes if probing else 0))
            extra = tuple(tuple(keyframes(step, block, config.imagined_groups)) for block in blocks)
            return Plan(step, seed, _different(starts, step, config.real_groups), extra, at_keyframes=True)
        groups = config.imagined_groups if self.uses_model else config.real_groups
        chosen = _different(starts, step, groups * (1 + dose))
        split = [chosen[i : i + groups] for i in range(0, len(chosen), groups)]
        return Plan(step, seed, split[0], tuple(split[1:]))

    def dose(self) -> int:
        """Extra purely imagined updates of the next step: fixed in modes model and fusion, in auto from the lower bound of
        agreement."""
        if self.config.mode in ("model", "fusion"):
            return self.config.dose
        if self.config.mode != "auto" or self._state() is not TrustState.FUSE:
            return 0
        return min(self.config.max_dose, max(1, round(self.config.max_dose * self._confidence())))

    def choose_anchors(self, plan: Plan, imagined: Rollouts | None) -> Anchors:
        """The groups to execute: all of them in mode real, else a fixed number by expected variance reduction mixed with
        chance."""
        count, total = self.config.real_groups, len(plan.starts)
        if imagined is None or plan.at_keyframes:
            return Anchors(plan.starts, (1.0,) * total)
        if self.config.mode == "model" or self.combination() == REAL_ONLY:
            # No prediction has a say: the step's first starts, drawn at random already, are what real-only RL would execute.
            # A run whose gate stays shut is then real-only RL to the last bit.
            return Anchors(plan.starts[:count], (count / total,) * count)
        probabilities = inclusion_probabilities(self._anchor_scores(imagined), count, self.config.uniform_share)
        generator = np.random.default_rng(derive_seed(plan.seed, plan.step, "anchors"))
        chosen = systematic_sample(probabilities, [task_key(s) for s in plan.starts], generator)
        return Anchors(tuple(plan.starts[k] for k in chosen), tuple(float(probabilities[k]) for k in chosen))

    def _anchor_scores(self, imagined: Rollouts) -> NDArray[np.float64]:
        """sqrt of the expected squared residual per group (method 3.7): prediction variance plus predicted spread inside
        the group."""
        groups, valid = imagined.group_index(), imagined.valid()
        predicted, variance = self._debiased(imagined)
        total = group_sum((variance + spread_variance(predicted, variance, groups, valid)) * valid, groups)
        first = torch.tensor([int((groups == g).nonzero()[0]) for g in range(int(groups.max()) + 1)])
        return np.asarray(total[first].sqrt().numpy(), dtype=np.float64)

    def correct(self, plan: Plan, anchors: Anchors, imagined: Rollouts | None, real: Rollouts, *, same_samples: bool) -> Batch:
        """Coefficients (B, T) of this step's real and imagined rollouts, from state of earlier steps.

        same_samples: real rollouts execute the very decisions that were predicted (`Replay`), so both coefficients meet in
        one row. From keyframes the share kappa of the step is that of the extra updates: the real rows stand alone, at the
        pace of the rest.
        """
        combination = self.combination()
        if plan.at_keyframes:
            imagined = None
        if imagined is not None:
            _check_pair(imagined, real)
        weights = self._anchor_weights(anchors, real, len(plan.starts))
        same, groups = uninformative_groups(real)
        info = {"groups_without_information": float(same), "groups": float(groups)}
        a_real = real_advantages(real, decay=self.config.value_decay) / self._scale(real.starts)[:, None]
        if imagined is None:
            coefficients = self._clipped(real_coefficients(a_real, weights, REAL_ONLY), info)
            kappa = combination.kappa if plan.at_keyframes else 0.0
            info |= {"kappa": kappa, "l": 0.0, "mass_real": (1 - kappa) * mass(coefficients)}
            return Batch((Weighted(real, coefficients),), info, pace=1 - kappa)
        if not bool((weights > 0).any()) and self.config.mode != "model":
            combination = REAL_ONLY
        a_imagined = self._imagined_advantages(imagined)
        share = torch.full((len(imagined),), 1.0 / (len(plan.starts) * self.config.group_size), dtype=torch.float64)
        rows = match(imagined, real)
        twins = torch.zeros_like(share).index_add(0, rows[rows >= 0], weights[rows >= 0])
        c_real = real_coefficients(a_real, weights, combination)
        c_imagined = imagined_coefficients(a_imagined, share, twins, combination)
        info |= {"kappa": combination.kappa, "l": combination.l, "mass_real": mass(c_real), "mass_imagined": mass(c_imagined)}
        if same_samples:
            c_real, c_imagined = merge(c_real, c_imagined, rows)
        sources = (Weighted(real, self._clipped(c_real, info)), Weighted(imagined, self._clipped(c_imagined, info)))
        return Batch(sources, info)

    def imagined_batch(self, imagined: Rollouts) -> Batch:
        """A purely imagined update (the dose): kappa = 1 on debiased predictions."""
        self._unusable = max(self._unusable, float((~imagined.valid()).double().mean()))
        size = len(imagined.group_index().unique()) * self.config.group_size
        share = torch.full((len(imagined),), 1.0 / size, dtype=torch.float64)
        coefficients = imagined_coefficients(self._imagined_advantages(imagined), share, torch.zeros_like(share), MODEL_ONLY)
        info = {"mass_imagined": mass(coefficients)}
        return Batch((Weighted(imagined, self._clipped(coefficients, info)),), info)

    def combination(self) -> Combination:
        """(kappa, l) of this step."""
        if self.config.mode == "model":
            return MODEL_ONLY
        if self.config.mode == "fusion":
            ratio = self._moments.variance_ratio(self.config.max_weight_ratio) if self.config.denoise else 1.0
            return fusion(self.config.real_groups, self.config.imagined_groups, ratio)
        if self.config.mode == "ppi":
            return Combination(0.0, self._control())
        state = self._state() if self.config.mode == "auto" else TrustState.COLD
        if state is TrustState.FUSE:
            return Combination(self.config.kappa_cap * self._confidence(), self._control())
        return Combination(0.0, self._control()) if state is TrustState.PPI else REAL_ONLY

    def update(self, imagined: Rollouts | None, real: Rollouts) -> None:
        """Learn from this step, after its coefficients were used."""
        if imagined is not None:
            self._observe_pairs(imagined, real)
        if self.uses_model:
            twins = 0.0 if imagined is None else float((~imagined.valid()).double().mean())
            self.trust.update(max(twins, self._unusable))
            self._unusable = 0.0
        self._scale.update(real)

    def seed_evidence(self, imagined: Rollouts, real: Rollouts) -> None:
        """First evidence before training: pairs (same start and member) predicted by models that were not fitted on them,
        such as the exam's cross-fitted ones. Groups are taken in a few at a time, so that later ones judge the map that
        earlier ones taught."""
        _check_pair(imagined, real)
        groups = real.group_index()
        for first in range(0, int(groups.max()) + 1, self.config.real_groups):
            block = (groups >= first) & (groups < first + self.config.real_groups)
            self._observe_pairs(imagined, real[block])
        self.trust.update(0.0)

    def judge_updates(self, real: Rollouts, change: Tensor) -> None:
        """Real outcomes as evidence for or against updates that imagination proposed (`judged_decisions`)."""
        judged = judged_decisions(real, change)
        if judged is not None:
            self.trust.agreement.add(*judged)

    def veto(self, vetoed: bool) -> None:
        """The exam's verdict: a vetoed model is distrusted, whatever the anchors say, and nothing lifts it within a run."""
        self.trust.vetoed = vetoed

    def model_refreshed(self) -> None:
        """The world model was fitted again: old evidence about it counts less."""
        self._map.forget(self.trust.config.refresh_keep)
        self.trust.refreshed()

    def _state(self) -> TrustState:
        forced = {"open": TrustState.FUSE, "shut": TrustState.COLD}
        return forced.get(self.config.gate, self.trust.state)

    def _confidence(self) -> float:
        """0 where fusing ends, 1 at full trust, linear in the evidence between. A forced gate counts as half.

        With pairs the evidence is the lower bound of the within-group correlation: 1 - LCB^2 bounds the share of within-group
        variance that bias can hide in, so the weight on the model's mean grows with the bound, not with a plug-in estimate of
        the bias, which drifts to full trust (method 3.4). With updates it is the estimate itself, see `JUDGED_BY_UPDATES`.
        """
        low = self.trust.evidence[0]
        leave = self.trust.config.fuse_leave
        confidence = min(max((low - leave) / (self.trust.config.full - leave), 0.0), 1.0)
        return max(confidence, 0.5) if self.config.gate == "open" else confidence

    def _control(self) -> float:
        """l of this step; 1 without denoising."""
        if not self.config.denoise:
            return 1.0
        return self._moments.control(self.trust.agreement.correlation, self.trust.agreement.degrees)

    def _debiased(self, imagined: Rollouts) -> tuple[Tensor, Tensor]:
        """Debiased predicted return and its variance, (B,) each; invalid rows keep a harmless 0."""
        groups, valid = imagined.group_index(), imagined.valid()
        returns = imagined.returns().double()
        shift, map_variance = self._map.shift(returns, self._feature_table(imagined), groups, valid)
        if not self._debiasing:
            shift, map_variance = torch.zeros_like(shift), torch.zeros_like(map_variance)
        factor, floor = self._calibration.factor, self.config.sigma_floor
        variance = prediction_variance(imagined.variance, map_variance, factor=factor, floor=floor)
        return returns + shift, variance

    @property
    def _debiasing(self) -> bool:
        return self.config.debias and self._map.helps and not self._judged_by_updates

    def _feature_table(self, rollouts: Rollouts) -> Tensor:
        if self._features is None:
            return torch.zeros(len(rollouts), 0, dtype=torch.float64)
        table = self._features(rollouts).double()
        return torch.where(torch.isfinite(table), table, 0.0)

    def _imagined_advantages(self, imagined: Rollouts) -> Tensor:
        """Debiased leave-one-out advantages over the task scale (B, T)."""
        groups, valid = imagined.group_index(), imagined.valid()
        predicted, variance = self._debiased(imagined)
        weights = None
        if self.config.denoise and imagined.variance is not None:
            weights = baseline_weights(predicted, variance, groups, valid, max_ratio=self.config.max_weight_ratio)
        shift = predicted - imagined.returns().double()
        return advantages(imagined, correction=shift, weights=weights) / self._scale(imagined.starts)[:, None]

    def _anchor_weights(self, anchors: Anchors, real: Rollouts, total: int) -> Tensor:
        """w_k / G of each real rollout (B,): 1/(m pi_k G); groups with fewer than two outcomes weigh 0 and the others stand
        in for them."""
        by_group = {s.group_key: 1.0 / (total * p) for s, p in zip(anchors.starts, anchors.probabilities, strict=True)}
        valid, groups = real.valid().double(), real.group_index()
        usable = group_sum(valid, groups) >= 2
        weights = torch.tensor([by_group[s.group_key] for s in real.starts], dtype=torch.float64) * usable
        kept = sum(1 for g in groups.unique() if bool(usable[groups == g][0]))
        return valid * weights * (len(by_group) / kept if kept else 0.0) / self.config.group_size

    def _clipped(self, coefficients: Tensor, info: dict[str, float]) -> Tensor:
        """Cap |c| at a multiple of an even share; clipping is a bias source, so it is counted."""
        limit = self.config.max_coefficient / (self.config.real_groups * self.config.group_size)
        info["clipped_coefficients"] = info.get("clipped_coefficients", 0.0) + float((coefficients.abs() > limit).sum())
        return coefficients.clamp(-limit, limit)

    def _observe_pairs(self, imagined: Rollouts, real: Rollouts) -> None:
        """Trust, l and offsets from pairs of a real rollout and its imagined counterpart. With keyframes pairs only show how
        far imagined success is from real success: they say nothing about imagination that begins elsewhere."""
        rows = match(imagined, real)
        paired = real[rows >= 0]
        if not len(paired):
            return
        rows = rows[rows >= 0]
        predicted, variance = (values[rows] for values in self._debiased(imagined))
        valid, groups = paired.valid() & imagined.valid()[rows], paired.group_index()
        returns = torch.where(valid, paired.returns().double(), 0.0)
        self.trust.watch((predicted - returns)[valid])
        raw = imagined.returns().double()[rows] - returns
        chosen = [g for g in groups.unique() if bool((valid & (groups == g)).any())]
        keys = [task_key(paired.starts[int((groups == g).nonzero()[0])]) for g in chosen]
        self._offsets.update(keys, [float(raw[valid & (groups == g)].mean()) for g in chosen])
        if self._judged_by_updates:
            return
        self.trust.agreement.add(returns, predicted, groups, valid)
        a_real = advantages(paired) / self._scale(paired.starts)[:, None]
        self._moments.update(a_real, self._imagined_advantages(imagined)[rows], same_decisions(paired, imagined[rows]))
        residual = centred(returns - predicted, groups, valid)
        self._calibration.update(returns[valid], predicted[valid], residual[valid], variance[valid])
        self._map.update(imagined.returns()[rows], self._feature_table(imagined)[rows], returns, groups, valid)

    def metrics(self) -> dict[str, Any]:
        """State for the log: trust, correlation with bounds, bias (imagined minus real on pairs) with its interval, the map."""
        bias, low, high = self._offsets.pooled()
        bounds = self.trust.bounds
        return {
            "trust": self._state().value if self.config.mode == "auto" else self.config.mode,
            "trust_measured": self.trust.state.value,
            "rho": self.trust.agreement.correlation,
            "rho_low": bounds[0],
            "rho_high": bounds[1],
            "pair_degrees": self.trust.agreement.degrees,
            "bias": bias,
            "bias_low": low,
            "bias_high": high,
            "exploitation_gap": self.trust.gap,
            "exploitation_alarm": self.trust.exploited,
            "debiasing": self._debiasing,
            "map_slope": self._map.slope,
            "map_noise": self._map.noise,
            "variance_ratio": self._calibration.ratio,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "map": self._map.state_dict(),
            "offsets": self._offsets.state_dict(),
            "trust": self.trust.state_dict(),
            "scale": self._scale.state_dict(),
            "moments": self._moments.state_dict(),
            "calibration": self._calibration.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._map.load_state_dict(state["map"])
        self._offsets.load_state_dict(state["offsets"])
        self.trust.load_state_dict(state["trust"])
        self._scale.load_state_dict(state["scale"])
        self._moments.load_state_dict(state["moments"])
        self._calibration.load_state_dict(state["calibration"])


def _different(starts: StartSource, step: int, count: int) -> tuple[Start, ...]:
    chosen = tuple(starts(step, count))
    different = len({s.group_key for s in chosen})
    if different != count:
        raise ValueError(f"expected {count} different starts for step {step}, got {different}")
    return chosen


def _check_pair(imagined: Rollouts, real: Rollouts) -> None:
    if real.imagined or not imagined.imagined:
        raise ValueError("expected imagined rollouts first and real ones second, got them the other way round or of one kind")
    if imagined.rewards.shape[1] != real.rewards.shape[1]:
        lengths = imagined.rewards.shape[1], real.rewards.shape[1]
        raise ValueError(f"expected imagined and real rollouts of one number of decisions, got {lengths[0]} and {lengths[1]}")
