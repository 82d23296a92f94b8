"""Tests values of settings in every record and factory: traced values, text, bools and NumPy
numbers."""

import dataclasses
import enum
import fractions
import functools
import json

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po import config, control, language, run
from jaxrl_po.algorithms import a2c
from jaxrl_po.config import ConfigError, as_arrays, check, setting_of
from jaxrl_po.dynamic_sampling import dynamic_sampling
from jaxrl_po.language import lora
from jaxrl_po.language.tasks import finite
from jaxrl_po.run.experiment import sweeping
from jaxrl_po.run.experiment.options import RunOptions
from jaxrl_po.run.experiment.registry import METHODS

RECORDS = {
    **{name: algorithm.Config for name, algorithm in METHODS.items()},
    **{
        record.__module__ + "." + record.__name__: record
        for record in (
            control.ControlSettings,
            control.GroupSettings,
            control.VineSettings,
            control.NetworkSettings,
            language.LanguageSettings,
            language.ModelSettings,
            language.Preferences,
            language.WarmStart,
            language.Sampler,
            RunOptions,
        )
    },
}
of_each_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def fields(record, *kinds):
    """Returns static fields with a default of one of several types, by name."""
    found = [field for field in dataclasses.fields(record) if setting_of(field).static]
    return {field.name: field.default for field in found if type(field.default) in kinds}


def numbers(record):
    return {f.name: f.default for f in dataclasses.fields(record) if not setting_of(f).static}


@of_each_record
def test_traced_static_fields_are_named(record):
    for name, default in fields(record, int, bool).items():
        with pytest.raises(ConfigError, match=f"^{name}: is static: build one program for each"):
            jax.eval_shape(lambda value, name=name: check(record(**{name: value})), default)
    for name, default in (numbers(record) | fields(record, float)).items():
        jax.eval_shape(lambda value, name=name: check(record(**{name: value})), float(default))


def test_every_real_number_is_a_number():
    class YamlFloat(float):
        pass

    three = enum.IntEnum("Size", {"THREE": 3}).THREE
    for rate in (YamlFloat(1e-3), fractions.Fraction(1, 1000), jnp.bfloat16(0.5)):
        check(a2c.Config(learning_rate=rate))
    assert a2c.Config(n_steps=three).n_steps == 3
    assert language.LanguageSettings(temperature=fractions.Fraction(1, 2)).temperature == 0.5
    shape = jax.eval_shape(lambda: as_arrays(a2c.Config()))
    with pytest.raises(ConfigError, match=r"^learning_rate: must be a number, got Shape"):
        check(shape)


def test_a_record_keeps_its_own_check():
    @config.record
    class Refused(a2c.Config):
        def __post_init__(self):
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        Refused()


@of_each_record
def test_text_and_bools_are_no_numbers(record):
    for name in {**numbers(record), **fields(record, int, float)}:
        for value in ("1", "1e-3", True, np.bool_(True), jnp.bool_(True), None, [1.0]):
            with pytest.raises(ConfigError, match=f"^{name}: must be (a number|of type|one of)"):
                check(record(**{name: value}))
    for name in fields(record, bool):
        for value in ("true", 1, 0.0, np.int64(1)):
            with pytest.raises(ConfigError, match=f"^{name}: must be of type bool, got "):
                check(record(**{name: value}))


@of_each_record
def test_numpy_values_are_python_values(record):
    kinds = {int: (np.int64, np.uint8, jnp.int32), bool: (np.bool_, jnp.bool_)}
    kinds |= {float: (np.float64, np.float32, jnp.float32)}
    plain = record()
    for name, default in fields(record, int, float, bool).items():
        for kind in kinds[type(default)]:
            if kind is np.uint8 and not 0 <= default < 256:
                continue
            made = record(**{name: kind(default)})
            assert type(getattr(made, name)) is type(default)
            assert jax.tree.structure(made) == jax.tree.structure(plain)
            assert hash(jax.tree.structure(made)) == hash(jax.tree.structure(plain))
    for name in fields(record, float):
        assert type(getattr(record(**{name: 1}), name)) is float


ENV = gymnax.make("CartPole-v1")[0]
PROBLEM = control.make_problem(ENV, num_envs=2, num_steps=8)
GROUPS = control.make_groups(ENV, num_prompts=2, group_size=2, num_steps=2)
TASK = language.tasks.addition(1)
MODEL = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8).build(
    TASK.tokenizer.size
)
FACTORIES = {
    "control": (
        lambda **own: control.make_problem(ENV, **own),
        {"num_envs": 2, "num_steps": 2, "reward_discount": 0.5, "scale_rewards": True},
    ),
    "episodes": (
        lambda **own: control.make_evaluate(ENV, PROBLEM, **own),
        {"num_episodes": 2, "max_steps": 2, "greedy": False},
    ),
    "record": (
        lambda num_episodes=2, max_steps=2: control.make_record(
            ENV, PROBLEM, num_episodes=num_episodes, max_steps=max_steps
        ),
        {"num_episodes": 2, "max_steps": 2},
    ),
    "refill": (
        lambda max_generation_batches=2, **own: dynamic_sampling(
            GROUPS, max_generation_batches, **own
        ),
        {"max_generation_batches": 2, "num_groups": 2, "carry_surplus": True},
    ),
    "language": (
        lambda **own: language.make_problem(TASK, MODEL, **own),
        {
            **{"num_prompts": 2, "group_size": 2, "max_new_tokens": 4, "temperature": 0.5},
            **{"top_k": 2, "top_p": 0.5, "prompt_set": 2, "process_reward": True, "verify": True},
        },
    ),
    "decoding": (
        lambda **own: language.make_evaluate(TASK, MODEL, decoding=language.Decoding(**own)),
        {"max_new_tokens": 4, "temperature": 0.5, "top_k": 2},
    ),
    "prompts": (
        lambda **own: language.make_evaluate(TASK, MODEL, **own),
        {"num_prompts": 2, "num_samples": 2},
    ),
    "task": (
        lambda num_digits=1, **own: language.tasks.addition(num_digits, **own),
        {"num_digits": 1, "zero_pad": False, "reverse": False},
    ),
    "set": (lambda prompt_set=2: finite(TASK, prompt_set), {"prompt_set": 2}),
    "adapters": (lambda **own: lora.Lora(**own).validate(), {"rank": 2, "alpha": 4.0}),
}


