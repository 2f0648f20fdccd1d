"""A parameter at rest: a DTensor that holds this rank's rows, and computes with all of them.

Operations that train or inspect a parameter (in-place ones, `*_like`, optimizers' foreach and
fused kernels, attributes) see the shard. Any other operation sees the whole parameter, gathered by
the dialect op and differentiable, so that code outside of a compiled graph is slower, never wrong.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_any, tree_map

from zcompile import comm, dialect
from zcompile._torch import DTensorSpec, TensorMeta, disable_dynamo, in_tracer, no_torch_function
from zcompile.errors import ZeroError, ZeroWarning
from zcompile.layout import owned_rows


@dataclass(frozen=True)
class ParamSpec:
    """What the ops need to know of one parameter.

    name: as in `model.named_parameters()`; shape: of the whole parameter; dtype: of gathered
    values; reduce_dtype: gradients are summed in it; group: a `comm.Group`'s name; copied: a rank
    also holds its part in `dtype` (copies.py).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    group: str
    sharded: bool
    copied: bool = False

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


# What torch.optim keeps beside a parameter that is one number whatever the parameter's shape.
_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


class ZeroParameter(DTensor):
    """See the module's text. `spec` is a ParamSpec."""

    spec: ParamSpec
    # Whether a gathered copy may be written: not one of `param.data`, which is asked for to write.
    writable_whole = True

    @staticmethod
    def make(
        local: Tensor, spec: ParamSpec, mesh: DeviceMesh, requires_grad: bool
    ) -> ZeroParameter:
        """A parameter around this rank's rows. local: (owned rows, *rest), contiguous."""
        param = ZeroParameter(local, _dtensor_spec(local, spec, mesh), requires_grad=requires_grad)
        param.spec = spec
        param._is_param = True  # what isinstance(x, nn.Parameter) looks at
        if requires_grad:
            param.register_hook(_own_part(spec, mesh))
        return param

    def is_whole(self, key: str, value: Any) -> bool:
        """Whether an entry of an optimizer's state is of all of the parameter, not of a part."""
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or key in _COUNTERS:
            return False
        return tuple(value.shape) == self.spec.shape

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
            return _apply(func, args, kwargs)
        with no_torch_function():
            return func(*args, **kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """DTensor's own, which full_tensor() calls too, once every rank is about to do it."""
        if self.spec.sharded and not in_tracer():
            spec = self.spec
            dialect.agree(comm.find(spec.group), "full_tensor", spec.name, spec.shape, self.dtype)
        with no_torch_function():
            return super().redistribute(*args, **kwargs)

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


def gradient(local: Tensor, param: ZeroParameter) -> DTensor:
    """A gradient of which this rank holds these rows."""
    if local.dtype == param._local_tensor.dtype:
        return DTensor(local, param._spec, requires_grad=False)
    return _laid_out(local, param.spec, param.device_mesh)


def shard_of(full: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> Tensor:
    """A copy of the rows of `full` that this rank owns (all of them if replicated)."""
    if not spec.sharded:
        return full.detach().clone(memory_format=torch.contiguous_format)
    first, last = owned_rows(full.shape[0], mesh.size(), mesh.get_local_rank())
    return full.detach()[first:last].clone(memory_format=torch.contiguous_format)


def state_dtensor(full: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> DTensor:
    """A tensor of the parameter's shape, such as a moment, laid out like the parameter."""
    return _laid_out(shard_of(full, spec, mesh), spec, mesh)


def _laid_out(local: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> DTensor:
    return DTensor(local, _dtensor_spec(local, spec, mesh), requires_grad=False)


def _dtensor_spec(local: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> DTensorSpec:
    stride = torch.empty(spec.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(spec.shape), stride, local.dtype)
    return DTensorSpec(mesh, spec.placements, tensor_meta=meta)


# What an operation does to a parameter, by the operation's name

# Attribute getters that compute a view of the values rather than say something about the tensor.
_VIEW_GETTERS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_DATA_GETTER, _DATA_SETTER = Tensor.data.__get__, Tensor.data.__set__
_GRAD_SETTER = Tensor.grad.__set__
_ABOUT_THE_TENSOR = frozenset(
    "__get__ __set__ __delete__ __repr__ __format__ __len__ __hash__ __deepcopy__ __reduce_ex__ "
    "size dim ndimension numel nelement stride storage_offset element_size get_device data_ptr "
    "untyped_storage is_floating_point is_complex is_contiguous is_shared is_inference is_signed "
    "is_same_size backward grad register_hook register_post_accumulate_grad_hook retain_grad "
    "detach to_local full_tensor redistribute __tensor_flatten__ has_names dim_order".split()
)
_IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
)
# They fill a tensor with new values: the whole shape matters (a fan), the old values do not.
_FILLS = frozenset(
    "normal_ uniform_ random_ exponential_ geometric_ log_normal_ cauchy_ bernoulli_".split()
)

# What they write to an element depends on others, or on its index in the whole.
_ACROSS = frozenset(
    "fill_diagonal_ tril_ triu_ cumsum_ cumprod_ renorm_ index_fill_ index_copy_ index_add_ "
    "index_put_ index_reduce_ scatter_ scatter_add_ scatter_reduce_ masked_scatter_ put_ addmm_ "
    "addmv_ addr_ addbmm_ baddbmm_".split()
)


def _apply(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One operation that meets at least one ZeroParameter, outside of any tracer."""
    name = getattr(func, "__name__", "")
    target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    if name == "__setitem__" or name in _ACROSS or _fills(func, name):
        return _write_whole(func, target, args, kwargs)
    if func == _DATA_GETTER:
        data = ZeroParameter.make(target._local_tensor, target.spec, target.device_mesh, False)
        data.writable_whole = False
        return data
    if func == _DATA_SETTER and type(target) is ZeroParameter:
        if tuple(args[1].shape) != target.spec.shape:
            raise ZeroError(
                f"parameter {target.spec.name!r} is sharded as {target.spec.shape} and its data "
                f"cannot become {tuple(args[1].shape)}: resize it before the model is sharded"
            )
        with torch.no_grad():
            return target.copy_(args[1])
    if name.startswith("_fused") or (name.startswith("_foreach") and name.endswith("_")):
        args, kwargs = tree_map(_local_part, (args, kwargs))
    elif _is_in_place(func, name):
        if type(target) is ZeroParameter:
            if func != _GRAD_SETTER and tree_any(partial(_broadcasts, target), (args, kwargs)):
                return _write_whole(func, target, args, kwargs)
            args = tree_map(lambda value: _laid_out_like(target, value), args)
        else:
            args, kwargs = tree_map(_whole, (args, kwargs))
    elif not (_is_on_shard(func, name) or tree_any(_is_plain_dtensor, (args, kwargs))):
        args, kwargs = tree_map(_whole, (args, kwargs))
    with no_torch_function():
        return func(*args, **kwargs)


def _fills(func: Callable[..., Any], name: str) -> bool:
    return name in _FILLS or (_is_init(func) and name.endswith("_"))


def _is_init(func: Callable[..., Any]) -> bool:
    return getattr(func, "__module__", "") == "torch.nn.init"


def _is_in_place(func: Callable[..., Any], name: str) -> bool:
    return (
        name in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__"))
        or func == _GRAD_SETTER
    )


def _is_on_shard(func: Callable[..., Any], name: str) -> bool:
    if name == "__get__":
        return func not in _VIEW_GETTERS
    return name in _ABOUT_THE_TENSOR or name.endswith("_like") or name.startswith("_foreach")


def _is_plain_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor) and type(value) is not ZeroParameter


def _laid_out_like(param: ZeroParameter, value: Any) -> Any:
    """A whole plain tensor that is written into a parameter: each rank takes its part."""
    if isinstance(value, DTensor):
        _check_part(param, value)
        return value
    if not isinstance(value, Tensor):
        return value
    if tuple(value.shape) != param.spec.shape or value.dim() == 0:
        return value
    return state_dtensor(value, param.spec, param.device_mesh)


def _check_part(param: ZeroParameter, value: DTensor) -> None:
    """Of a file that one rank saved, another would take that rank's rows for its own."""
    theirs, ours = (
        (mesh.size(), mesh.get_coordinate()) for mesh in (value.device_mesh, param.device_mesh)
    )
    if param.spec.sharded and theirs != ours:
        where = lambda size, at: f"rank {(at or ['none'])[0]} of {size}"
        raise ZeroError(
            f"parameter {param.spec.name!r} is this rank's part ({where(*ours)}), and what is "
            f"written into it is the part of {where(*theirs)}: a rank's own model.state_dict(), "
            "saved with torch.save, holds its rows alone. Save zcompile.full_state_dict(model) on "
            "every rank, or model.state_dict() with torch.distributed.checkpoint"
        )


def _broadcasts(param: ZeroParameter, value: Any) -> bool:
    """Whether a plain tensor is of another shape than the parameter that it is written into."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return plain and value.dim() > 0 and tuple(value.shape) != param.spec.shape


def _local_part(value: Any) -> Any:
    """Elementwise work on tensors that are laid out alike needs no more than each rank's part."""
    if isinstance(value, DTensor) and not any(p.is_partial() for p in value.placements):
        return value._local_tensor
    return value


def _write_whole(func: Callable[..., Any], param: Any, args: Any, kwargs: Any) -> Any:
    """Write by way of the whole parameter: as on one device, whatever part of it a rank owns."""
    if type(param) is not ZeroParameter:
        args, kwargs = tree_map(_whole, (args, kwargs))
        with no_torch_function():
            return func(*args, **kwargs)
    if param.requires_grad and torch.is_grad_enabled() and not _is_init(func):
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    if _fills(func, func.__name__):
        whole = param._local_tensor.new_empty(param.spec.shape)
    else:
        with torch.no_grad():
            whole = _whole_at_rest(param).clone()  # what was gathered may be shared, or the shard
    swap = lambda value: whole if value is param else _whole_at_rest(value)
    args, kwargs = tree_map(swap, (args, kwargs))
    with no_torch_function():
        func(*args, **kwargs)
        if not param.spec.sharded:
            # Random values differ between ranks; a replicated parameter's must not.
            comm.broadcast(whole, comm.find(param.spec.group))
        param._local_tensor.copy_(shard_of(whole, param.spec, param.device_mesh))
    return param


def _whole_at_rest(value: Any) -> Any:
    """All of a parameter, in the dtype that it has at rest, and not the one it computes in."""
    if type(value) is not ZeroParameter:
        return value
    spec = replace(value.spec, dtype=value._local_tensor.dtype, copied=False)
    return unsharded(value.to_local(), spec)


_warned: set[str] = set()
_expected = False
_gathered_alone = 0


def gathered_alone() -> int:
    """How often a parameter was gathered outside of a compiled graph, in this process."""
    return _gathered_alone


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
    global _gathered_alone
    _gathered_alone += 1
    spec = value.spec
    if not _expected and spec.group not in _warned:
        _warned.add(spec.group)
        warnings.warn(
            f"parameter {spec.name!r} was gathered outside of a compiled graph (a graph break or "
            "code that is not compiled). The result is right; it costs one collective per use.",
            ZeroWarning,
            stacklevel=6,
        )
    # Without gradients the copy is made read-only (an inference tensor): a write through a view of
    # it, such as weight[2].zero_(), would be lost, and raises instead.
    lost = not (torch.is_grad_enabled() and value.writable_whole)
    with torch.inference_mode() if lost else contextlib.nullcontext():
        return unsharded(value.to_local(grad_placements=spec.placements), spec)


def _own_part(spec: ParamSpec, mesh: DeviceMesh) -> Callable[[Tensor], Tensor | None]:
    """A gradient hook for what reaches a parameter whole: an autograd.Function that is handed the
    parameter itself returns the gradient of all of it, on every rank another one."""

    def reduce(grad: Tensor | None) -> Tensor | None:
        if grad is None or isinstance(grad, DTensor):
            return None
        reduction = dialect.REDUCE_GRAD if spec.sharded else dialect.ALL_REDUCE_GRAD
        local = reduction(grad, grad.dtype, spec.reduce_dtype, spec.group, spec.name)
        return _laid_out(local, spec, mesh)

    return reduce
