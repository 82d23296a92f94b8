"""Programs are compiled with the settings of their backend, unless the user has said otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po.run.devices import compilation

SIDE_BY_SIDE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
LARGE = jax.ShapeDtypeStruct((compilation.SMALL // 4,), jnp.float32)
SMALL = jax.ShapeDtypeStruct((compilation.SMALL // 4 - 1,), jnp.float32)


@pytest.mark.parametrize(
    ("backend", "flags", "argument", "wanted"),
    [
        ("cpu", "", SMALL, {"xla_backend_optimization_level": "1"}),
        ("cpu", "", LARGE, {"xla_backend_optimization_level": "1"}),
        ("cpu", "--xla_backend_optimization_level=3", SMALL, None),
        ("gpu", "", SMALL, SIDE_BY_SIDE),
        ("gpu", "", LARGE, None),
        ("gpu", "--xla_gpu_command_buffer_scheduling_mode=LHS", SMALL, None),
        ("tpu", "", SMALL, None),
    ],
)
def test_a_program_has_the_settings_of_its_backend(monkeypatch, backend, flags, argument, wanted):
    """XLA knows those of every backend on a CPU too, and refuses other names and values."""
    given = []
    compile_ahead = jax.stages.Lowered.compile

    def record(lowered, compiler_options=None):
        given.append(compiler_options)
        return compile_ahead(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", record)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XLA_FLAGS", flags)
    compilation.compiled(lambda x: x + 1.0, argument)
    assert given == [wanted]


def test_a_program_runs_with_the_options_of_jit():
    program = compilation.compiled(lambda x: x + 1.0, jnp.zeros(3), donate_argnums=0)
    x = jnp.zeros(3)
    assert program(x).tolist() == [1.0, 1.0, 1.0]
    assert x.is_deleted()


def test_what_compiling_freed_is_returned_to_the_system(monkeypatch):
    returned = []
    monkeypatch.setattr(compilation, "return_freed_memory", lambda: returned.append(True))
    compilation.compiled(lambda x: x + 1.0, jnp.zeros(3))
    assert returned == [True]


def test_the_system_has_back_what_lies_below_memory_in_use(memory_held):
    """The C library keeps it otherwise."""
    blocks = [np.ones(12_500) for _ in range(2_000)]  # 190 MiB
    last = blocks.pop()
    del blocks
    before = memory_held()
    compilation.return_freed_memory()
    assert last.sum() == 12_500
    assert before - memory_held() > 143
