"""codegen.elementwise and codegen.cpp: an update as a kernel, in golden text."""

import pytest
import torch
from builders import same
from torch import nn, optim

from zcompile.codegen import cpp
from zcompile.codegen.elementwise import split
from zcompile.codegen.kernel import FACTOR, Kernel, Line, Load, Store
from zcompile.codegen.trace import Case, Like, NotElementwise, trace

CPU, F32 = torch.device("cpu"), torch.float32
WIDE, COUNT = Like((3, 5), F32, CPU), Like((), F32, CPU)


def traced(make, state=None):
    optimizer = make([nn.Parameter(torch.zeros(3, 5))])
    return trace(optimizer, optimizer.param_groups[0], Case(WIDE, state or {}))


def test_momentum():
    make = lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5)
    kernel, scalars = split(traced(make, {"momentum_buffer": WIDE}), "sgd")
    same(
        kernel.text() + "\n",
        """
    kernel sgd in float32, scalars weight_decay, momentum, s1, grad_factor
      param = load float32
      grad = load float32
      momentum_buffer = load float32
      mul_1 = mul(grad, grad_factor)
      mul_2 = mul(param, weight_decay)
      add_1 = add(mul_1, mul_2)
      mul_3 = mul(momentum_buffer, momentum)
      add_2 = add(mul_3, add_1)
      mul_4 = mul(add_2, s1)
      add_3 = add(param, mul_4)
      store param <- add_3 as float32
      store momentum_buffer <- add_2 as float32
    """,
    )
    assert scalars.text("s1") == "-lr" and kernel.bytes_per_element() == 5 * 4


def test_what_is_the_same_for_all_elements_is_computed_once_in_double_precision():
    update = traced(optim.Adam, {"step": COUNT, "exp_avg": WIDE, "exp_avg_sq": WIDE})
    kernel, scalars = split(update, "adam")
    names = [load.buffer for load in kernel.loads]
    assert names == ["param", "grad", "exp_avg", "exp_avg_sq"]
    step = torch.tensor([0.0, 9999.0], dtype=torch.float64)
    hyper = {"hyper.lr": 0.25, "hyper.betas.0": 0.9, "hyper.betas.1": 0.999, "hyper.eps": 1e-8}
    table, after = scalars({"state.step": step, **hyper})
    assert after["step"].tolist() == [1, 10000]
    by_name = dict(zip(kernel.scalars, table.T))
    assert kernel.scalars[-1] == FACTOR, "which is no function of the others"
    (root,) = [n for n in kernel.scalars[:-1] if scalars.text(n).endswith("** 0.5")]
    wanted = [(1 - 0.999**1) ** 0.5, (1 - 0.999**10000) ** 0.5]
    torch.testing.assert_close(by_name[root], torch.tensor(wanted, dtype=torch.float64), rtol=0,
                               atol=1e-15)  # fmt: skip


def test_a_branch_on_a_float_is_a_guard():
    update = traced(lambda p: optim.SGD(p, lr=0.1, weight_decay=0.5))
    values = {"hyper.lr": 0.3, "hyper.weight_decay": 0.25}
    values |= {name: 0.0 for name in update.hyper if name not in values}
    assert update.holds(values)
    assert not update.holds({**values, "hyper.weight_decay": 0.0})


def test_bf16_gradients_are_widened_and_other_states_keep_their_dtype():
    kernel, _ = split(traced(lambda p: optim.SGD(p, lr=0.1)), "sgd", grad=torch.bfloat16)
    assert kernel.buffers() == {"param": F32, "grad": torch.bfloat16}
    assert kernel.compute == F32 and kernel.bytes_per_element() == 4 + 2 + 4


class Own(optim.Optimizer):
    def __init__(self, params, rule):
        super().__init__(params, {})
        self.rule = rule

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.rule(p, p.grad))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (lambda p, g: p - g.sum(), "one number out of many"),
        (lambda p, g: p - g.sort(0)[0], "several tensors"),
        (lambda p, g: p - (g @ g.T)[:, :1], "shape"),
        (lambda p, g: p - torch.randn_like(g), "no emitter"),
        (lambda p, g: p - g.cumsum(0), "no emitter"),
        (lambda p, g: p - g.flip(0), "no emitter"),
        (lambda p, g: p if float(g.flatten()[0]) > 0 else g, "cannot be traced"),
    ],
)
def test_what_looks_at_more_than_one_element_is_refused(rule, why):
    with pytest.raises(NotElementwise, match=why):
        split(traced(lambda p: Own(p, rule)), "own")


def test_a_kernel_that_reads_what_nothing_defines_is_refused():
    with pytest.raises(ValueError, match="undefined"):
        Kernel("k", (Load("x", F32),), (), (Line("y", "add", ("x", "z")),), (), F32)
    with pytest.raises(ValueError, match="undefined"):
        Kernel("k", (Load("x", F32),), (), (), (Store("x", "y", F32),), F32)


def test_the_c_source():
    loads, stores = (Load("x", torch.bfloat16), Load("y", F32)), (Store("y", "total", F32),)
    body = (Line("half", "mul", ("lr", 0.5)), Line("total", "maximum", ("x", "half")))
    kernel = Kernel("k", loads, ("lr",), body, stores, F32)
    source = cpp.emit(kernel)
    loop = source[source.index("static void piece") : source.index('extern "C"')]
    same(
        loop,
        """
    static void piece(const uint16_t* __restrict x_at, float* __restrict y_at, const float lr, int64_t count) {
      const float half = lr * 0.5f;
      const auto block = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    #pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
          const float x = from_bf16(x_at[i]);
          const float y = y_at[i];
          const float total = larger(x, half);
          y_at[i] = total;
        }
      };
      int64_t begin = 0;
      for (; begin + 64 <= count; begin += 64) {
        prefetch<0>(x_at + begin);
        prefetch<1>(y_at + begin);
        block(begin, begin + 64);
      }
      if (begin < count) block(begin, count);
    }

    """,  # noqa: E501
    )
