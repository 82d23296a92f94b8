"""Lists, for every switch and size of every config, a change that alters the result of a few
steps."""

import dataclasses

import ppo_reference

from jaxrl_po.algorithms import (
    a2c,
    actor_critic,
    cispo,
    dapo,
    distillation,
    dppo,
    dr_grpo,
    gmpo,
    group_config,
    grpo,
    gspo,
    kl_cov,
    npg,
    pkpo,
    ppo,
    ppo_penalty,
    reinforce,
    reinforce_pp,
    rloo,
    sapo,
    trpo,
)

ESTIMATION = {
    "estimator": {"estimator": "monte_carlo"},
    "n_steps": ({"estimator": "n_step", "n_steps": 4}, {"estimator": "n_step", "n_steps": 2}),
    "normalize_advantage": {"normalize_advantage": False},
}
JOINT = {
    "num_microbatches": {"num_microbatches": 2},
    "decay_iterations": {"decay_iterations": 2},
    "warm_up_iterations": {"warm_up_iterations": 2},
    "optimizer": {"optimizer": "sgd"},
    "schedule": ({"decay_iterations": 4}, {"decay_iterations": 4, "schedule": "cosine"}),
}
FIT = {"value_epochs": {"value_epochs": 2}, "value_minibatches": {"value_minibatches": 4}}
NATURAL = {
    "cg_iterations": {"cg_iterations": 1},
    "fisher_stride": {"fisher_stride": 2},
    "num_microbatches": {"num_microbatches": 2},
}
# Curvature from every eighth row is so inaccurate that the line search refuses its first candidate.
REFUSED = {"fisher_stride": 8, "damping": 1e-3, "max_kl": 0.1}
PENALISED = {"penalty": "adaptive", "kl_coefficient": 3.0, "target_kl": 1e-4}
REFERRED = {"reference_kl_coefficient": 5.0}
# Maps a field to its change, or to the two settings to compare if the field has no effect at the
# base.
CASES = {
    "reinforce": (
        reinforce,
        reinforce.Config(value_epochs=1, value_minibatches=2),
        FIT | {"baseline": {"baseline": "none"}},
    ),
    "a2c": (
        a2c,
        a2c.Config(learning_rate=1e-2),
        {"n_steps": {"n_steps": 2}, "normalize_advantage": {"normalize_advantage": True}},
    ),
    "npg": (npg, npg.Config(value_epochs=1, value_minibatches=2), NATURAL),
    "trpo": (
        trpo,
        trpo.Config(value_epochs=1, value_minibatches=2),
        {"backtracks": (REFUSED, REFUSED | {"backtracks": 1})},
    ),
    "ppo": (
        ppo,
        ppo.Config(learning_rate=3e-2, num_epochs=3, num_minibatches=2),
        ESTIMATION
        | JOINT
        | {
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
            "kl_direction": {"kl_direction": "new_old"},
            "max_rounds": (
                PENALISED | {"penalty": "satisfied"},
                PENALISED | {"penalty": "satisfied", "max_rounds": 2},
            ),
        },
    ),
    "ppo_reference": (
        ppo_reference,
        ppo_reference.Config(learning_rate=3e-2, num_epochs=3, num_minibatches=2),
        {
            "clip": {"clip": False},
            "adapt_reference_kl": (REFERRED, REFERRED | {"adapt_reference_kl": True}),
        },
    ),
    "grpo": (
        grpo,
        grpo.Config(learning_rate=1e-2, num_epochs=2),
        {
            "scale": {"scale": "none"},
            "ddof": ({"entropy_coefficient": 1.0}, {"entropy_coefficient": 1.0, "ddof": 1}),
            "use_reference": {"use_reference": False},
            "num_epochs": {"num_epochs": 1},
            "num_minibatches": {"num_minibatches": 2},
            "num_microbatches": {"num_microbatches": 2},
            "decay_iterations": {"decay_iterations": 2},
            "reset_iterations": {"reset_iterations": 1},
            "dual_clip": {"dual_clip": True, "dual_clip_ratio": 1.001},
            "supervision": {"supervision": "process"},
            "extra_samples": {"extra_samples": 2},
            "running_statistics": {"running_statistics": True},
            "group_divisor": {"group_divisor": "root_size"},
            "correction": {"correction": "truncate", "correction_high": 1.0},
            "mask_off_policy": {"mask_off_policy": True, "off_policy_kl": 0.0},
            "reweight_kl": {"reweight_kl": True, "kl_coefficient": 1.0},
        },
    ),
    "dapo": (
        dapo,
        dapo.Config(learning_rate=3e-2, num_epochs=3),
        {
            "clip_higher": {"clip_higher": False},
            "dynamic_sampling": {"dynamic_sampling": "reweight"},
            "max_generation_batches": {"max_generation_batches": 1},
            "carry_surplus": ({"train_prompts": 5}, {"train_prompts": 5, "carry_surplus": True}),
            "train_prompts": {"train_prompts": 2},
            "token_level_loss": {"token_level_loss": False},
            "overlong_filtering": {"overlong_filtering": False},
            "soft_overlong": {"soft_overlong": False},
            "overlong_cache": {"overlong_cache": 6},
            "use_reference": {"use_reference": True, "kl_coefficient": 1.0},
        },
    ),
    "dr_grpo": (
        dr_grpo,
        dr_grpo.Config(),
        {"use_reference": {"use_reference": True, "kl_coefficient": 10.0}},
    ),
    "rloo": (rloo, rloo.Config(learning_rate=1e-2), {}),
    "reinforce_pp": (
        reinforce_pp,
        reinforce_pp.Config(learning_rate=1e-2),
        {"group_baseline": {"group_baseline": True}},
    ),
    "gspo": (gspo, gspo.Config(num_epochs=3), {"scale": {"scale": "none"}}),
    "cispo": (cispo, cispo.Config(learning_rate=3e-2, num_epochs=3), {"scale": {"scale": "none"}}),
    "sapo": (sapo, sapo.Config(learning_rate=3e-2, num_epochs=3), {}),
    "gmpo": (gmpo, gmpo.Config(learning_rate=3e-2, num_epochs=3), {}),
    "dppo": (dppo, dppo.Config(learning_rate=3e-2, num_epochs=3), {}),
    "pkpo": (pkpo, pkpo.Config(k=2), {"k": {"k": 3}}),
    "kl_cov": (kl_cov, kl_cov.Config(learning_rate=3e-2, num_epochs=3), {}),
    "distillation": (distillation, distillation.Config(), {}),
}
IN_GROUPS = (
    *("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo"),
    *("sapo", "gmpo", "dppo", "pkpo", "kl_cov", "distillation"),
)


