"""Watching what the host does with its own tensors while copies may be running."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .geometry import traits_of
from .ordering import Ordering
from .storage import on_card
from .work import tensors_in

# They read the bytes without an operation.
_READS = {"tolist", "numpy"}


class HostWatch(TorchFunctionMode):
    """Tells `ordering` of host tensors that are read and written, through torch's functions."""

    def __init__(self, ordering: Ordering) -> None:
        super().__init__()
        self._ordering = ordering

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._ordering.has_copies_in_flight:
            return func(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        if not given or any(on_card(tensor) for tensor in given):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _READS:
            self._ordering.host_touches(given[0], name, writes=False)
            return func(*args, **kwargs)
        with _Operations(self._ordering):
            return func(*args, **kwargs)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ordering: Ordering) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ordering = ordering

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if not traits.is_view:
            written = [args[i] for i in traits.writes if i < len(args)]
            written += [kwargs[name] for name in traits.writes_by_name if name in kwargs]
            for tensor in tensors_in((*args, *kwargs.values())):
                if not on_card(tensor):
                    writes = any(tensor is each for each in tensors_in(written))
                    self._ordering.host_touches(tensor, func._schema.name, writes=writes)
        return func(*args, **kwargs)
