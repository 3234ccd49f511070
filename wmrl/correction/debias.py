"""Online debiasing: a ridge map of what varies inside a group, since only that reaches a group-relative gradient, at several
half-lives.

Shape legend: B rollouts, F features of the domain, D = 1 + F regressors (prediction first), J half-lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wmrl.correction.advantages import group_sum
from wmrl.correction.isotonic import IsotonicMap
from wmrl.correction.offsets import Offsets as Offsets

LOSS_MEMORY = 0.99
"""Discount per step of prequential losses, a half-life of 69 steps: short enough to notice a drift, long enough to tell two
half-lives apart."""

NOISE_MEMORY = 0.99
"""Discount of the residual variance per degree of freedom."""


@dataclass(frozen=True)
class MapConfig:
    """The map from predicted to real returns inside a group.

    discounts     share of the evidence that a step leaves, one map each: half-lives of 23, 69 and 231 steps
    slope_sd      prior standard deviation of (slope - 1)
    feature_sd    prior standard deviation of the weight of a standardised feature
    initial_noise residual variance before any pair
    isotonic      also try a monotone map of the prediction alone, and use it where it predicts better
    """

    discounts: tuple[float, ...] = (0.97, 0.99, 0.997)
    slope_sd: float = 0.5
    feature_sd: float = 0.3
    initial_noise: float = 0.25
    isotonic: bool = False

    def __post_init__(self) -> None:
        if not self.discounts or not all(0 < discount <= 1 for discount in self.discounts):
            raise ValueError(f"expected correction.map.discounts, at least one and all in (0, 1], got {self.discounts}")
        for name in ("slope_sd", "feature_sd", "initial_noise"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected correction.map.{name} above 0, got {getattr(self, name)}")


class Pairs(NamedTuple):
    """Group-centred pairs: regressors (B, D), real returns (B,), row weights (B,) of mean 1 over the usable rows and 0
    elsewhere, and their degrees of freedom, sum over groups of (usable members - 1)."""

    regressors: Tensor
    target: Tensor
    weights: Tensor
    degrees: int

    def loss(self, predicted: Tensor) -> float:
        """Weighted squared error of predicted centred returns (B,)."""
        return float((self.weights * (self.target - predicted) ** 2).sum())


def centred(values: Tensor, groups: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, ...) minus the mean, weighted by `weights` (B,) if given, over the valid members of the group; 0 for invalid rows and
    for values that are not finite, which also stay out of the mean."""
    shape = (-1, *([1] * (values.dim() - 1)))
    usable = valid.reshape(shape) & torch.isfinite(values)
    share = usable.double() if weights is None else usable * weights.double().reshape(shape)
    clean = torch.where(usable, values.double(), 0.0)
    total = group_sum(share, groups)
    mean = group_sum(clean * share, groups) / torch.where(total > 0, total, 1.0)
    return torch.where(usable, clean - mean, 0.0)


