"""The divergence kernel, in Triton's interpreter; tests/learn/test_distillation.py has its plain twin, tests/gpu/test_distillation_cuda.py the device."""

from tests.kernels.interpreter import WHERE_TRITON_IS, passes


@WHERE_TRITON_IS
def test_the_kernel_in_the_interpreter():
    passes("interpreted_divergence.py")
