"""A model's parameters become shards in place, and everything that holds them follows.

Each parameter is replaced by a ZeroParameter; each module that owns one gets a subclass of its
class whose properties read the parameter through the dialect while a compiler traces. Optimizers
and containers that held the old tensors are re-pointed to the new ones.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zcompile import comm, machine
from zcompile._torch import no_torch_function
from zcompile.control import fingerprint
from zcompile.errors import ZeroError, ZeroWarning
from zcompile.options import Options
from zcompile.owners import live_optimizers
from zcompile.parameter import ParamSpec, ZeroParameter, shard_of, state_dtensor, unsharded
from zcompile.specs import spec_of, warn_of_no_effect, with_threshold
from zcompile.world import World, join

# A module's parameter as compiled code sees it: (module, name in it, at rest, spec).
Read = Callable[[nn.Module, str, ZeroParameter, ParamSpec], Any]

_casting: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # whose inputs are cast

Initialiser = Callable[[nn.Module], Any]


def shard(
    model: nn.Module,
    options: Mapping[str, Any] | Options | None = None,
    *,
    init: Initialiser | None = None,
    **named: Any,
) -> nn.Module:
    """Shard a model in place, ahead of its first compiled call, and return it.

    Parameters on `meta` are made module by module, with `init(module)` if given, else with the
    module's own `reset_parameters()`, and sharded before the next module is made: the whole model
    never exists on one rank. Optimizers that hold the parameters are re-pointed.

    Args:
        options: as for `torch.compile(..., options=...)`; single ones also by name: `stage=2`.
        init: fills the parameters (and buffers) that `module` itself owns.

    Raises:
        ZeroError: `model` is not a module, cannot be re-classed, has meta tensors that nothing
            initialises, or differs between ranks.
        OptionError: see `Options`.
    """
    if not isinstance(model, nn.Module):
        raise ZeroError(
            f"zcompile.shard needs a torch.nn.Module, got {type(model).__name__}: {model!r:.80}"
        )
    if isinstance(options, Options):
        chosen = Options.parse({**dict(options), **named}) if named else options
    else:
        chosen = Options.parse({**(options or {}), **named})
    root = getattr(model, "_orig_mod", model)
    for name, param in root.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ZeroError(
                f"parameter {name!r} has no shape yet: call the lazy module once before it is "
                "sharded or compiled"
            )
    world = join(chosen, _device(root))
    every = list(root.parameters())
    if every and all(is_sharded(p) for p in every):
        warn_of_no_effect(chosen, every)
    chosen = with_threshold(chosen, every, world.group.world)
    _agree_on_names(root, world)
    # A first call may be an evaluation; what is made here must train all the same.
    with torch.inference_mode(False), torch.no_grad():
        _materialise(root, init, world, chosen)
        _replace(_plain_parameters(root), chosen, world)
        _sync_buffers(root, chosen, world)
    for module in root.modules():
        read_through_dialect(module)
    computes_in = {p.spec.dtype for p in root.parameters() if isinstance(p, ZeroParameter)}
    if chosen.cast_inputs and chosen.param_dtype in computes_in and root not in _casting:
        _casting.add(root)
        cast_inputs(root, chosen.param_dtype)
    machine.learn(world.group, _device(root), chosen, _lines(root))
    return model


def is_sharded(param: Any) -> bool:
    return type(param) is ZeroParameter


def _device(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    ready = dist.is_initialized()
    cuda = dist.get_backend() == "nccl" if ready else torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _plain_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in root.named_parameters() if not is_sharded(p)}


def _agree_on_names(root: nn.Module, world: World) -> None:
    control, lines = world.group.control, _lines(root)
    if control is not None:
        control.agree(fingerprint(lines), lambda: lines)


def _lines(root: nn.Module) -> list[str]:
    return [
        f"parameter {name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in root.named_parameters()
    ]


# Making and replacing parameters


def _materialise(root: nn.Module, init: Initialiser | None, world: World, options: Options) -> None:
    """Make and shard the parameters that are on meta, one owning module at a time."""
    device = _device(root)
    names = {id(p): name for name, p in root.named_parameters()}
    for path, module in root.named_modules():
        own = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
        buffers = {n: b for n, b in module._buffers.items() if b is not None and b.is_meta}
        if not own and not buffers:
            continue
        fill = partial(init, module) if init else getattr(module, "reset_parameters", None)
        if fill is None:
            tensors = ", ".join(f"{path}.{n}".lstrip(".") for n in (*own, *buffers))
            raise ZeroError(
                f"{tensors} is on meta and {type(module).__name__} has no reset_parameters(); "
                "give zcompile.shard(model, init=...) a function that fills it"
            )
        made = {}
        for name, meta in own.items():
            made[name] = nn.Parameter(torch.empty_like(meta, device=device), meta.requires_grad)
            module._parameters[name] = made[name]
        for name, meta in buffers.items():
            module._buffers[name] = torch.empty_like(meta, device=device)
        fill()
        for name, meta in own.items():
            new = {names[id(meta)]: made[name]}
            _replace(new, options, world, stands_for={names[id(meta)]: meta})


def _replace(
    params: Mapping[str, nn.Parameter],
    options: Options,
    world: World,
    stands_for: Mapping[str, Tensor] | None = None,
) -> None:
    """Swap parameters for shards, everywhere they are held. `stands_for`: the meta originals."""
    names, olds = list(params), list(params.values())
    news = []
    optimizers = live_optimizers()
    for name, old in params.items():
        if old.is_sparse or old.layout is not torch.strided:
            raise ZeroError(f"parameter {name!r} has layout {old.layout}; only dense ones shard")
        spec = spec_of(name, old, options, world.group.name)
        full = old.detach().contiguous()
        if options.sync:
            comm.broadcast(full, world.group)
        local = shard_of(full, spec, world.mesh)
        new = ZeroParameter.make(local, spec, world.mesh, old.requires_grad)
        if old.grad is not None:
            new.grad = state_dtensor(_mean(old.grad, world), spec, world.mesh)
        _move_hooks(old, new)
        for optimizer in optimizers:
            _shard_state(optimizer, old, new)
        news.append(new)
    _repoint(olds, news)
    if stands_for:
        _repoint(list(stands_for.values()), news)
    for name, old in zip(names, olds, strict=True):
        # Its memory is free, and whoever still holds it meets an error, not stale values.
        old.grad = None
        old.data = old.data.new_empty(0)
        old.parameter_name = name
        old.__class__ = Stale


class Stale(nn.Parameter):
    """What is left of a parameter that was sharded, where a reference could not be re-pointed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__repr__":
            return "<a parameter that was sharded since>"
        with no_torch_function():
            names = [a.parameter_name for a in args if type(a) is Stale]
        raise ZeroError(
            f"this is parameter {', '.join(names)} as it was before it was sharded, kept in a "
            "variable, a tuple or a slot: read it again from the model. zcompile.shard(model) "
            "ahead of such references avoids the question"
        )


