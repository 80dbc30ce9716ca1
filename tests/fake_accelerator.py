"""An accelerator without hardware: CPU memory behind the rules that a GPU has.

``register`` makes torch know the device ``npu`` for the remaining life of the process. Inside
``FakeAccelerator`` its tensors hold real numbers, which torch's CPU kernels compute. Operations
raise where a GPU raises, and what makes the host wait for a GPU, or copies from the host, is
counted. The counts are those of eager CUDA code: CUDA kernels of one operation are not modelled.
As with ``deterministic=true``, torch is in its deterministic mode.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from torch.utils.weak import WeakTensorKeyDictionary

from embodied_envs.base import tree

# Name for torch's device type PrivateUse1, which has no implementation of its own.
NAME = "npu"
ROOT = str(Path(__file__).parents[1])
CODE = (f"{ROOT}/embodied_ppo/", f"{ROOT}/envs/")
aten = torch.ops.aten

# Operations that launch no kernel on a GPU.
VIEWS = {
    *("view", "_unsafe_view", "expand", "transpose", "t", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "chunk", "permute", "alias", "detach", "unbind"),
    *("_reshape_alias", "as_strided", "unfold", "diagonal", "empty", "new_empty", "empty_like"),
    *("empty_strided", "new_empty_strided", "lift_fresh", "set_"),
}

# Operations whose result, or its size, the host waits for.
HOST_READS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}

# Operations whose second argument is a list of indices.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}

# Operations made of others for which a GPU has one kernel in inference mode.
ONE_KERNEL = {"scaled_dot_product_attention", "rms_norm"}


# Operations that CUDA refuses with ``torch.use_deterministic_algorithms``, whose documentation has
# this list; for some arguments, ``cumsum`` and ``scatter_reduce``, too. Those that have another
# algorithm in this mode are in ``_is_unordered``.
REFUSED = {
    *(f"{size}_pool{n}d_backward" for size in ("_adaptive_avg", "adaptive_max") for n in (2, 3)),
    *("avg_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
    *("max_unpool2d", "max_unpool3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *(f"upsample_{mode}_backward" for mode in ("linear1d", "bilinear2d", "bicubic2d")),
    *("upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward"),
    *("_upsample_bicubic2d_aa_backward", *(f"reflection_pad{n}d_backward" for n in (1, 2, 3))),
    *("nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward", "put", "put_", "histc"),
    *("_embedding_bag_backward", "_embedding_bag_dense_backward", "bincount", "median", "kthvalue"),
}


class DeviceError(RuntimeError):
    """An operation that a GPU refuses, or that the current context forbids."""


class DeviceTensor(Tensor):
    """A tensor on the fake accelerator; ``host`` holds its numbers."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        x = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        x.host = host
        return x

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: DeviceTensor) -> None:
        Tensor.data.__set__(self, new)  # pyright: ignore[reportAttributeAccessIssue]
        self.host = new.host

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) not in memo:
            x: Any = self.detach().clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(x, self.requires_grad) if is_parameter else x
        return memo[id(self)]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.ndim == 0 else repr(self), spec)

    def numpy(self, *, force: bool = False) -> Any:
        raise DeviceError(f"numpy() of a tensor on {NAME}; {_place()}")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"DeviceTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert FakeAccelerator.current is not None, "an operation outside of FakeAccelerator"
        return FakeAccelerator.current.execute(func, args, kwargs or {})


class DeviceGenerator(torch.Generator):
    """A random number generator of the fake device that draws the numbers of a CPU generator."""

    own_device: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        generator = super().__new__(cls)
        generator.own_device = torch.device(device)
        return generator

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("own_device" if name == "device" else name)


