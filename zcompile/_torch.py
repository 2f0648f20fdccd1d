"""The private torch APIs that zcompile touches, all in one place. Checked on torch 2.13.0.

| what | why there is no public way |
|---|---|
| compile_fx, compile_fx_inner, CustomPartitionerFn | Inductor with a pass between AOT and it |
| aot_autograd, min_cut_rematerialization_partition | the same pipeline without Inductor |
| _BoxedCodeGen | an interpreted graph that frees its inputs as it goes |
| OptimizedModule, OptimizeContext | what is being called, and with which backend and options |
| callback_handler | the moment before a frame is traced |
| convert_frame's `code`, reset_code | a new plan is compiled in place of the one that runs |
| RestartAnalysis, SkipFrame | Dynamo's control flow, which passes through backends |
| Unsupported, compile_wrapper's closure | a compiled optimizer.step becomes a fused one |
| ShortenTraceback | an error that reaches the user as it is |
| TracingContext, detect_fake_mode | whether a tracer reads a parameter, and its fake mode |
| _get_default_store | the rendezvous store |
| FakeStore, register_process_group | a dumped graph runs alone |
| FakeTensorMode, unset_fake_temporarily | tracing a model that has shapes and no values |
| DTensorSpec, TensorMeta | a DTensor around a local shard, with no communication |
| OpOverload, HigherOrderOperator, set_grad_enabled | what a node of a graph calls |
| make_fx, select_decomp_table | tracing arithmetic into a graph as Inductor expects it |
| ShapeEnv, ConstantSource, DimDynamic | numbers that stay symbols while an update is traced |
| _compile_session_context | optimizers take the branches that they take under torch.compile |
| CppCodeCache | C++ built by the compiler that Inductor found, with its flags, kept on disk |
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._C._distributed_c10d import _register_process_group as register_process_group
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.source import ConstantSource
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.codecache import CppCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = [
    "COMPILER_CONTROL_FLOW",
    "ConstantSource",
    "CustomPartitionerFn",
    "DTensorSpec",
    "DimDynamic",
    "FakeStore",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OptimizeContext",
    "OptimizedModule",
    "ShapeEnv",
    "TensorMeta",
    "_BoxedCodeGen",
    "_get_default_store",
    "aot_autograd",
    "at_the_end_of_backward",
    "backward_pass",
    "before_each_call",
    "before_each_compile",
    "code_being_compiled",
    "compile_fx",
    "compile_fx_inner",
    "compiled_call",
    "compiling",
    "disable_dynamo",
    "enclosing_fake_mode",
    "forget_compiled",
    "in_tracer",
    "inductor_settings",
    "load_cpp",
    "make_fx",
    "min_cut_rematerialization_partition",
    "no_torch_function",
    "original_backend",
    "redirect_compiled",
    "register_process_group",
    "saved_tensors_first",
    "select_decomp_table",
    "set_grad_enabled",
    "shortened",
    "step_pre_hooks",
    "unset_fake_temporarily",
    "without_autograd_cache",
    "without_garbage_collection",
]

_COMPILES_IN = "torch._dynamo.convert_frame"

# Exceptions by which Dynamo steers itself; a backend must let them pass.
COMPILER_CONTROL_FLOW = (RestartAnalysis, SkipFrame)

disable_dynamo = torch._dynamo.disable
compiling = torch.compiler._compile_session_context
load_cpp = CppCodeCache.load
set_grad_enabled = torch._C._set_grad_enabled
no_torch_function = torch._C.DisableTorchFunctionSubclass


def inductor_settings() -> Collection[str]:
    """The names of Inductor's settings."""
    return inductor_config._config.keys()  # config.get_config_copy() leaves out what has an alias


def in_tracer() -> bool:
    """True while AOTAutograd or Dynamo's fake propagation runs operations on our parameters."""
    return TracingContext.try_get() is not None


@contextlib.contextmanager
def without_autograd_cache() -> Iterator[None]:
    """Trace anew in every process.

    AOTAutograd's on-disk cache does not see the passes that run between it and Inductor, so two
    stages would load each other's graph. Inductor's own cache stays on: its key is the graph that
    our passes produced.
    """
    with functorch_config.patch(enable_autograd_cache=False):
        yield


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For tracing a large model: it makes millions of objects that stay, and the collector would
    walk them over and over, for a third of the time. Dynamo collects by itself too."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch._dynamo.config.patch(run_gc_after_compile=False):
            yield
    finally:
        if enabled:
            gc.enable()


def enclosing_fake_mode(*values: Any) -> FakeTensorMode:
    """The fake mode of the graph that these values come from, or a new one."""
    return detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)


