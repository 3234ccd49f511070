"""A second device that computes, for machines without a GPU: it finds what forgets to move a tensor.

Its tensors call themselves `meta` and hold their numbers in an ordinary CPU tensor. As on CUDA, an operation on tensors of
both devices fails (single numbers and indices on the CPU excepted), and results leave it only when they are moved. Beyond
CUDA, it refuses to draw random numbers: ours come from CPU generators, so that a run draws the same ones on every device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, NAME = torch.device("cpu"), torch.device("meta")
MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._unsafe_index.Tensor)
RANDOM = ("rand", "normal", "uniform", "bernoulli", "multinomial", "dropout")


class OnDevice(Tensor):
    """A tensor of the second device; `numbers` has its content."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "OnDevice":
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride(), dtype=numbers.dtype, device=NAME
        )

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _compute(func, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """While it is entered, `.to("meta")` and `device="meta"` lead to the second device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers; its result is of the second device when its inputs are, or when it is asked for."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here, asked = any(isinstance(tensor, OnDevice) for tensor in tensors), kwargs.get("device")
    lands_here = here if asked is None else torch.device(asked) == NAME
    if not here and not lands_here:
        return func(*args, **kwargs)
    if here and func not in MOVES:
        _check(func, args, tensors)
    if any(word in func._schema.name for word in RANDOM):
        raise RuntimeError(f"{func} draws random numbers on the device")
    plain_args, plain_kwargs = tree_map_only(OnDevice, lambda tensor: tensor.numbers, (args, kwargs))
    out = func(*plain_args, **({**plain_kwargs, "device": CPU} if asked is not None else plain_kwargs))
    if func._schema.name.endswith("_"):  # in place
        return args[0]
    return tree_map_only(Tensor, OnDevice, out) if lands_here else out


def _check(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """Refuse tensors with dimensions on the CPU beside ours, unless they are indices into one of ours."""
    strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
    if strangers and not (func in INDEXING and isinstance(args[0], OnDevice)):
        raise RuntimeError(f"{func} found tensors on two devices, cpu and {NAME}; move {[tuple(t.shape) for t in strangers]}")