def _move_hooks(old: Tensor, new: ZeroParameter) -> None:
    """Hooks that the user put on a parameter; they get the gradient as this rank's part."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def _mean(grad: Tensor, world: World) -> Tensor:
    if world.group.pg is None:
        return grad
    total = grad.clone()
    dist.all_reduce(total, group=world.group.pg)
    return total / world.group.world


def _sync_buffers(root: nn.Module, options: Options, world: World) -> None:
    if options.sync:
        for buffer in root.buffers():
            whole = buffer.detach().contiguous()
            comm.broadcast(whole, world.group)
            if whole.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(whole)


# Who holds a parameter


def _shard_state(optimizer: torch.optim.Optimizer, old: Tensor, new: ZeroParameter) -> None:
    if old not in optimizer.state:
        return
    state = optimizer.state.pop(old)
    for key, value in state.items():
        if new.is_whole(key, value):
            state[key] = state_dtensor(value, new.spec, new.device_mesh)
    optimizer.state[new] = state


def _repoint(olds: list[Any], news: list[Any]) -> None:
    """Replace tensors in every list, dict, set, tuple, closure and attribute that holds them, as if
    they had become the new ones: a tensor cannot turn into one of another class in place."""
    if not olds:
        return
    memo = {id(old): new for old, new in zip(olds, news, strict=True)}
    ours = {id(olds), id(news), id(memo)}
    holders = [h for h in gc.get_referrers(*olds) if id(h) not in ours]
    for holder in holders:
        _replace_in(holder, memo)
    # A tuple cannot change; it is replaced where it stands, such as in list(named_parameters()).
    tuples = [h for h in holders if type(h) is tuple]
    if tuples:
        rebuilt = {id(t): tuple(memo.get(id(v), v) for v in t) for t in tuples}
        ours = {id(tuples), id(holders)}
        for holder in gc.get_referrers(*tuples):
            if id(holder) not in ours:
                _replace_in(holder, rebuilt)


def _replace_in(holder: Any, memo: Mapping[int, Any]) -> None:
    if type(holder) is list:
        for index, value in enumerate(holder):
            if id(value) in memo:
                holder[index] = memo[id(value)]
    elif isinstance(holder, dict):
        if any(id(key) in memo for key in holder):
            pairs = [(memo.get(id(k), k), memo.get(id(v), v)) for k, v in holder.items()]
            holder.clear()
            holder.update(pairs)
            return
        for key, value in list(holder.items()):
            if id(value) in memo:
                dict.__setitem__(holder, key, memo[id(value)])
    elif type(holder) is set:
        for value in [v for v in holder if id(v) in memo]:
            holder.discard(value)
            holder.add(memo[id(value)])
    elif type(holder) is CellType:
        holder.cell_contents = memo[id(holder.cell_contents)]
    elif isinstance(getattr(holder, "__dict__", None), dict):
        # An instance's attributes: since Python 3.11 they need not be in a dict that gc sees.
        for name, value in list(vars(holder).items()):
            if id(value) in memo:
                vars(holder)[name] = memo[id(value)]


# How a module reads its parameters


def read_through_dialect(module: nn.Module) -> None:
    """Give the module a subclass of its class in which sharded parameters are properties.

    One class per module: what a property returns is constant under its class, so a compiler needs
    no guard beyond the one on the class.
    """
    specs = _specs(module)
    if specs and type(module).__dict__.get("_zero_specs") != specs:
        give_form(module, "", read_shard)


def _specs(module: nn.Module) -> dict[str, ParamSpec]:
    return {n: p.spec for n, p in module._parameters.items() if type(p) is ZeroParameter}


def give_form(module: nn.Module, form: str, read: Read) -> None:
    """Let a compiler see another reading of the module's sharded parameters. The class of each form
    is made once, so that going back to one compiles nothing anew. "", `read_shard`: as ever."""
    specs = _specs(module)
    now = type(module).__dict__
    if not specs or (now.get("_zero_specs") == specs and now["_zero_form"] == form):
        return
    forms = vars(module).setdefault("_zero_forms", {})
    if form in forms and forms[form].__dict__["_zero_specs"] == specs:
        module.__class__ = forms[form]
        return
    members = {
        "_zero_specs": specs,
        "_zero_form": form,
        "_apply": _apply_in_place,
        "__reduce_ex__": _refuse_pickle,
        "__copy__": lambda self: _copied(self, dict(self.__dict__)),
        "__deepcopy__": _deep_copied,
    }
    readers = {name: _reader(name, spec, read) for name, spec in specs.items()}
    give_readers(module, readers, members)
    forms[form] = type(module)


def give_readers(
    module: nn.Module,
    readers: Mapping[str, Callable[[nn.Module], Any]],
    members: Mapping[str, Any] | None = None,
) -> None:
    """Re-class a module so that its parameters are properties, in place of those of an earlier
    sharding. members: further attributes of the class."""
    base = type(module)
    if "_zero_specs" in base.__dict__:
        # A class made below has a base, which typing cannot know.
        base = base.__base__  # type: ignore[assignment]
    named: dict[str, Any] = {name: property(read) for name, read in readers.items()}
    if isinstance(module, nn.RNNBase):
        named["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    named |= members or {}
    named |= {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    try:
        module.__class__ = type(base.__name__, (base,), named)
    except TypeError as error:
        raise ZeroError(
            f"{base.__name__} cannot be given a subclass in place ({error}); modules with "
            "__slots__ and scripted modules cannot be sharded"
        ) from error


def read_shard(module: nn.Module, name: str, param: ZeroParameter, spec: ParamSpec) -> Tensor:
    return unsharded(param.to_local(grad_placements=spec.placements), spec)


def _reader(name: str, spec: ParamSpec, in_graph: Read) -> Callable[[nn.Module], Any]:
    shape = spec.shape

    def read(self: nn.Module) -> Any:
        param = self._parameters[name]
        if param is None:
            return None
        if not isinstance(param, ZeroParameter) or tuple(param.shape) != shape:
            raise ZeroError(
                f"parameter {spec.name!r} was sharded as {shape} and is now {tuple(param.shape)} "
                f"({type(param).__name__}): it was replaced after sharding. Call "
                "zcompile.shard(model) again, or change its values in place"
            )
        if torch.compiler.is_compiling():
            return in_graph(self, name, param, spec)
        return param

    return read


def _flat_weights(self: nn.Module) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _refuse_pickle(self: nn.Module, protocol: Any) -> Any:
    raise ZeroError(
        "a sharded module cannot be pickled whole: save zcompile.full_state_dict(model), or "
        "model.state_dict() with torch.distributed.checkpoint"
    )


def _copied(module: nn.Module, attributes: dict[str, Any]) -> nn.Module:
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(attributes)
    return copied


def _deep_copied(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copied = memo[id(self)] = _copied(self, {})
    copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
    return copied


def _apply_in_place(
    self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    """What `module.to(...)`, `.float()` and the like call: a sharded parameter keeps its dtype and
    device, which its plan was made for."""
    own = {n: p for n, p in self._parameters.items() if type(p) is ZeroParameter}
    for param in own.values():
        local = param._local_tensor
        result = function(local)
        if result.dtype != local.dtype or result.device != local.device:
            raise ZeroError(
                f"parameter {param.spec.name!r} is sharded as {local.dtype} on {local.device} and "
                f"cannot become {result.dtype} on {result.device}: cast or move the model before "
                "it is compiled, or use the option param_dtype for mixed precision"
            )
        if result is not local:
            local.copy_(result)
    for name in own:
        self._parameters[name] = None
    try:
        return super(type(self), self)._apply(function, recurse)
    finally:
        self._parameters.update(own)


def cast_inputs(root: nn.Module, dtype: torch.dtype) -> None:
    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def one(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        return torch.utils._pytree.tree_map(one, (args, kwargs))

    root.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)


def warn_unowned(params: Iterable[Tensor]) -> None:
    """Parameters that no live module owns stay whole, and their gradients local."""
    shapes = ", ".join(str(tuple(p.shape)) for p in params)
    warnings.warn(
        f"parameters of shape {shapes} belong to no module: they stay replicated and their "
        "gradients are NOT averaged over the ranks. Register them on a module.",
        ZeroWarning,
        stacklevel=3,
    )
