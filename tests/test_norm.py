"""The sum of squares: against exact arithmetic, the same bits however it is computed."""

import math

import pytest
import torch

from zcompile import norm
from zcompile.codegen import build, cpp
from zcompile.codegen.kernel import PIECE, Kernel, Load, Sum

CPU = torch.device("cpu")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def exact(tensors):
    """Correctly rounded. A float32's square is exact in double precision."""
    return math.fsum(x * x for t in tensors for x in t.flatten().tolist())


def random_tensors(dtype):
    torch.manual_seed(0)
    shapes = [(5,), (0,), (PIECE,), (3, 700), (1,), (), (PIECE * 3 + 1,), (2 * PIECE, 33)]
    return [(torch.randn(shape) * 10 ** torch.randn(shape)).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_arithmetic(dtype):
    tensors = random_tensors(dtype)
    found = norm.squares(tensors, CPU)
    assert found.dtype == torch.float64 and found.shape == ()
    # PIECE terms added one after another lose at most PIECE units of rounding; all are positive.
    assert float(found) == pytest.approx(exact(tensors), rel=PIECE * 2**-53)


def test_dtypes_together():
    tensors = random_tensors(torch.float32) + random_tensors(torch.bfloat16)
    assert float(norm.squares(tensors, CPU)) == pytest.approx(exact(tensors), rel=PIECE * 2**-53)


def test_the_same_bits_on_any_number_of_threads(threads):
    tensors, found = random_tensors(torch.float32), set()
    for count in (1, 2, 3, 7):
        threads(count)
        found.add(float(norm.squares(tensors, CPU)))
    assert len(found) == 1


def test_the_same_bits_wherever_a_tensor_lies():
    """A vector that begins one element later would be cut into other vectors."""
    memory = torch.randn(5 * PIECE)
    elsewhere = torch.empty(5 * PIECE + 1)[1:].copy_(memory)
    assert float(norm.squares([memory], CPU)) == float(norm.squares([elsewhere], CPU))


def test_nothing():
    assert float(norm.squares([], CPU)) == 0.0
    assert float(norm.squares([torch.empty(0)], CPU)) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 3 * PIECE])
def test_one_that_is_not_finite_is_found_wherever_it_is(value, place):
    tensors = random_tensors(torch.float32)
    tensors[-2][place] = value
    assert not math.isfinite(float(norm.squares(tensors, CPU)))


def test_the_largest_and_the_smallest_floats_neither_overflow_nor_vanish():
    large, small = torch.full((10,), 3e38), torch.full((10,), 1e-45)
    assert float(norm.squares([large], CPU)) == pytest.approx(exact([large]), rel=1e-14)
    assert float(norm.squares([small], CPU)) == pytest.approx(exact([small]), rel=1e-14)


@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[3:].T])
def test_what_does_not_lie_in_order(view):
    tensor = view(torch.randn(40, 50))
    assert float(norm.squares([tensor], CPU)) == pytest.approx(exact([tensor]), rel=1e-12)


@pytest.mark.parametrize("view", [lambda t: t, torch.conj, lambda t: t[:, ::2].T])
def test_complex_elements_are_two_numbers(view):
    tensor = view(torch.randn(40, 50, dtype=torch.complex64))
    wanted = exact([tensor.real, tensor.imag])
    assert float(norm.squares([tensor], CPU)) == pytest.approx(wanted, rel=1e-12)


def test_more_pieces_than_one_piece_holds():
    tensor = torch.ones(PIECE * PIECE + 1)
    assert float(norm.squares([tensor], CPU)) == PIECE * PIECE + 1


def test_without_a_compiler_torch_does_it_and_says_so(monkeypatch):
    def none(kernel):
        raise build.CannotBuild("no compiler")

    monkeypatch.setattr(build, "on_cpu", none)
    norm._built.cache_clear()
    tensors = random_tensors(torch.bfloat16)
    try:
        with pytest.warns(UserWarning, match="computed by torch.*no compiler"):
            found = norm.squares(tensors, CPU)
    finally:
        norm._built.cache_clear()
    assert float(found) == pytest.approx(exact(tensors), rel=PIECE * 2**-53)


GOLDEN = """\
static void piece(const float* __restrict x_at, double* __restrict sums_at, int64_t count) {
  double sums = 0;
  const auto block = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
#pragma omp simd reduction(+ : sums)
    for (int64_t i = begin; i < end; ++i) {
      const double x = double(x_at[i]);
      const double square = x * x;
      sums += square;
    }
    if (end % 1024 == 0 || end == count) {
      sums_at[begin / 1024] = sums;
      sums = 0;
    }
  };
  int64_t begin = 0;
  for (; begin + 64 <= count; begin += 64) {
    prefetch<0>(x_at + begin);
    block(begin, begin + 64);
  }
  if (begin < count) block(begin, count);
}
"""


def test_source():
    assert GOLDEN in cpp.emit(norm.squared(torch.float32))


def test_text():
    assert norm.squared(torch.bfloat16).text() == (
        "kernel sum_of_squares in float64, scalars \n"
        "  x = load bfloat16\n"
        "  square = mul(x, x)\n"
        "  sums sums <- square"
    )


@pytest.mark.parametrize("sums", [[("s", "y")], [("x", "x")], [("s", "x"), ("s", "x")]])
def test_a_sum_of_what_is_not_there_or_into_what_is_there_is_refused(sums):
    loads, sums = (Load("x", torch.float32),), tuple(Sum(*each) for each in sums)
    with pytest.raises(ValueError, match="undefined, or into what"):
        Kernel("k", loads, (), (), (), torch.float64, (), sums)
