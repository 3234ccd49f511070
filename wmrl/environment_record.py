"""What a result depends on besides the settings: versions, machine, device, git state, the golden-trajectory hash."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DISTRIBUTIONS = (
    "wmrl-embodied", "torch", "numpy", "scipy", "numba", "mujoco", "robosuite", "gymnasium", "lerobot", "transformers",
    "safetensors", "hydra-core",
)  # fmt: skip


def describe_environment(golden_hash: str | None = None, device: str = "cpu") -> dict[str, Any]:
    """The content of env.json. Distributions that are not installed have the version null."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": device,
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "git": git_state(Path(__file__).resolve().parents[1]),
        "golden_hash": golden_hash,
    }


def differences(first: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One sentence for each difference that can alter results. A golden hash that one side lacks is not compared."""
    found = []
    if first["python"] != now["python"]:
        found.append(f"Python was {first['python']}, is {now['python']}")
    if first.get("device", "cpu") != now["device"]:
        found.append(f"the device was {first.get('device', 'cpu')}, is {now['device']}: the last bits differ")
    for name, new in now["versions"].items():
        old = first["versions"].get(name)
        if old != new:
            found.append(f"{name} was {old}, is {new}")
    if first.get("golden_hash") and now.get("golden_hash") and first["golden_hash"] != now["golden_hash"]:
        found.append(f"the golden trajectory was {first['golden_hash']}, is {now['golden_hash']}: the physics differ")
    if (first["git"] or {}).get("commit") != (now["git"] or {}).get("commit"):
        found.append(f"the code was {(first['git'] or {}).get('commit')}, is {(now['git'] or {}).get('commit')}")
    return found


def git_state(root: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository whose top is `root`; None without git or when installed elsewhere."""
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root.resolve():
        return None
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
