"""The torch device `simgpu:0`.

Operations run on CPU aliases of the device's bytes (real data), or only pass shapes on (virtual
data). Either way every storage they make is charged to the card in the slot. Registering the
device can't be undone, and a process has one: it happens once, when the first card is put in.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import DeviceError, VirtualDataError
from ..simulated import attention
from .dispatch import SPECIAL, dispatch, is_defined
from .storage import DEVICE_TYPE, card_in_slot, on_card

_aten = torch.ops.aten


class _Module:
    """`torch.simgpu`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are drawn by the CPU kernels, from the CPU generator."""

    manual_seed = manual_seed_all

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def __getattr__(self, name: str) -> Any:
        card = card_in_slot()
        functions = {} if card is None else card.module()
        if name not in functions:
            raise AttributeError(f"torch.{DEVICE_TYPE} has no attribute {name!r}")
        return functions[name]


@functools.cache
def register() -> tuple[Any, ...]:
    """Register the device with torch. The libraries returned keep the kernels registered."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    try:
        _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Module())
    except RuntimeError as taken:
        raise DeviceError(
            "torch's one slot for an external device is taken, so no card can be simulated here",
            hint="simulate in a process that imports no other out-of-tree torch backend",
        ) from taken
    library: Any = torch.library.Library
    fallback, kernels = library("_", "IMPL"), library("aten", "IMPL")
    fallback.fallback(dispatch, "PrivateUse1")
    kernels.impl("scaled_dot_product_attention", attention.dispatch, "PrivateUse1")
    for key in ("CPU", "PrivateUse1"):  # `parameter.data = …` across the two devices
        kernels.impl("_has_compatible_shallow_copy_type", _same_layout, key)
    kernels.impl(
        "convolution_overrideable",
        functools.partial(dispatch, _aten.convolution_overrideable.default),
        "PrivateUse1",
    )
    for name in _preempted():
        op = getattr(getattr(_aten, name), "default", None)
        if op is not None:
            kernels.impl(name, functools.partial(dispatch, op), "PrivateUse1")
    _patch_deepcopy()
    _patch_tolist()
    _keep_from_the_compiler()
    return fallback, kernels


def _keep_from_the_compiler() -> None:
    """Where torch.compile leaves a frame to Python, it tries the frames that are called in there:
    these here are what stands for kernels."""
    from torch._dynamo import trace_rules

    trace_rules.add(__package__)


def _same_layout(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    return tensor.layout == source.layout


def _preempted() -> Iterator[str]:
    """Operations whose composite kernel would come before the fallback, and isn't CUDA's choice.

    Group norm through its composite differs from the fused kernel in the last bit.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, base = name.partition("::")
        if namespace != "aten" or "." in base or name in SPECIAL:
            continue
        if has(name, "CPU") and has(name, "CompositeExplicitAutograd"):
            yield base


def _patch_deepcopy() -> None:
    """`UntypedStorage.clone` needs a C++ allocator of the device, which this one doesn't have."""
    original = torch.UntypedStorage.__deepcopy__

    def deepcopy(storage: torch.UntypedStorage, memo: dict[int, Any]) -> torch.UntypedStorage:
        if storage.device.type != DEVICE_TYPE:
            return original(storage, memo)  # type: ignore[no-any-return, no-untyped-call]
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole.clone().untyped_storage()

    torch.UntypedStorage.__deepcopy__ = deepcopy  # type: ignore[method-assign, assignment]


def _patch_tolist() -> None:
    """`tolist` copies to the host and reads there, which can't be told from `cpu()`."""
    original = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        if on_card(tensor) and not is_defined(tensor):
            raise VirtualDataError(
                f"the values of a {tensor.dtype} tensor that has only a shape were asked for",
                hint="the pipeline branches on computed values here; run it with real data",
            )
        return original(tensor)

    torch.Tensor.tolist = tolist  # type: ignore[method-assign, assignment]
