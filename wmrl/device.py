"""Where networks live and in which precision they compute.

Networks live on the device; rollouts, observations, the buffer and the correction stay on the CPU, beside the simulator.
Whoever owns a network moves to it what goes in and brings back to the CPU what comes out; random numbers come from CPU
generators.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

import torch

from wmrl.names import nearest

PRECISIONS = ("off", "bfloat16")


def check_device_name(name: str) -> None:
    """ValueError unless `cpu`, `cuda`, `cuda:N` or `auto`. A configuration may be read where no such device is."""
    if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", name):
        raise ValueError(f"expected device cpu, cuda, cuda:N or auto, got {name!r}{nearest(name, ('cpu', 'cuda', 'auto'))}")


def find_device(name: str) -> torch.device:
    """The device of that name, `auto` being cuda where there is one; ValueError when this machine lacks it."""
    check_device_name(name)
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    if int(name.partition(":")[2] or 0) >= count:
        raise ValueError(f"expected a CUDA device for device={name}, got {count} that PyTorch can use; set device=cpu or auto")
    return torch.device(name)


def check_precision(name: str) -> None:
    """ValueError unless it is one of `PRECISIONS`."""
    if name not in PRECISIONS:
        raise ValueError(f"expected autocast {' or '.join(PRECISIONS)}, got {name!r}{nearest(name, PRECISIONS)}")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Matrix products and convolutions inside compute in `precision`; `off` is float32, also inside another autocast."""
    if precision == "off":
        known = torch.amp.is_autocast_available(device.type)
        return torch.autocast(device.type, enabled=False) if known else nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
