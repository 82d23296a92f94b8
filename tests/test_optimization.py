"""`--config.optimizer` and `--config.schedule`: what the names stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxrl_po import language
from jaxrl_po.algorithms import a2c, npg, ppo
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import control, flags, optimization, plan
from jaxrl_po.run.experiment.flags import UsageError

# The norm is 5 · 10³, clipped to 1/2.
GRADIENT = {"w": jnp.array([[3e3, 0.0], [0.0, 4e3]]), "b": jnp.zeros(2)}
PARAMS = {"w": jnp.array([[1.0, 2.0], [3.0, -4.0]]), "b": jnp.ones(2)}


def asked(module=ppo, **settings):
    """What a method is asked to make: its settings, and its optimizer."""
    given = optimization.settings_of(module)(**settings)
    given.validate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make", lambda *arguments: arguments)
        made = optimization.make(module, given, None)
    return made[0], made[2] if len(made) > 2 else None


def first_step(optimizer, params=PARAMS):
    return optimizer.update(GRADIENT, optimizer.init(params), params)[0]


def test_muon_takes_the_matrices_of_a_transformer_and_nothing_else():
    for layers in (2, 8):  # apart, and scanned
        model = language.ModelSettings(width=32, layers=layers).build(12)
        found = optimization.matrices({"params": model.parameter_shapes()["params"]})
        leaves = jax.tree_util.tree_leaves_with_path(model.parameter_shapes()["params"])
        flat = jax.tree.leaves(
            found["params"], is_leaf=lambda x: x is None or hasattr(x, "_fields")
        )
        by_name = {
            jax.tree_util.keystr(path, simple=True, separator="/"): dims
            for (path, _), dims in zip(leaves, flat, strict=True)
        }
        taken = {name for name, dims in by_name.items() if dims is not None}
        assert taken == {name for name in by_name if name.endswith("kernel") and "blocks" in name}
        assert {by_name[name] for name in taken} == {(1, 2)}


def test_the_names_are_those_of_the_papers():
    """First steps by hand: sgd, Lion (sign), Adam (1 where ε is small), decay times parameters."""
    rate = {"learning_rate": 0.25, "optimizer_epsilon": 1e-9}
    np.testing.assert_allclose(
        first_step(asked(optimizer="sgd", **rate)[1])["w"],
        -0.25 * np.array([[0.3, 0.0], [0.0, 0.4]]),
        rtol=1e-4,
    )
    decay = 0.125 * np.array([[1.0, 2.0], [3.0, -4.0]])
    for name in ("lion", "adamw"):
        np.testing.assert_allclose(
            first_step(asked(optimizer=name, weight_decay=0.125, **rate)[1])["w"],
            -0.25 * (np.eye(2) + decay),
            rtol=1e-4,
        )
    np.testing.assert_allclose(
        first_step(asked(optimizer="adam", **rate)[1])["w"], -0.25 * np.eye(2), rtol=1e-4
    )
    # √(0.01 g²) of RMSProp: ten times the sign.
    np.testing.assert_allclose(
        first_step(asked(optimizer="rmsprop", **rate)[1])["w"], -2.5 * np.eye(2), rtol=1e-4
    )
    step = first_step(asked(optimizer="muon", weight_decay=0.0, **rate)[1])["w"]
    # Newton-Schulz brings singular values near 1, of whatever size they were.
    np.testing.assert_allclose(np.abs(np.linalg.eigvalsh(step)) / 0.25, 1.0, atol=0.35)


def test_the_defaults_leave_the_method_its_own_and_its_settings_go_to_the_optimizer():
    settings, optimizer = asked(learning_rate=0.5)
    assert optimizer is None
    assert settings.learning_rate == 0.5
    settings, optimizer = asked(optimizer="lion", learning_rate=0.5, max_grad_norm=3.0)
    assert optimizer is not None
    assert settings.learning_rate == ppo.Config().learning_rate
    assert settings.max_grad_norm == ppo.Config().max_grad_norm


def test_the_cosine_falls_to_zero_over_the_gradient_steps_of_its_iterations():
    sizes = {"num_epochs": 2, "num_minibatches": 3, "decay_iterations": 5, "schedule": "cosine"}
    settings, optimizer = asked(learning_rate=1.0, optimizer="sgd", **sizes)
    assert settings.decay_iterations == 0  # not twice
    state, seen = optimizer.init(PARAMS), []
    for _ in range(31):
        step, state = optimizer.update(GRADIENT, state, PARAMS)
        seen.append(-float(step["w"][0, 0]) / 0.3)
    np.testing.assert_allclose(seen, 0.5 + 0.5 * np.cos(np.pi * np.arange(31) / 30), atol=1e-6)
    own, cosine = asked(a2c, schedule="cosine", decay_iterations=2)
    assert own.decay_iterations == 0
    rms = asked(a2c, optimizer="rmsprop")[1]
    jax.tree.map(np.testing.assert_array_equal, first_step(cosine), first_step(rms))


def test_step_sizes_are_vmapped():
    def step(rate, name):
        decay = {"weight_decay": rate} if name in optimization.DECAYED else {}
        return first_step(asked(optimizer=name, learning_rate=rate, **decay)[1])

    rates = jnp.array([0.1, 0.2])
    for name in optimization.OPTIMIZERS:
        both = jax.vmap(lambda rate, name=name: step(rate, name))(rates)
        for i, rate in enumerate((0.1, 0.2)):
            alone = step(jnp.float32(rate), name)
            jax.tree.map(
                lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-7),
                both,
                alone,
            )


def settled(*arguments):
    sections = plan.sections_of(control.SCRIPT, control.Options())
    given = flags.given([*tiny.CONTROL, *arguments], sections)
    return plan.settle(control.SCRIPT, plan.fill(control.SCRIPT, given, {}), given)[0]["config"]


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        (["--config.schedule=linear"], 100),
        (["--config.schedule=cosine"], 100),
        (["--config.schedule=cosine", "--config.decay_iterations=150"], 150),
        (["--config.schedule=constant"], 0),
    ],
)
def test_a_schedule_lasts_as_long_as_the_run(arguments, length):
    assert settled(*arguments).decay_iterations == length


def test_what_has_no_effect_is_refused():
    assert optimization.settings_of(npg) is npg.Config
    with pytest.raises(ConfigError, match="weight_decay has no effect unless optimizer is one of"):
        asked(weight_decay=0.1)
    with pytest.raises(UsageError, match=r"^--config.optimizer must be one of auto, adam, adamw"):
        settled("--config.optimizer=adamm")


@pytest.mark.usefixtures("trace_only")
def test_a_run_has_the_optimizer_that_its_flags_name(tmp_path, monkeypatch):
    seen = []
    make = ppo.make
    monkeypatch.setattr(ppo, "make", lambda *given: (seen.append(given), make(*given))[1])
    flags_ = [*tiny.CONTROL, "--config.optimizer=muon", "--config.schedule=cosine"]
    assert launch.control([*flags_, f"--out={tmp_path / 'run'}"]) == 0
    assert isinstance(seen[0][2], optax.GradientTransformation)