def centred_regressors(
    predictions: Tensor, features: Tensor, groups: Tensor, valid: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    """(B, D): the prediction and the features, centred inside groups. A rollout whose prediction is not finite is out; a
    feature that is not finite is neutral, at the group's mean."""
    stacked = torch.cat([predictions.double()[:, None], features.double()], dim=1)
    return centred(stacked, groups, valid & torch.isfinite(predictions), weights)


def centred_pairs(
    predictions: Tensor, features: Tensor, returns: Tensor, groups: Tensor, valid: Tensor, *, weights: Tensor | None = None
) -> Pairs:
    """Usable pairs, centred at the weighted group means (the within estimator of weighted least squares).

    Weights are divided by their mean: 1 / pi for anchors that were not chosen evenly, or inverse residual variances, change
    what the evidence is about, not how much there is. Raises ValueError for weights of usable pairs that are not finite and
    above 0.
    """
    usable = valid & torch.isfinite(predictions) & torch.isfinite(returns)
    rows = usable.double()
    if weights is not None:
        chosen = weights.double()[usable]
        if not bool((torch.isfinite(chosen) & (chosen > 0)).all()):
            raise ValueError(f"expected finite weights above 0 for valid pairs, got {chosen.tolist()}")
        rows = torch.where(usable, weights.double(), 0.0) / (chosen.mean() if len(chosen) else 1.0)
    regressors = centred_regressors(predictions, features, groups, usable, weights=rows)
    degrees = int(usable.sum()) - len(groups[usable].unique())
    return Pairs(regressors, centred(returns, groups, usable, rows), rows, degrees)


class WithinGroupMap:
    """R~ = a rhat~ + gamma' phi~ + e on group-centred pairs (~), a ridge in information form that forgets towards the identity.

    Evidence E, h is discounted by `discount` at each step, whether or not data came; with the prior added when solving,
    v = (E + Lam_0)^-1 (h + Lam_0 v_0), v_0 = (1, 0): recursive least squares with exponential forgetting (Ljung 1999, section
    11.2), except that what is forgotten returns to the prior, Lam <- d Lam + (1 - d) Lam_0, so that information never winds
    down to nothing. Features are standardised in the prior only (Lam_0 = feature variance / feature_sd^2, over past pairs and
    the rows at hand), so old evidence stays valid when their scale moves.
    """

    def __init__(self, config: MapConfig, num_features: int, discount: float = 0.99) -> None:
        size = 1 + num_features
        self.config, self.discount = config, discount
        self._evidence = torch.zeros(size, size, dtype=torch.float64)
        self._target = torch.zeros(size, dtype=torch.float64)
        self._feature_power = torch.zeros(num_features, dtype=torch.float64)
        self._degrees = 0.0
        self._noise = config.initial_noise
        self._loss_identity = 0.0
        self._loss_map = 0.0

    @property
    def noise(self) -> float:
        """Moving average of the prequential squared residual, s_e^2."""
        return self._noise

    @property
    def losses(self) -> tuple[float, float]:
        """Discounted squared errors on past pairs, each before it was seen: of the map, and of the raw prediction."""
        return self._loss_map, self._loss_identity

    @property
    def helps(self) -> bool:
        """The map predicted past pairs, before seeing them, no worse than the raw prediction did."""
        return self._loss_map <= self._loss_identity

    @property
    def slope(self) -> float:
        return float(self._solve(torch.zeros(0, len(self._target), dtype=torch.float64))[0][0])

    def _solve(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(D,) weights v and (D, D) covariance P for use on rows z (B, D)."""
        rows = self._degrees + float((z != 0).any(dim=1).sum())
        power = (self._feature_power + (z[:, 1:] ** 2).sum(dim=0)) / max(rows, 1.0)
        slope = torch.tensor([1.0 / self.config.slope_sd**2], dtype=torch.float64)
        precision = torch.cat([slope, (power + 1e-6) / self.config.feature_sd**2])
        covariance = torch.linalg.inv(self._evidence + torch.diag(precision))
        pull = torch.zeros_like(precision)
        pull[0] = precision[0]
        return covariance @ (self._target + pull), covariance

    def predict(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Centred real return expected at centred regressors z (B, D), and the variance z' P z of that, (B,) each."""
        if z.shape[1] != len(self._target):
            raise ValueError(f"expected {len(self._target) - 1} features per rollout, got {z.shape[1] - 1}")
        weights, covariance = self._solve(z)
        return z @ weights, ((z @ covariance) * z).sum(dim=1)

    def shift(self, predictions: Tensor, features: Tensor, groups: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """What to add to each prediction, and the variance that the estimate of the map brings, (B,) each (zero-mean per
        group)."""
        z = centred_regressors(predictions, features, groups, valid)
        mean, variance = self.predict(z)
        return mean - z[:, 0], variance

    def update(
        self,
        predictions: Tensor,
        features: Tensor,
        returns: Tensor,
        groups: Tensor,
        valid: Tensor,
        *,
        weights: Tensor | None = None,
    ) -> None:
        """Learn from pairs (B,) after they were used."""
        self.learn(centred_pairs(predictions, features, returns, groups, valid, weights=weights))

    def learn(self, pairs: Pairs) -> None:
        """Prequential losses and noise first, then the evidence."""
        z, weighted = pairs.regressors, pairs.regressors * pairs.weights[:, None]
        loss, d = pairs.loss(self.predict(z)[0]), self.discount
        self._noise = moved_noise(self._noise, loss, pairs.degrees)
        self._loss_map = LOSS_MEMORY * self._loss_map + loss
        self._loss_identity = LOSS_MEMORY * self._loss_identity + pairs.loss(z[:, 0])
        self._degrees = d * self._degrees + pairs.degrees
        self._feature_power = d * self._feature_power + (z[:, 1:] * weighted[:, 1:]).sum(dim=0)
        self._evidence = d * self._evidence + z.T @ weighted / self._noise
        self._target = d * self._target + weighted.T @ pairs.target / self._noise

    def forget(self, keep: float) -> None:
        """A new model version: keep this share of the evidence instead of restarting."""
        self._evidence, self._target = self._evidence * keep, self._target * keep
        self._loss_identity, self._loss_map = self._loss_identity * keep, self._loss_map * keep

    def state_dict(self) -> dict[str, Any]:
        return {
            "evidence": self._evidence.clone(),
            "target": self._target.clone(),
            "feature_power": self._feature_power.clone(),
            "degrees": self._degrees,
            "noise": self._noise,
            "losses": [self._loss_identity, self._loss_map],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._evidence, self._target = state["evidence"].clone(), state["target"].clone()
        self._feature_power, self._degrees, self._noise = state["feature_power"].clone(), state["degrees"], state["noise"]
        self._loss_identity, self._loss_map = state["losses"]


def moved_noise(noise: float, loss: float, degrees: int) -> float:
    """Moving average of squared residuals per degree of freedom; a hundredth of the reward range, squared, is its floor."""
    if degrees <= 0:
        return noise
    memory = NOISE_MEMORY**degrees
    return memory * noise + (1 - memory) * max(loss / degrees, 1e-4)


class DebiasingMap:
    """`WithinGroupMap`s of several half-lives, mixed by how well each predicted pairs that it had not seen.

    w_j is proportional to exp(-loss_j / (2 s_e^2)) with discounted losses of earlier steps: the exponentially weighted average
    forecaster (Vovk 1990; Cesa-Bianchi & Lugosi 2006, chapter 2), which for Gaussian residuals is Bayes' rule. Its variance is
    that of the mixture: the members' own, and what they differ by. With `isotonic` an `IsotonicMap` takes over where it is
    accepted.
    """

    def __init__(self, config: MapConfig, num_features: int) -> None:
        self._members = [WithinGroupMap(config, num_features, discount) for discount in config.discounts]
        self._isotonic = IsotonicMap(LOSS_MEMORY) if config.isotonic else None
        self._noise = config.initial_noise
        self._loss = 0.0

    @property
    def noise(self) -> float:
        """Moving average of the prequential squared residual of what was used, s_e^2."""
        return self._noise

    @property
    def helps(self) -> bool:
        """What was used predicted past pairs, before seeing them, no worse than the raw prediction did."""
        return self._loss <= self._members[0].losses[1]

    @property
    def weights(self) -> Tensor:
        """(J,) weight of each half-life, in the order of the config."""
        losses = torch.tensor([member.losses[0] for member in self._members], dtype=torch.float64)
        return torch.softmax(-losses / (2 * self._noise), dim=0)

    @property
    def slope(self) -> float:
        """Of the linear maps."""
        return sum(float(w) * member.slope for w, member in zip(self.weights, self._members, strict=True))

    @property
    def isotonic(self) -> bool:
        """Whether the monotone map is in use."""
        return self._isotonic is not None and self._isotonic.accepted

    def _linear(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the mixture at z (B, D): E f_j, and E var_j + Var f_j over the weights."""
        predicted = [member.predict(z) for member in self._members]
        means, variances = (torch.stack(parts) for parts in zip(*predicted, strict=True))
        weights = self.weights[:, None]
        mean = (weights * means).sum(dim=0)
        return mean, (weights * (variances + (means - mean) ** 2)).sum(dim=0)

    def _monotone(self, z: Tensor, groups: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the fitted isotonic map, centred again with weights `rows` (B,): a monotone function of a centred
        prediction is not centred."""
        assert self._isotonic is not None
        value, share = self._isotonic.predict(z[:, 0])
        usable = rows > 0
        return centred(value, groups, usable, rows), torch.where(usable, self._noise * share, 0.0)

    def shift(self, predictions: Tensor, features: Tensor, groups: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """What to add to each prediction, and the variance that the estimate of the map brings, (B,) each (zero-mean per
        group). A prediction that is not finite gets 0 and moves no other."""
        z = centred_regressors(predictions, features, groups, valid)
        mean, variance = self._linear(z)
        if self.isotonic:
            mean, variance = self._monotone(z, groups, (valid & torch.isfinite(predictions)).double())
        return mean - z[:, 0], variance

    def update(
        self,
        predictions: Tensor,
        features: Tensor,
        returns: Tensor,
        groups: Tensor,
        valid: Tensor,
        *,
        weights: Tensor | None = None,
    ) -> None:
        """Learn from pairs (B,) after they were used: what was used is judged first, then every map learns.

        weights (B,): 1 / pi of anchors that were not chosen evenly, times any inverse residual variance; only their ratios
        count.
        """
        pairs = centred_pairs(predictions, features, returns, groups, valid, weights=weights)
        linear = pairs.loss(self._linear(pairs.regressors)[0])
        used = linear
        if self._isotonic is not None and self._isotonic.fitted:
            own = pairs.loss(self._monotone(pairs.regressors, groups, pairs.weights)[0])
            used = own if self._isotonic.accepted else linear
            self._isotonic.judge(own, linear)
        self._loss = LOSS_MEMORY * self._loss + used
        self._noise = moved_noise(self._noise, used, pairs.degrees)
        if self._isotonic is not None:
            self._isotonic.add(pairs.regressors[:, 0], pairs.target, _worth(pairs))
        for member in self._members:
            member.learn(pairs)

    def forget(self, keep: float) -> None:
        """A new model version: keep this share of the evidence instead of restarting."""
        self._loss *= keep
        for member in self._members:
            member.forget(keep)
        if self._isotonic is not None:
            self._isotonic.forget(keep)

    def state_dict(self) -> dict[str, Any]:
        return {
            "members": [member.state_dict() for member in self._members],
            "isotonic": None if self._isotonic is None else self._isotonic.state_dict(),
            "noise": self._noise,
            "loss": self._loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for member, saved in zip(self._members, state["members"], strict=True):
            member.load_state_dict(saved)
        if self._isotonic is not None:
            self._isotonic.load_state_dict(state["isotonic"])
        self._noise, self._loss = state["noise"], state["loss"]


def _worth(pairs: Pairs) -> Tensor:
    """Row weights (B,) that sum to the independent pairs they are worth: degrees of freedom times Kish's ESS / m = (sum w)^2 /
    (m sum w^2)."""
    total, squares = pairs.weights.sum(), (pairs.weights**2).sum()
    return pairs.weights * (pairs.degrees / squares) if float(total) > 0 else pairs.weights
