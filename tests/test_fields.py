"""Changing any field of any algorithm's config changes the parameters after two or three steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import ppo_reference
import pytest
from probes import tabular_problem

from jaxrl_po.algorithms import (
    a2c,
    actor_critic,
    cispo,
    dapo,
    dr_grpo,
    group_policy,
    grpo,
    gspo,
    npg,
    ppo,
    ppo_penalty,
    reinforce,
    reinforce_pp,
    rloo,
    trpo,
)
from jaxrl_po.config import ConfigError, as_arrays

GAMMA = {"gamma": {"gamma": 0.5}}
ESTIMATION = GAMMA | {
    "lambda_": ({"estimator": "gae"}, {"estimator": "gae", "lambda_": 0.5}),
    "estimator": {"estimator": "monte_carlo"},
    "n": ({"estimator": "n_step", "n": 4}, {"estimator": "n_step", "n": 2}),
    "normalize_advantage": {"normalize_advantage": False},
}
JOINT = {
    "learning_rate": {"learning_rate": 1e-3},
    "value_coefficient": {"value_coefficient": 2.0},
    "entropy_coefficient": {"entropy_coefficient": 1.0},
    "max_grad_norm": {"max_grad_norm": 1e-3},
    "num_microbatches": {"num_microbatches": 2},
    "decay_iterations": {"decay_iterations": 2},
}
FIT = {
    "value_learning_rate": {"value_learning_rate": 1e-1},
    "value_epochs": {"value_epochs": 2},
    "value_minibatches": {"value_minibatches": 4},
}
NATURAL = (
    GAMMA
    | FIT
    | {
        "max_kl": {"max_kl": 0.003},
        "damping": {"damping": 1.0},
        "cg_iterations": {"cg_iterations": 1},
        "cg_tolerance": {"cg_tolerance": 0.9},
        "fisher_stride": {"fisher_stride": 2},
        "num_microbatches": {"num_microbatches": 2},
    }
)
# Curvature from every eighth row is so inaccurate that the first candidate is refused.
REFUSED = {"fisher_stride": 8, "damping": 1e-3, "max_kl": 0.1}
PENALISED = {"penalty": "adaptive", "kl_coefficient": 3.0, "target_kl": 1e-4}
REFERRED = {"reference_kl_coefficient": 5.0}
# Field to its change, or to the two settings to compare if it has no effect at the base.
CASES = {
    "reinforce": (
        reinforce,
        reinforce.Config(value_epochs=1, value_minibatches=2),
        GAMMA
        | FIT
        | {
            "learning_rate": {"learning_rate": 1e-3},
            "entropy_coefficient": {"entropy_coefficient": 1.0},
            "max_grad_norm": {"max_grad_norm": 1e-3},
            "baseline": {"baseline": "none"},
            "num_microbatches": {"num_microbatches": 2},
        },
    ),
    "a2c": (
        a2c,
        a2c.Config(learning_rate=1e-2),
        GAMMA | JOINT | {"n": {"n": 2}, "normalize_advantage": {"normalize_advantage": True}},
    ),
    "npg": (npg, npg.Config(value_epochs=1, value_minibatches=2), NATURAL),
    "trpo": (
        trpo,
        trpo.Config(value_epochs=1, value_minibatches=2),
        {
            "backtrack": (REFUSED, REFUSED | {"backtrack": 0.3}),
            "backtracks": (REFUSED, REFUSED | {"backtracks": 1}),
        },
    ),
    "ppo": (
        ppo,
        ppo.Config(learning_rate=3e-2, num_epochs=3, num_minibatches=2),
        ESTIMATION
        | JOINT
        | {
            "epsilon_low": {"epsilon_low": 0.01},
            "epsilon_high": {"epsilon_high": 0.01},
            "target_kl": (
                {"early_stop": True, "target_kl": 1e6},
                {"early_stop": True, "target_kl": 1e-7},
            ),
            "early_stop": {"early_stop": True, "target_kl": 1e-7},
            "num_epochs": {"num_epochs": 1},
            "num_minibatches": {"num_minibatches": 4},
            "clip_value": {"clip_value": True},
        },
    ),
    "ppo_penalty": (
        ppo_penalty,
        ppo_penalty.Config(learning_rate=3e-2, num_epochs=3, num_minibatches=2),
        {
            "penalty": {"penalty": "fixed"},
            "kl_coefficient": {"kl_coefficient": 100.0},
            "kl_direction": {"kl_direction": "new_old"},
            "max_rounds": (
                PENALISED | {"penalty": "satisfied"},
                PENALISED | {"penalty": "satisfied", "max_rounds": 2},
            ),
            "target_kl": {"target_kl": 10.0},
            "num_epochs": {"num_epochs": 1},
            "num_minibatches": {"num_minibatches": 4},
        },
    ),
    "ppo_reference": (
        ppo_reference,
        ppo_reference.Config(learning_rate=3e-2, num_epochs=3, num_minibatches=2),
        {
            "clip": {"clip": False},
            "reference_kl_coefficient": {"reference_kl_coefficient": 5.0},
            "adapt_reference_kl": (REFERRED, REFERRED | {"adapt_reference_kl": True}),
            "reference_target_kl": (
                REFERRED | {"adapt_reference_kl": True},
                REFERRED | {"adapt_reference_kl": True, "reference_target_kl": 1e-8},
            ),
        },
    ),
    "grpo": (
        grpo,
        grpo.Config(learning_rate=1e-2, num_epochs=2),
        {
            "learning_rate": {"learning_rate": 1e-3},
            "epsilon_low": {"epsilon_low": 1e-3},
            "epsilon_high": ({"epsilon_low": 1e-3}, {"epsilon_low": 1e-3, "epsilon_high": 1e-3}),
            "scale": {"scale": "none"},
            "ddof": {"ddof": 1},
            "std_epsilon": {"std_epsilon": 10.0},
            "use_reference": {"use_reference": False},
            "kl_coefficient": {"kl_coefficient": 10.0},
            "entropy_coefficient": {"entropy_coefficient": 1.0},
            "max_grad_norm": {"max_grad_norm": 1e-3},
            "num_epochs": {"num_epochs": 1},
            "num_minibatches": {"num_minibatches": 2},
            "num_microbatches": {"num_microbatches": 2},
            "decay_iterations": {"decay_iterations": 2},
            "warm_up_iterations": {"warm_up_iterations": 2},
            "reset_iterations": {"reset_iterations": 1},
            "dual_clip": {"dual_clip": True, "dual_clip_ratio": 1.001},
            "dual_clip_ratio": ({"dual_clip": True}, {"dual_clip": True, "dual_clip_ratio": 1.001}),
            "supervision": {"supervision": "process"},
            "extra_samples": {"extra_samples": 2},
            "running_statistics": {"running_statistics": True},
            "running_decay": (
                {"running_statistics": True},
                {"running_statistics": True, "running_decay": 0.1},
            ),
            "group_divisor": {"group_divisor": "root_size"},
        },
    ),
    "dapo": (
        dapo,
        dapo.Config(learning_rate=3e-2, num_epochs=3),
        {
            "clip_higher": {"clip_higher": False},
            "epsilon_high": {"epsilon_high": 0.9},
            "dynamic_sampling": {"dynamic_sampling": "reweight"},
            "max_generation_batches": {"max_generation_batches": 1},
            "carry_surplus": ({"train_prompts": 5}, {"train_prompts": 5, "carry_surplus": True}),
            "train_prompts": {"train_prompts": 2},
            "token_level_loss": {"token_level_loss": False},
            "overlong_filtering": {"overlong_filtering": False},
            "soft_overlong": {"soft_overlong": False},
            "overlong_cache": {"overlong_cache": 6},
            "overlong_factor": {"overlong_factor": 0.1},
            "use_reference": {"use_reference": True, "kl_coefficient": 1.0},
        },
    ),
    "dr_grpo": (
        dr_grpo,
        dr_grpo.Config(),
        {"use_reference": {"use_reference": True, "kl_coefficient": 10.0}},
    ),
    "rloo": (rloo, rloo.Config(learning_rate=1e-2), {"kl_coefficient": {"kl_coefficient": 10.0}}),
    "reinforce_pp": (
        reinforce_pp,
        reinforce_pp.Config(learning_rate=1e-2),
        {"group_baseline": {"group_baseline": True}, "kl_coefficient": {"kl_coefficient": 10.0}},
    ),
    "gspo": (
        gspo,
        gspo.Config(num_epochs=3),
        {
            "epsilon_low": {"epsilon_low": 1e-5},
            "epsilon_high": {"epsilon_high": 0.3},
            "scale": {"scale": "none"},
        },
    ),
    "cispo": (
        cispo,
        cispo.Config(learning_rate=3e-2, num_epochs=3),
        {
            "epsilon_low": {"epsilon_low": 1e-3},
            "epsilon_high": {"epsilon_high": 1e-3},
            "scale": {"scale": "none"},
        },
    ),
}
IN_GROUPS = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo")


def problem(algorithm):
    if algorithm in IN_GROUPS:
        return tabular_problem(num_prompts=4, group_size=4, dense=algorithm == "grpo")
    return tabular_problem(num_prompts=4, num_steps=16)


@functools.cache
def program(algorithm, static):
    """A few steps as one program; numbers are traced, so that all of their changes share it."""
    del static

    @jax.jit
    def some_steps(config, key, steps):
        learner = CASES[algorithm][0].make(config, problem(algorithm))
        return jax.lax.fori_loop(
            0, steps, lambda _, state: learner.step(state)[0], learner.init(key)
        ).params

    return some_steps


@functools.cache
def outcome(algorithm, changes, steps):
    config = dataclasses.replace(CASES[algorithm][1], **dict(changes))
    config.validate()
    params = program(algorithm, jax.tree.structure(config))(
        as_arrays(config), jax.random.key(0), steps
    )
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def shared_with_grpo(name):
    """Fields that a method without a critic shares with GRPO, whose cases test them."""
    records = (
        group_policy.GradientSteps,
        group_policy.Clip,
        group_policy.GroupScale,
        group_policy.Reference,
    )
    inherited = {
        f.name
        for record in records
        if issubclass(CASES[name][0].Config, record)
        for f in dataclasses.fields(record)
    }
    return inherited & set(CASES["grpo"][2])


# Fields that an algorithm passes to code covered by another algorithm's cases; `discount_per` needs
# a dialogue: test_dialogue_runs.
HANDED_ON = {
    "reinforce": {"lambda_", "estimator", "n", "normalize_advantage", "discount_per"},
    "a2c": {"lambda_", "estimator", "discount_per"},
    "ppo": {"discount_per"},
    "ppo_penalty": {f.name for f in dataclasses.fields(actor_critic.JointLoss)},
    "ppo_reference": {f.name for f in dataclasses.fields(ppo.Config)},
    "npg": {"lambda_", "estimator", "n", "normalize_advantage", "discount_per"},
    "trpo": {f.name for f in dataclasses.fields(npg.Config)},
    **{name: shared_with_grpo(name) - set(CASES[name][2]) for name in IN_GROUPS if name != "grpo"},
}


@pytest.mark.parametrize("algorithm", CASES)
def test_every_field_has_a_case(algorithm):
    module, _, fields = CASES[algorithm]
    named = {f.name for f in dataclasses.fields(module.Config)}
    assert named == set(fields) | HANDED_ON.get(algorithm, set()) | {"axis_name"}


@pytest.mark.parametrize(
    ("algorithm", "field"), [(name, field) for name, case in CASES.items() for field in case[2]]
)
def test_every_field_does_something(algorithm, field):
    case = CASES[algorithm][2][field]
    settings = case if isinstance(case, tuple) else ({}, case)
    # The first step is taken at the reference, whatever the target.
    steps = 3 if field == "reference_target_kl" else 2
    before, after = (outcome(algorithm, tuple(changes.items()), steps) for changes in settings)
    assert np.isfinite(after).all()
    if field == "num_microbatches":
        # It splits the work and changes no number.
        np.testing.assert_allclose(before, after, rtol=1e-3, atol=1e-4)
        assert not np.array_equal(before, after)
    else:
        assert np.abs(before - after).max() > 1e-5


@pytest.mark.parametrize(
    ("algorithm", "changes", "match"),
    [
        ("ppo", {"gamma": 1.1}, r"gamma must lie in \[0, 1\], got 1.1"),
        ("ppo", {"lambda_": -0.1}, "lambda_"),
        ("ppo", {"epsilon_high": 1.0}, "epsilon_high"),
        ("ppo", {"epsilon_low": 1.0}, "epsilon_low"),
        ("ppo", {"learning_rate": 0.0}, "learning_rate"),
        ("ppo", {"learning_rate": float("nan")}, "learning_rate"),
        ("ppo", {"learning_rate": jnp.array([1e-3, -1.0])}, "learning_rate"),
        ("ppo", {"num_epochs": 0}, "num_epochs"),
        ("ppo", {"num_minibatches": -4}, "num_minibatches"),
        ("ppo", {"num_minibatches": 2.0}, "num_minibatches must be of type int"),
        ("ppo", {"decay_iterations": -1}, "decay_iterations"),
        (
            "ppo",
            {"target_kl": 0.5},
            "target_kl has no effect unless early_stop is on",
        ),
        (
            "ppo_penalty",
            {"penalty": "addaptive"},
            "penalty must be one of fixed, adaptive, satisfied",
        ),
        (
            "ppo_penalty",
            {"penalty": "fixed", "target_kl": 0.5},
            "target_kl has no effect unless the penalty adapts",
        ),
        ("ppo_penalty", {"max_rounds": 3}, "max_rounds has no effect unless penalty is satisfied"),
        ("ppo", {"n": 3}, "n has no effect unless estimator is n_step"),
        (
            "a2c",
            {"lambda_": 0.5},
            "lambda_ has no effect unless estimator is gae, got estimator=n_step",
        ),
        ("a2c", {"n": 17}, r"n must be at most 16, the steps of one rollout \(num_steps\), got 17"),
        ("trpo", {"max_kl": 0.0}, "max_kl"),
        ("trpo", {"damping": -0.1}, "damping"),
        ("trpo", {"cg_iterations": 0}, "cg_iterations"),
        ("trpo", {"backtrack": 1.0}, "backtrack"),
        ("npg", {"fisher_stride": 0}, "fisher_stride"),
        (
            "grpo",
            {"use_reference": False, "kl_coefficient": 0.1},
            "kl_coefficient has no effect unless use_reference is on",
        ),
        ("grpo", {"scale": "none", "ddof": 1}, "ddof has no effect unless scale is std"),
        ("grpo", {"ddof": 2}, "ddof must be one of 0, 1"),
        ("grpo", {"epsilon_low": 0.3}, "epsilon_high must be at least epsilon_low = 0.3, got 0.2"),
        ("grpo", {"epsilon_high": 1.0}, "epsilon_high must lie in"),
        ("grpo", {"dual_clip_ratio": 2.0}, "dual_clip_ratio has no effect unless dual_clip is on"),
        ("grpo", {"dual_clip": True, "dual_clip_ratio": 1.0}, "dual_clip_ratio must lie in"),
        ("grpo", {"extra_samples": -1}, "extra_samples must lie in"),
        (
            "grpo",
            {"extra_samples": 4},
            "extra_samples must be below group_size = 4, of which they are a part, got 4",
        ),
        (
            "grpo",
            {"running_decay": 0.5},
            "running_decay has no effect unless running_statistics is on",
        ),
        ("grpo", {"running_statistics": True, "running_decay": 1.5}, "running_decay must lie in"),
        (
            "grpo",
            {"running_statistics": True, "supervision": "process"},
            "supervision must be outcome with running_statistics",
        ),
        ("grpo", {"group_divisor": "root"}, "group_divisor must be one of size, root_size"),
        ("npg", {"num_microbatches": 3}, "num_microbatches = 3 must divide the 64 rows"),
        (
            "grpo",
            {"use_reference": False, "reset_iterations": 5},
            "reset_iterations has no effect unless use_reference is on",
        ),
        ("dapo", {"max_generation_batches": 0}, "max_generation_batches must lie in"),
        ("dapo", {"epsilon_high": 0.1}, "epsilon_high must be at least epsilon_low = 0.2, got 0.1"),
        (
            "dapo",
            {"clip_higher": False, "epsilon_high": 0.3},
            "epsilon_high has no effect unless clip_higher is on",
        ),
        (
            "dapo",
            {"dynamic_sampling": "on"},
            "dynamic_sampling must be one of off, refill, reweight",
        ),
        (
            "dapo",
            {"dynamic_sampling": "off", "carry_surplus": True},
            "carry_surplus has no effect unless dynamic_sampling is refill",
        ),
        (
            "dapo",
            {"kl_coefficient": 0.1},
            "kl_coefficient has no effect unless use_reference is on",
        ),
        ("dapo", {"overlong_cache": 9}, r"cache must lie in \[1, max_length = 8\] tokens, got 9"),
        (
            "dapo",
            {"soft_overlong": False, "overlong_cache": 2},
            "overlong_cache has no effect unless soft_overlong is on",
        ),
        ("cispo", {"epsilon_low": 0.0}, "epsilon_low must lie in"),
    ],
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
