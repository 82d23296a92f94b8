"""Programs are compiled with the settings of their backend, unless the user has said otherwise."""

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


@pytest.mark.parametrize("backend", compilation.SETTINGS)
def test_xla_knows_the_settings_of_every_backend(monkeypatch, backend):
    """On a CPU too, which refuses a name or a value that XLA does not have."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compilation.compiled(lambda x: x + 1.0, jnp.zeros(3))(jnp.zeros(3)).sum() == 3.0
