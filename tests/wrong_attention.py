"""Planted mistakes in fused attention."""

from wrong import Wrong

EQUAL = "test_attention.py::test_a_kernel_is_the_attention_of_two_products"
WINDOW, LAST = "window, two blocks of columns", "grouped heads, last positions"
MODEL = "test_attention.py::test_a_model_of_several_windows_passes_whole_rows_through_the_kernel"
CHOICE = "test_attention.py::test_each_target_has_its_kernel_and_natural_steps_have_none"
WRONG = [
    Wrong(
        "a window of splash attention has one position more",
        "language.attention",
        "(window - 1, 0), behind",
        "(window, 0), behind",
        (f"{EQUAL}[{WINDOW}-splash]",),
    ),
    Wrong(
        "a window of cuDNN has one position more",
        "language.attention",
        "within = (window - 1, 0)",
        "within = (window, 0)",
        (f"{EQUAL}[{WINDOW}-cudnn]",),
    ),
    Wrong(
        "the last positions see what the first ones do",
        "language.attention",
        "kernels.CausalMask(shape, behind)",
        "kernels.CausalMask(shape)",
        (f"{EQUAL}[{LAST}-splash]",),
    ),
    Wrong(
        "a kernel sees padding",
        "language.attention",
        "shift(_longer(x_BxNxHxC, 1, columns), -pad_B)",
        "shift(_longer(x_BxNxHxC, 1, columns), 0 * pad_B)",
        (f"{EQUAL}[{LAST}-cudnn]",),
    ),
    Wrong(
        "columns that fill a block up are seen",
        "language.attention",
        "(pad_B + whole - columns)[:, None]",
        "pad_B[:, None]",
        (f"{EQUAL}[{LAST}-splash]",),
    ),
    Wrong(
        "every block has the first window",
        "language.attention",
        "jnp.searchsorted(jnp.asarray(sight.windows), sight.window)",
        "0 * sight.window",
        (f"{MODEL}[scanned]",),
    ),
    Wrong(
        "a step with a cache goes through the kernel",
        "language.transformer",
        "None if cache is not None or self.is_initializing() else self.kernel",
        "None if self.is_initializing() else self.kernel",
        (f"{MODEL}[unrolled]",),
    ),
    Wrong(
        "a kernel is taken to round as the sampler does",
        "language.networks",
        "return whole and fused is None and not sampler",
        "return whole and not sampler",
        (CHOICE,),
    ),
]