class _Functions(TorchFunctionMode):
    """Handle functions whose arguments or copies torch does not pass to dispatch modes.

    Tensors of Python numbers are made on the CPU and uploaded, as on CUDA. A generator must be on
    the device of the random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        # Tensors in pinned memory.
        self.pinned = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if isinstance(generator, DeviceGenerator):
            device = args[0].device if args and isinstance(args[0], Tensor) else None
            device = torch.device(kwargs.get("device") or device or "cpu")
            if device.type != generator.device.type:
                where = f"a generator on {generator.device} for random numbers on {device}"
                raise DeviceError(f"{where}; {_place()}")
        if func is nn.functional.scaled_dot_product_attention and torch.is_grad_enabled():
            if any(isinstance(x, DeviceTensor) and x.requires_grad for x in args[:3]):
                assert FakeAccelerator.current is not None
                FakeAccelerator.current.unordered[f"{_place()} attention"] += 1
        if func not in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            return func(*args, **kwargs)
        device, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if func is Tensor.new_tensor:
            like, *args = args
            kwargs.setdefault("dtype", like.dtype)
            func, device = torch.tensor, device or like.device
        x = func(*args, **kwargs)
        if pinned:  # the host has no driver that could pin memory
            self.pinned[x] = True
        return x if device is None else x.to(device)


class FakeAccelerator(TorchDispatchMode):
    """Context in which tensors can be on the device ``npu``.

    Attributes:
        operations: Operation -> calls that a GPU would launch kernels for.
        host_reads: "file:function" of our code -> times the host waits for the device.
        uploads: "file:function" of our code -> copies from memory that is not pinned.
        unordered: "file:function operation" -> calls whose result can differ between two runs.
        refused: "file:function operation" -> calls that raise on CUDA with deterministic=true.
        strict: Whether a host read or an upload raises DeviceError.
    """

    current: FakeAccelerator | None = None

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.host_reads, self.uploads = Counter(), Counter(), Counter()
        self.unordered, self.refused = Counter[str](), Counter[str]()
        self.strict = False
        self._functions = _Functions()

    def __enter__(self) -> FakeAccelerator:
        register()
        FakeAccelerator.current = self
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        self._generator, torch.Generator = torch.Generator, DeviceGenerator
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)
        torch.Generator = self._generator
        torch.use_deterministic_algorithms(False)
        FakeAccelerator.current = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return torch.device(NAME, 0)

    @contextmanager
    def no_host_access(self) -> Iterator[None]:
        """Raise DeviceError for host reads and uploads, as while a CUDA graph is recorded."""
        before, self.strict = self.strict, True
        try:
            yield
        finally:
            self.strict = before

    def reset(self) -> None:
        """Set all counts to 0."""
        for counts in (self.operations, self.host_reads, self.uploads):
            counts.clear()

    # ----------------------------------------------------------------------------------- operations
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.execute(func, args, kwargs or {})

    def execute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation on the numbers of its arguments."""
        leaves = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in leaves if isinstance(x, DeviceTensor)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == NAME
        if not on_device and not to_device:
            kwargs.pop("pin_memory", None)  # the host has no driver that could pin memory
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name not in ONE_KERNEL and func._can_decompose():
            # Tensors of inference mode arrive here with operations that are made of others.
            with _Nested(self):
                return func.decompose(*args, **kwargs)
        if name not in VIEWS:
            self.operations[name] += 1
        if torch.are_deterministic_algorithms_enabled() and _is_refused(name, args, kwargs):
            self.refused[f"{_place()} {name}"] += 1  # raised here, it would end the process
        if _is_unordered(name, args, kwargs):
            self.unordered[f"{_place()} {name}"] += 1
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if name == "_to_copy" and not to_device and target is not None:
            if not kwargs.get("non_blocking"):
                self._record(self.host_reads, name)
            return func(args[0].host, **kwargs)
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name == "_fused_sdp_choice":
            return 0  # torch.nn.attention.SDPBackend.MATH, which is made of other operations
        self._check(name, args, kwargs, leaves)
        return self._run(func, args, kwargs)

    def _check(self, name: str, args: Any, kwargs: dict[str, Any], leaves: list[Tensor]) -> None:
        """Count host reads and uploads, and raise DeviceError for tensors on the CPU."""
        if name in HOST_READS or (name == "repeat_interleave" and not kwargs.get("output_size")):
            self._record(self.host_reads, name)
        indices = [x for x in args[1] if x is not None] if name in INDEXING else []
        # An assignment of one number to a mask is a masked fill.
        fills = name in ("index_put", "index_put_") and args[2].numel() == 1
        for x in indices:
            if x.dtype == torch.bool and not fills:
                self._record(self.host_reads, f"{name} with a mask")
        for x in leaves:
            if isinstance(x, DeviceTensor):
                continue
            if name == "_to_copy" and kwargs.get("non_blocking") and x in self._functions.pinned:
                continue
            if name == "_to_copy" or any(x is index for index in indices):
                self._record(self.uploads, name)
            elif x.ndim and name not in ("lift_fresh", "set_"):
                raise DeviceError(f"{name}: a tensor on the CPU, others on {NAME}; {_place()}")

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run on the host and wrap the results; an argument that is returned stays the same."""
        wrapper: dict[int, DeviceTensor] = {}

        def unwrap(x: Any) -> Any:
            if isinstance(x, DeviceTensor):
                wrapper[id(x.host)] = x
                return x.host
            return x

        args, kwargs = tree.map(unwrap, (args, kwargs))
        out = func(*args, **kwargs)

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in wrapper:
                return wrapper[id(x)]
            with torch.inference_mode(x.is_inference()):  # a view of a weight is no such tensor
                return DeviceTensor(x)

        return tree.map(wrap, out)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy between any two devices."""
        from_device, to_device = (isinstance(x, DeviceTensor) for x in (source, target))
        if from_device and not to_device and not non_blocking:
            self._record(self.host_reads, "copy_")
        if to_device and not from_device and source.ndim:
            self._record(self.uploads, "copy_")
        a, b = (x.host if isinstance(x, DeviceTensor) else x for x in (target, source))
        a.copy_(b)
        return target

    def _record(self, counts: Counter[str], name: str) -> None:
        if self.strict:
            raise DeviceError(f"{name}: the host waits for the device or copies to it; {_place()}")
        counts[_place()] += 1