@pytest.mark.parametrize(("make", "values"), FACTORIES.values(), ids=FACTORIES)
def test_factories_follow_the_rule_of_records(make, values):
    for name, value in values.items():
        traced = functools.partial(lambda value, name: make(**{name: value}) and None, name=name)
        if not isinstance(value, float):  # a temperature or a discount may be vmapped
            with pytest.raises(
                ConfigError, match=f"^{name}: is static: build one program for each"
            ):
                jax.eval_shape(traced, value)
        for wrong in ("1", 1 if isinstance(value, bool) else np.bool_(True)):
            with pytest.raises(ConfigError, match=f"^{name}: must be .*, got "):
                make(**{name: wrong})
    make(**{name: np.asarray(value)[()] for name, value in values.items()})
    make(**{name: jnp.asarray(value) for name, value in values.items()})


LEARNER = a2c.make(a2c.Config(), PROBLEM)


@pytest.mark.usefixtures("trace_only")
def test_train_takes_numpy_numbers(tmp_path):
    numbers = {"seeds": np.int64(1), "log_every": jnp.int32(1), "resume": np.bool_(False)}
    run.train(LEARNER, np.int32(1), steps_per_iteration=np.int64(16), out=tmp_path, **numbers)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["seeds"], stored["total_steps"], stored["log_every"]) == (1, 16, 1)


@cases(
    "given, message",
    ({"seeds": "4"}, "^seeds: must be an integer, got '4'"),
    ({"over": {"config.gamma": "0.9"}}, "^config.gamma: must be a number, got '0.9'"),
    ({"over": {"config.gamma": np.bool_(True)}}, "^config.gamma: must be a number, got True"),
    ({"over": {"config.normalize_advantage": 1}}, "^config.normalize_advantage: must be true "),
    ({"overwrite": "true"}, "^overwrite: must be true or false, got 'true'"),
    ({"task": "addition", "reward_weights": ["1", 2]}, "^reward_weights: must be a number, got"),
    ({"task": "addition", "reward_weights": [True]}, "^reward_weights: must be a number, got"),
    ({"seed": jax.random.key(0)}, "^seed: must be a number or text, got PRNGKeyArray"),
)
def test_an_experiment_follows_the_rule_of_records(given, message):
    with pytest.raises(ConfigError, match=message):
        run.Experiment(**given)


@cases("kind", np.float32, np.float64, jnp.float32, np.array)
def test_scalars_over_an_experiment_are_numbers(kind):
    plain = run.Experiment(seeds=2, over={"config.gamma": 0.9, "config.early_stop": True})
    assert dict(plain.settings) == {"seeds": 2, "config.gamma": 0.9, "config.early_stop": True}
    for seeds in (jnp.int32(2), np.int64(2)):
        over = {"config.gamma": kind(0.9), "config.early_stop": np.bool_(True)}
        assert run.Experiment(seeds=seeds, over=over) == plain
    weights = [kind(1.0), kind(0.2)]
    made = run.Experiment(task="addition", reward_weights=weights)
    assert made.settings["reward_weights"] == "1.0,0.2"


def test_a_sweep_takes_arrays_and_lists_of_scalars(tmp_path, monkeypatch):
    found = []
    swept = sweeping.SweepResult([], {}, tmp_path)
    monkeypatch.setattr(sweeping, "run_sweep", lambda _, given: found.append(given) or swept)
    experiment = run.Experiment(env="CartPole-v1", out=tmp_path / "run")
    for rates in (
        [1e-3, 1e-4],
        [jnp.float32(1e-3), np.float32(1e-4)],
        np.array([1e-3, 1e-4]),
        jnp.array([1e-3, 1e-4]),
    ):
        run.sweep(experiment, over={"config.learning_rate": rates})
    assert found[0]["config.learning_rate"] == "0.001,0.0001"
    assert found == found[:1] * 4
    for name, value in (("learning_rate", "1e-3"), ("num_epochs", "2"), ("early_stop", 1)):
        with pytest.raises(ConfigError, match=f"^config.{name}: must be .*, got "):
            run.sweep(experiment, over={f"config.{name}": [value]})
    with pytest.raises(ConfigError, match=r"^draws: must be an integer, got '3'"):
        run.sweep(experiment, over={}, draws="3")
    run.sweep(experiment, over={"network.activation": ["tanh", "relu"]}, draws=np.int64(3))
