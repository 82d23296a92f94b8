"""Programs are compiled with less effort on a CPU, unless the user has said how much."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_po.run import compilation


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [("", {"xla_backend_optimization_level": "1"}), ("--xla_backend_optimization_level=3", None)],
)
def test_the_effort_is_less_on_a_cpu_unless_the_user_says_how_much(monkeypatch, flags, wanted):
    given = []
    compile_ahead = jax.stages.Lowered.compile

    def record(lowered, compiler_options=None):
        given.append(compiler_options)
        return compile_ahead(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", record)
    monkeypatch.setenv("XLA_FLAGS", flags)
    program = compilation.compiled(lambda x: x + 1.0, jnp.zeros(3), donate_argnums=0)
    assert given == [wanted]
    assert program(jnp.zeros(3)).tolist() == [1.0, 1.0, 1.0]
