"""Mixing a few true outcomes with many predicted ones: debias, denoise, and trust only as far as the pairs allow.

It needs nothing but rollouts: no robot, no simulator, no policy.
"""

from wmrl.correction.anchors import Anchors
from wmrl.correction.combine import Combination, Weighted
from wmrl.correction.correction import Batch, Correction, CorrectionConfig, Plan
from wmrl.correction.debias import MapConfig
from wmrl.correction.trust import TrustConfig, TrustState

__all__ = [
    "Anchors",
    "Batch",
    "Combination",
    "Correction",
    "CorrectionConfig",
    "MapConfig",
    "Plan",
    "TrustConfig",
    "TrustState",
    "Weighted",
]
