"""Tests that changing a switch or a size of any config changes the parameters after some steps.

Other tests check numbers for direction and proportion: `test_step_sizes.py` asserts that no number
  is omitted.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from fields import CASES, HANDED_ON, IN_GROUPS
from probes import imprecise, tabular_problem, taught
from tables import cases

from jaxrl_po.config import ConfigError, as_arrays, setting_of


def problem(algorithm):
    if algorithm == "grpo":
        return imprecise(tabular_problem(num_prompts=4, group_size=4))
    if algorithm in IN_GROUPS:
        return taught(tabular_problem(num_prompts=4, group_size=4, dense=False))
    return tabular_problem(num_prompts=4, num_steps=16)


@functools.cache
def sampler(algorithm):
    """Compiles the program of `sample`, which hardly any field changes."""
    module, config, _ = CASES[algorithm]
    return jax.jit(module.make(as_arrays(config), problem(algorithm)).sample)


@functools.cache
def beginning(algorithm):
    module, config, _ = CASES[algorithm]
    return jax.jit(module.make(as_arrays(config), problem(algorithm)).init)(jax.random.key(0))


def begin(algorithm, config):
    """Returns the first state, whose program is compiled again only where a field changes the
    state's structure."""
    init = CASES[algorithm][0].make(config, problem(algorithm)).init
    base = beginning(algorithm)
    like = jax.eval_shape(init, jax.random.key(0))
    same = jax.tree.structure(like) == jax.tree.structure(base) and all(
        x.shape == y.shape for x, y in zip(*map(jax.tree.leaves, (like, base)), strict=True)
    )
    return base if same else jax.jit(init)(jax.random.key(0))


@functools.cache
def program(algorithm, static):
    """Returns a program of a few steps; numbers are traced, so that changed numbers share the
    program."""
    del static
    make, chosen = CASES[algorithm][0].make, problem(algorithm)
    sample = jax.jit(lambda config, state: make(config, chosen).sample(state))
    update = jax.jit(lambda config, state, batch: make(config, chosen).update(state, batch)[0])

    def some_steps(config, steps):
        # Dynamic sampling has its own fields, and running statistics persist between steps.
        own = algorithm == "dapo" or getattr(config, "running_statistics", False)
        state = begin(algorithm, config)
        for _ in range(steps):
            if own:
                state, batch = sample(config, state)
            else:
                drawn, batch = sampler(algorithm)(
                    state._replace(opt_state=None, reference_params=None)
                )
                state = state._replace(collector=drawn.collector, key=drawn.key)
            state = update(config, state, batch)
        return state.params

    return some_steps


@functools.cache
def outcome(algorithm, changes, steps):
    config = dataclasses.replace(CASES[algorithm][1], **dict(changes))
    config.validate()
    params = program(algorithm, jax.tree.structure(config))(as_arrays(config), steps)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


@pytest.mark.parametrize("algorithm", CASES)
def test_every_switch_and_size_has_a_case(algorithm):
    module, _, fields = CASES[algorithm]
    named = {f.name for f in dataclasses.fields(module.Config) if setting_of(f).static}
    assert named - HANDED_ON.get(algorithm, set()) - {"axis_name"} == set(fields)


@cases("algorithm, field", *[(name, field) for name, case in CASES.items() for field in case[2]])
def test_every_switch_and_size_does_something(algorithm, field):
    case = CASES[algorithm][2][field]
    settings = case if isinstance(case, tuple) else ({}, case)
    before, after = (outcome(algorithm, tuple(changes.items()), 2) for changes in settings)
    assert np.isfinite(after).all()
    if field == "num_microbatches":
        # this field splits the work and does not change numbers
        np.testing.assert_allclose(before, after, rtol=1e-3, atol=1e-4)
        assert not np.array_equal(before, after)
    else:
        assert np.abs(before - after).max() > 1e-5


@cases(
    "algorithm, changes, match",
    ("ppo", {"gamma": 1.1}, r"gamma: must lie in \[0, 1\], got 1.1"),
    ("ppo_penalty", {"penalty": "addaptive"}, "penalty: must be one of fixed, adaptive, satisfied"),
    ("a2c", {"n_steps": 17}, r"^n_steps: must be at most num_steps = 16, got 17"),
    ("trpo", {"max_kl": 0.0}, "max_kl"),
    ("grpo", {"epsilon_low": 0.3}, "epsilon_high: must be at least epsilon_low = 0.3, got 0.2"),
    ("grpo", {"extra_samples": 4}, "extra_samples: must be below group_size = 4, got 4"),
    (
        "grpo",
        {"running_statistics": True, "supervision": "process"},
        "supervision: must be outcome with running_statistics",
    ),
    ("npg", {"num_microbatches": 3}, "num_microbatches: must divide the 64 rows, got 3"),
    ("dapo", {"overlong_cache": 9}, r"cache: must lie in \[1, max_length = 8\] tokens, got 9"),
    ("pkpo", {"k": 5}, "k: must be at most group_size = 4, got 5"),
    (
        "dapo",
        {"correction": "truncate"},
        "correction: has no effect unless the sampler differs from the learner",
    ),
    (
        "grpo",
        {"correction": "mask", "correction_low": 6.0},
        "correction_high: must be at least correction_low = 6.0, got 5.0",
    ),
    (
        "dr_grpo",
        {"mask_off_policy": True},
        "mask_off_policy: has no effect unless a batch has several gradient steps",
    ),
    ("rloo", {"reweight_kl": True}, "reweight_kl: has no effect unless the penalty is in the loss"),
    (
        "dppo",
        {"correction": "mask"},
        "correction: must be none for this method, whose ratio .* already, got mask",
    ),
    (
        "pkpo",
        {"mask_off_policy": True, "num_epochs": 2},
        "mask_off_policy: has no effect unless advantages can be negative",
    ),
    (
        "distillation",
        {"mask_off_policy": True},
        "mask_off_policy: has no effect unless advantages are of whole responses",
    ),
    (
        "grpo",
        {"scale": "mean", "supervision": "process"},
        "scale: must be std or none unless supervision is outcome",
    ),
    (
        "dapo",
        {"scale": "mean"},
        "soft_overlong: must be off where scale is mean: its penalty makes outcomes negative",
    ),
)
def test_bad_fields_are_named(algorithm, changes, match):
    module, base, _ = CASES[algorithm]
    with pytest.raises(ConfigError, match=match):
        jax.eval_shape(
            lambda key: (
                learner := module.make(dataclasses.replace(base, **changes), problem(algorithm))
            ).step(learner.init(key)),
            jax.random.key(0),
        )