class _Kept(list):
    """Callbacks, of which those in `kept` outlive clear()."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.kept: list[Any] = []

    def clear(self) -> None:
        self[:] = self.kept


def before_each_compile(callback: Callable[[Any], None]) -> None:
    """Call `callback` whenever Dynamo is about to trace a frame, also after torch._dynamo.reset(),
    which forgets every callback although compiled functions remain and compile anew."""
    if not isinstance(callback_handler.start_callbacks, _Kept):
        callback_handler.start_callbacks = _Kept(callback_handler.start_callbacks)
    callback_handler.start_callbacks.kept.append(callback)
    callback_handler.start_callbacks.append(callback)


def before_each_call(backend: Any, callback: Callable[[], None]) -> None:
    """Call `callback` whenever something compiled with `backend` is called: outside of Dynamo, in a
    frame below that of the call, and before hooks of the module that is called.

    Dynamo asks a backend for a context (`backend_ctx_ctor`) to enter around each call. Where
    torch.compile gave it the backend, it asks wrappers, which do not pass the question on.
    """

    def entered() -> contextlib.AbstractContextManager[None]:
        callback()
        return contextlib.nullcontext()

    def asked(wrapper: Any) -> Any:
        given = wrapper._torchdynamo_orig_backend
        given = getattr(given, "compiler_fn", given)
        return getattr(given, "backend_ctx_ctor", contextlib.nullcontext)

    backend.backend_ctx_ctor = entered
    WrapBackendDebug.backend_ctx_ctor = property(asked)


def backward_pass() -> int:
    """A number of the backward pass that is running in this thread."""
    return torch._C._current_graph_task_id()


def at_the_end_of_backward(callback: Callable[[], None]) -> None:
    """Called in a hook: run `callback` once the backward pass that is running is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks look at an optimizer before it steps, its own and those of all."""
    return len(optimizer._optimizer_step_pre_hooks) + len(_global_optimizer_pre_hooks)


_ADVICE = "\nSet TORCHDYNAMO_VERBOSE=1"  # which Dynamo adds to what passes through it


def shortened(error: Exception) -> Exception:
    """The same error in a form that Dynamo hands to the caller as it is, without its own frames and
    its advice on how to see them."""
    kind = type(error)
    if issubclass(kind, ShortenTraceback):
        return error
    said = lambda self: kind.__str__(self).partition(_ADVICE)[0].rstrip()
    members = {"__module__": kind.__module__, "__str__": said}
    both = type(kind.__name__, (kind, ShortenTraceback), members)
    return both(*error.args, first_useful_frame=None)


def compiled_call(frame: FrameType) -> tuple[OptimizeContext, Any, Any, Any] | None:
    """(context, function, args, kwargs) if `frame` is Dynamo's wrapper around a compiled call."""
    seen = frame.f_locals if frame.f_code.co_name == "compile_wrapper" else {}
    if not isinstance(seen.get("self"), OptimizeContext):
        return None
    return seen["self"], seen.get("fn"), seen.get("args"), seen.get("kwargs")


def redirect_compiled(frame: FrameType, function: Callable[..., Any]) -> None:
    """Let the compiled object whose call `frame` is call another function from now on."""
    index, called = frame.f_code.co_freevars.index("fn"), frame.f_locals["fn"]
    for each in gc.get_referrers(frame.f_code):
        cells = each.__closure__ if isinstance(each, FunctionType) else None
        if cells and cells[index].cell_contents is called:
            cells[index].cell_contents = function


def code_being_compiled() -> CodeType | None:
    """The function that Dynamo is tracing at this moment."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == _COMPILES_IN:
            code = frame.f_locals.get("code")
            return code if isinstance(code, CodeType) else None
        frame = frame.f_back
    return None


def forget_compiled(code: CodeType) -> None:
    """Make the next call of a function compile anew."""
    torch._dynamo.reset_code(code)


def original_backend(context: OptimizeContext) -> Any:
    """The backend that torch.compile was given, with its options, behind Dynamo's wrappers."""
    backend = context.callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def saved_tensors_first(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, outputs: int
) -> None:
    """Put what forward saves in the order that AOTAutograd's runtime expects: tensors, then others.

    A saved random state (an RNG operation that is recomputed) is appended behind the device meshes
    that DTensor parameters save. outputs: how many of forward's outputs are not saved values.
    """
    end = next(n for n in forward.graph.nodes if n.op == "output")
    results = list(end.args[0])
    # Saved symbolic sizes end forward's results and begin backward's inputs.
    behind_saved = len(results)
    while behind_saved > outputs and _is_symbol(results[behind_saved - 1]):
        behind_saved -= 1
    saved, symbols = results[outputs:behind_saved], results[behind_saved:]
    order = sorted(range(len(saved)), key=lambda i: not _is_tensor(saved[i]))
    if order == list(range(len(saved))):
        return
    end.args = ((*results[:outputs], *(saved[i] for i in order), *symbols),)
    forward.recompile()
    inputs = [n for n in backward.graph.nodes if n.op == "placeholder"]
    inputs = inputs[len(symbols) : len(symbols) + len(saved)]
    behind = inputs[-1].next
    for index in order:
        behind.prepend(inputs[index])
    backward.recompile()


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(
        value.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
