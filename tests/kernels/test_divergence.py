"""The divergence kernel, in Triton's interpreter; its plain twin is tested in tests/learn/test_distillation.py, the device in tests/gpu."""

from tests.kernels.interpreter import WHERE_TRITON_IS, passes


@WHERE_TRITON_IS
def test_the_kernel_in_the_interpreter():
    passes("interpreted_divergence.py")
