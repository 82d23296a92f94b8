"""Of every field of every config: a change of it that changes what a few steps lead to."""

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
    group_policy,
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
            "correction": {"correction": "truncate", "correction_high": 1.0},
            "correction_low": (
                {"correction": "mask"},
                {"correction": "mask", "correction_low": 1.0},
            ),
            "correction_high": (
                {"correction": "mask"},
                {"correction": "mask", "correction_high": 1.0},
            ),
            "mask_off_policy": {"mask_off_policy": True, "off_policy_kl": 0.0},
            "off_policy_kl": (
                {"mask_off_policy": True},
                {"mask_off_policy": True, "off_policy_kl": 0.0},
            ),
            "reweight_kl": {"reweight_kl": True, "kl_coefficient": 1.0},
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
    "sapo": (
        sapo,
        sapo.Config(learning_rate=3e-2, num_epochs=3),
        {
            "temperature_positive": {"temperature_positive": 9.0},
            "temperature_negative": {"temperature_negative": 9.0},
        },
    ),
    "gmpo": (
        gmpo,
        gmpo.Config(learning_rate=3e-2, num_epochs=3),
        {"epsilon_low": {"epsilon_low": 1e-3}, "epsilon_high": {"epsilon_high": 1e-3}},
    ),
    "dppo": (
        dppo,
        dppo.Config(learning_rate=3e-2, num_epochs=3),
        {
            "delta_low": {"delta_low": 1e-3},
            "delta_high": {"delta_high": 1e-3},
            "max_ratio": {"max_ratio": 0.9},
        },
    ),
    "pkpo": (pkpo, pkpo.Config(k=2), {"k": {"k": 3}}),
    "kl_cov": (
        kl_cov,
        kl_cov.Config(learning_rate=3e-2, num_epochs=3),
        {"share": {"share": 0.5}, "penalty": {"penalty": 0.0}},
    ),
    "distillation": (distillation, distillation.Config(), {}),
}
IN_GROUPS = (
    *("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo"),
    *("sapo", "gmpo", "dppo", "pkpo", "kl_cov", "distillation"),
)


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