def _is_refused(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether CUDA has no deterministic kernel of an operation."""
    if name == "cumsum":
        return (kwargs.get("dtype") or args[0].dtype).is_floating_point
    return name in REFUSED or (name.startswith("scatter_reduce") and "prod" in args)


def _is_unordered(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a CUDA kernel adds or overwrites in an order that differs between runs.

    It does where an index names a place twice, except to add 0; ``index_put`` with ``accumulate``
    sorts. ``cumsum`` of one row adds blocks in any order, of several rows each in order.
    """
    args = tree.map(lambda x: x.host if isinstance(x, DeviceTensor) else x, list(args))
    if name == "cumsum":
        dtype, row = kwargs.get("dtype") or args[0].dtype, args[0].shape[args[1]]
        return dtype.is_floating_point and args[0].numel() == row > 1
    if name == "convolution_backward":
        return True
    method = name.strip("_").removesuffix("_impl")
    if method not in ("index_put", "index_add", "index_copy", "scatter", "scatter_add"):
        return False
    number = torch.arange(args[0].numel()).view(args[0].shape)
    if method == "index_put":
        places = number[tuple(slice(None) if x is None else x for x in args[1])]
        ordered = args[2].numel() == 1 or (len(args) > 3 and args[3])
    else:
        read = number.gather if method.startswith("scatter") else number.index_select
        places, ordered = read(args[1], args[2]), not isinstance(args[3], Tensor)
    if method.endswith("_add"):
        places = places[args[3][tuple(map(slice, places.shape))] != 0]
    return not ordered and len(places.unique()) < places.numel()


class _Nested(TorchDispatchMode):
    """Pass operations to an accelerator whose context already is active."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.accelerator.execute(func, args, kwargs or {})


def _place() -> str:
    """Return "file:function" of the innermost function of the packages on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(CODE):
            return f"{name[len(ROOT) + 1 :]}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


class _Backend(_DummyBackendModule):
    """The module ``torch.npu``."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


# Operations that autocast computes in its type. Those that it computes in float32 are left out.
LOW_PRECISION = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "convolution", "conv2d"),
    "scaled_dot_product_attention",
)
_libraries: list[torch.library.Library] = []


def _register_autocast() -> None:
    """Register the casts of autocast, without its cache of weights."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for name in LOW_PRECISION:
        library.impl(name, _cast_arguments(getattr(aten, name).default), "AutocastPrivateUse1")
    _libraries.extend((everything, library))  # a library ends with its object


def _cast_arguments(operation: Any) -> Any:
    """Return an operation that casts its arguments to autocast's type."""
    key: Any = torch._C.DispatchKey
    keys = torch._C.DispatchKeySet(key.AutocastPrivateUse1)

    def cast(x: Any) -> Any:
        is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(torch.get_autocast_dtype(NAME)) if is_cast else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree.map(cast, args), **tree.map(cast, kwargs))

    return run


_registered = False


def register() -> None:
    """Register the device, once and for the remaining life of this process."""
    global _registered
    if not _registered:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
        _register_autocast()
        _registered = True


def to_device(x: Any) -> Any:
    """Return a module, changed in place, or a tree of tensors on the fake accelerator."""
    return x.to(NAME) if isinstance(x, nn.Module) else tree.map(lambda y: y.to(NAME), x)


def to_host(x: Any) -> Any:
    """Return a tree of tensors on the CPU."""
    return tree.map(Tensor.cpu, x)
