"""Peak device bytes of full-width components, counted by the card or by PyTorch's MemTracker.

`python component_peak.py card|tracker` prints {component: bytes} as JSON. A process does one of the
two: the card's backend and fake tensors both want the torch device `simgpu`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PIXELS = 1024
TEXT_TOKENS = 512

Make = Callable[..., Tensor]
Component = tuple[Callable[[], nn.Module], Callable[[Make], dict[str, Any]], str]


def denoise(make: Make) -> dict[str, Any]:
    side = PIXELS // 16
    return {
        "hidden_states": make(1, side * side, 64),
        "encoder_hidden_states": make(1, TEXT_TOKENS, 3584),
        "encoder_hidden_states_mask": None,
        "timestep": make(1),
        "img_shapes": [[(1, side, side)]],
        "return_dict": False,
    }


def decode(make: Make) -> dict[str, Any]:
    return {"z": make(1, 16, 1, PIXELS // 8, PIXELS // 8), "return_dict": False}


# The denoiser comes last: its class caches tensors on the device, which outlive the module.
COMPONENTS: dict[str, Component] = {
    "decoder": (AutoencoderKLQwenImage, decode, "decode"),
    "denoiser": (lambda: QwenImageTransformer2DModel(num_layers=2), denoise, "forward"),
}


@contextmanager
def bfloat16() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def on_the_card(component: Component) -> int:
    from accelerate import init_empty_weights

    from residency.offload.cards import find_card
    from residency.offload.simulated.card import SimulatedCard
    from residency.offload.simulated.storage import mark_virtual

    construct, inputs, method = component
    with bfloat16(), init_empty_weights(include_buffers=False):
        module = construct()
    for parameter in module.to_empty(device="cpu").parameters():
        mark_virtual(parameter)
    card = SimulatedCard(find_card("RTX 4090"), allocator="exact", virtual=True)
    with card as device:
        module.to(device.torch_device)

        def make(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=device.torch_device)

        arguments = inputs(make)
        device.reset_peaks()
        getattr(module, method)(**arguments)
        return device.read().peak_allocated_bytes


class FusedAttention(TorchFunctionMode):
    """What a CUDA build runs for these components. Fake tensors would take the math path."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self.fused(*args, **kwargs)
        return function(*args, **kwargs)

    def fused(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert not any(options.values()), "these components mask, drop and scale nothing"
        aten = torch.ops.aten
        if query.size(-1) <= 256:
            return aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return aten._scaled_dot_product_efficient_attention(query, key, value, None, False)[0]


class NoDevice:
    """A torch device that exists for fake tensors only."""

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


def in_the_tracker(component: Component) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    construct, inputs, method = component
    at = torch.device("simgpu", 0)
    with FakeTensorMode(), FusedAttention():
        with bfloat16(), at:
            module = construct()  # the tracker hooks gradients: parameters have to require them

        def make(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=at)

        arguments = inputs(make)
        tracker = MemTracker()
        tracker.track_external(module, *(v for v in arguments.values() if isinstance(v, Tensor)))
        with tracker:
            getattr(module, method)(**arguments)
        return tracker.get_tracker_snapshot("peak")[at]["Total"]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    count = on_the_card
    if sys.argv[1] == "tracker":
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend("simgpu", backend_module=NoDevice())
        count = in_the_tracker
    print(json.dumps({name: count(component) for name, component in COMPONENTS.items()}))