def shared_with_grpo(name):
    """Returns the fields that a method without a critic shares with GRPO, whose cases test these
    fields."""
    records = (
        group_config.GradientSteps,
        group_config.Clip,
        group_config.GroupScale,
        group_config.Reference,
    )
    inherited = {
        f.name
        for record in records
        if issubclass(CASES[name][0].Config, record)
        for f in dataclasses.fields(record)
    }
    return inherited & {f.name for f in dataclasses.fields(grpo.Config)}


# Fields that an algorithm passes to code covered by another algorithm's cases; the field
# `discount_per` needs a dialogue, see test_dialogue_runs.
STEP_SIZES = {"optimizer", "schedule", "warm_up_iterations", "decay_iterations"}
HANDED_ON = {
    "reinforce": {"lambda_", "estimator", "n_steps", "normalize_advantage", "discount_per"}
    | {"num_microbatches", *STEP_SIZES},
    "a2c": {"lambda_", "estimator", "discount_per", "num_microbatches", *STEP_SIZES},
    "ppo": {"discount_per"},
    "grpo": STEP_SIZES - {"decay_iterations"},
    "ppo_penalty": {f.name for f in dataclasses.fields(actor_critic.JointLoss)}
    | {"num_epochs", "num_minibatches"},
    "ppo_reference": {f.name for f in dataclasses.fields(ppo.Config)},
    "npg": {"lambda_", "estimator", "n_steps", "normalize_advantage", "discount_per"}
    | {"value_epochs", "value_minibatches"},
    "trpo": {f.name for f in dataclasses.fields(npg.Config)},
    **{name: shared_with_grpo(name) - set(CASES[name][2]) for name in IN_GROUPS if name != "grpo"},
}
