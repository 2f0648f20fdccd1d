"""A parameter at rest: a DTensor that holds this rank's rows, and computes with all of them.

Operations that train or inspect a parameter (in-place ones, `*_like`, optimizers' foreach and
fused kernels, attributes) see the shard. Any other operation sees the whole parameter, gathered by
the dialect op and differentiable, so that code outside of a compiled graph is slower, never wrong.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_any, tree_map

from zcompile import dialect
from zcompile._torch import DTensorSpec, TensorMeta, disable_dynamo, in_tracer, no_torch_function
from zcompile.errors import ZeroWarning
from zcompile.layout import owned_rows


@dataclass(frozen=True)
class ParamSpec:
    """What the ops need to know of one parameter.

    name: as in `model.named_parameters()`; shape: of the whole parameter; dtype: of gathered
    values; reduce_dtype: gradients are summed in it; group: a `comm.Group`'s name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    group: str
    sharded: bool

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (Shard(0),) if self.sharded else (Replicate(),)


def unsharded(local: Tensor, spec: ParamSpec) -> Tensor:
    """The whole parameter from this rank's part, differentiable. local: (owned rows, *rest)"""
    if spec.sharded:
        return dialect.UNSHARD(
            local, spec.shape[0], spec.dtype, spec.reduce_dtype, spec.group, spec.name
        )
    return dialect.REPLICATE(local, spec.dtype, spec.reduce_dtype, spec.group, spec.name)


class ZeroParameter(DTensor):
    """See the module's text. `spec` is a ParamSpec."""

    spec: ParamSpec

    @staticmethod
    def make(
        local: Tensor, spec: ParamSpec, mesh: DeviceMesh, requires_grad: bool
    ) -> ZeroParameter:
        """A parameter around this rank's rows. local: (owned rows, *rest), contiguous."""
        param = ZeroParameter(local, _dtensor_spec(local, spec, mesh), requires_grad=requires_grad)
        param.spec = spec
        param._is_param = True  # what isinstance(x, nn.Parameter) looks at
        return param

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> ZeroParameter:
        plain = DTensor.__tensor_unflatten__(inner, context, size, stride)
        return ZeroParameter(plain._local_tensor, plain._spec, requires_grad=plain.requires_grad)

    @classmethod
    @disable_dynamo
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not in_tracer():
            if _changes_first(func):
                args = (args[0], *tree_map(lambda v: _laid_out_like(args[0], v), args[1:]))
            elif not (_on_shard(func) or tree_any(_is_plain_dtensor, (args, kwargs))):
                args, kwargs = tree_map(_whole, (args, kwargs))
        with no_torch_function():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved like the DTensor it is, so that files do not depend on this class.
        with no_torch_function():
            plain = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ZeroParameter:
        if id(self) in memo:
            return memo[id(self)]
        with no_torch_function(), torch.no_grad():
            local = self._local_tensor.clone()
            copy = ZeroParameter.make(local, self.spec, self.device_mesh, self.requires_grad)
        memo[id(self)] = copy
        return copy


def shard_of(full: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> Tensor:
    """A copy of the rows of `full` that this rank owns (all of them if replicated)."""
    if not spec.sharded:
        return full.detach().clone(memory_format=torch.contiguous_format)
    first, last = owned_rows(full.shape[0], mesh.size(), mesh.get_local_rank())
    return full.detach()[first:last].clone(memory_format=torch.contiguous_format)


def state_dtensor(full: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> DTensor:
    """A tensor of the parameter's shape, such as a moment, laid out like the parameter."""
    local = shard_of(full, spec, mesh)
    return DTensor(local, _dtensor_spec(local, spec, mesh), requires_grad=False)


def _dtensor_spec(local: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> DTensorSpec:
    stride = torch.empty(spec.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(spec.shape), stride, local.dtype)
    return DTensorSpec(mesh, spec.placements, tensor_meta=meta)


# Attribute getters that compute a view of the values rather than say something about the tensor.
_VIEW_GETTERS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_GRAD_SETTER = Tensor.grad.__set__
_ABOUT_THE_TENSOR = frozenset(
    ["__get__", "__set__", "__delete__", "__repr__", "__format__", "__len__", "__hash__", "__deepcopy__", "__reduce_ex__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device", "data_ptr", "untyped_storage", "is_floating_point", "is_complex", "is_contiguous", "is_shared", "is_inference", "is_signed", "is_same_size", "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "detach", "to_local", "full_tensor", "redistribute", "__tensor_flatten__", "zero_grad", "has_names", "dim_order", "__cuda_array_interface__"]
)
_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
)


def _changes_first(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__"))
        or func is _GRAD_SETTER
    )


def _laid_out_like(param: Any, value: Any) -> Any:
    """A whole plain tensor that is written into a parameter: each rank takes its part."""
    if type(param) is not ZeroParameter or not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) or tuple(value.shape) != param.spec.shape or value.dim() == 0:
        return value
    return state_dtensor(value, param.spec, param.device_mesh)


def _on_shard(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func not in _VIEW_GETTERS
    return (
        name in _ABOUT_THE_TENSOR
        or name.endswith("_like")
        or name.startswith(("_foreach", "_fused", "_amp_foreach"))
    )


def _is_plain_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor) and type(value) is not ZeroParameter


_warned: set[str] = set()
_expected = False


@contextlib.contextmanager
def gathers_expected() -> Iterator[None]:
    """No warning about gathers outside of a graph: this is one that the design calls for."""
    global _expected
    before, _expected = _expected, True
    try:
        yield
    finally:
        _expected = before


def _whole(value: Any) -> Any:
    if type(value) is not ZeroParameter:
        return value
    spec = value.spec
    if not _expected and spec.group not in _warned:
        _warned.add(spec.group)
        warnings.warn(
            f"parameter {spec.name!r} was gathered outside of a compiled graph (a graph break or "
            "code that is not compiled). The result is right; it costs one collective per use.",
            ZeroWarning,
            stacklevel=5,
        )
    return unsharded(value.to_local(grad_placements=spec.placements), spec)
