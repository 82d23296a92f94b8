"""Builds every algorithm on every kind of problem; a new algorithm is a line of `ALGORITHMS` and
`CASES`."""

import dataclasses
from functools import cache

import gymnax
import jax
import jax.numpy as jnp
import ppo_reference
from probes import imprecise, tabular_problem, taught
from structured import Everything

from jaxrl_po import control, language
from jaxrl_po.algorithms import (
    a2c,
    cispo,
    dapo,
    distillation,
    dppo,
    dr_grpo,
    gmpo,
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
from jaxrl_po.config import as_arrays

NUM_ROWS = 8


def control_problem(name, axis_name):
    return control.make_problem(
        gymnax.make(name)[0],
        num_envs=NUM_ROWS,
        num_steps=16,
        normalize_observations=True,
        scale_rewards=True,
        axis_name=axis_name,
    )


def everything_problem(axis_name):
    """Builds a problem with memory, masks, two choices, byte images, and a critic that observes
    more than the actor."""
    return control.make_problem(
        Everything(),
        num_envs=NUM_ROWS,
        num_steps=8,
        normalize_observations=True,
        network=control.NetworkSettings(width=8, depth=1, channels=2, memory="gru"),
        axis_name=axis_name,
    )


def language_problem():
    task = language.tasks.addition(1, zero_pad=False)
    sizes = language.ModelSettings(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)
    dtype = jnp.zeros(()).dtype  # float32, or float64 where it is enabled
    model, critic = (
        sizes.build(task.tokenizer.size, outputs=outputs).clone(dtype=dtype) for outputs in (0, 1)
    )
    # Each right token earns credit: a random policy never gets a complete answer right, so that no
    # group would be informative.
    return language.make_problem(
        task,
        model,
        num_prompts=NUM_ROWS,
        group_size=4,
        critic=critic,
        process_reward=True,
        max_new_tokens=4,
        top_p=0.95,
    )


def learned_problem():
    """Builds a problem with actor, critic, reward model, and a reference for `ppo-reference`."""
    task = language.tasks.addition(1, zero_pad=False)
    sizes = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8)
    dtype = jnp.zeros(()).dtype
    model, critic, judge = (
        sizes.build(task.tokenizer.size, outputs=outputs).clone(dtype=dtype)
        for outputs in (0, 1, 1)
    )
    problem = language.make_problem(
        task, model, num_prompts=NUM_ROWS, group_size=1, critic=critic, max_new_tokens=4
    )

    def fitted_before(params, key):
        judged = judge.init(
            jax.random.key(5), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        )
        return language.RewardModel(judged, jnp.zeros(()), jnp.full((), 0.1), jnp.ones(()))

    return language.learned_reward(problem, task, judge, fitted_before)


def dialogue_problem():
    """Builds dialogues of three turns.

    An even token earns reward, and the remainder of a token sets the length of the reply.
    """
    tokenizer = language.make_tokenizer("0123456789")

    def write(action):
        said = jnp.full(2, 3 + action % 5, jnp.int32)
        return language.dialogues.Reply(said, (action % 3).astype(jnp.int32))

    def step(key, count, action):
        return action, count + 1, (action % 2 == 0).astype(jnp.float32), count + 1 >= 3

    dialogue = language.dialogues.game(
        "even tokens",
        tokenizer,
        lambda key: (jax.random.randint(key, (), 0, 10), jnp.int32(0)),
        step,
        write=write,
        read=lambda message, length: message[0],
        observation_length=2,
        message_length=2,
        max_turns=4,
        accuracy=lambda count, total: total / 3,
    )
    dtype = jnp.zeros(()).dtype
    model = language.Transformer(tokenizer.size, width=8, layers=1, heads=2, dtype=dtype)
    return language.dialogues.make_problem(
        dialogue,
        model,
        num_prompts=NUM_ROWS,
        group_size=4,
        min_p=0.2,
        critic=model.clone(outputs=1),
    )


PROBLEMS = {
    "CartPole": lambda axis_name: control_problem("CartPole-v1", axis_name),
    "Pendulum": lambda axis_name: control_problem("Pendulum-v1", axis_name),
    "everything": everything_problem,
    "addition": lambda axis_name: language_problem(),
    "dialogue": lambda axis_name: dialogue_problem(),
    "learned": lambda axis_name: learned_problem(),
    "groups": lambda axis_name: control.make_groups(
        gymnax.make("CartPole-v1")[0], num_prompts=NUM_ROWS, group_size=2, num_steps=24
    ),
    "vine": lambda axis_name: control.make_vine(
        gymnax.make("CartPole-v1")[0], num_envs=NUM_ROWS, num_steps=8, num_states=2, horizon=8
    ),
    "table": lambda axis_name: tabular_problem(num_prompts=NUM_ROWS, group_size=4, dense=False),
    # The problem has a teacher, and a sampler that differs slightly from the policy and lags behind
    # it.
    "mismatch": lambda axis_name: taught(
        imprecise(tabular_problem(num_prompts=NUM_ROWS, group_size=4, dense=False), staleness=2)
    ),
}
FIT = {"value_epochs": 1, "value_minibatches": 2}
ALGORITHMS = {
    "ppo": (ppo, ppo.Config(num_epochs=2, num_minibatches=2, entropy_coefficient=0.01)),
    "ppo-all-switches": (
        ppo,
        ppo.Config(
            num_epochs=2,
            num_minibatches=2,
            num_microbatches=2,
            clip_value=True,
            early_stop=True,
            decay_iterations=5,
        ),
    ),
    "ppo-penalty": (
        ppo_penalty,
        ppo_penalty.Config(num_epochs=2, num_minibatches=2, penalty="satisfied"),
    ),
    "ppo-reference": (
        ppo_reference,
        ppo_reference.Config(num_epochs=2, num_minibatches=2, adapt_reference_kl=True),
    ),
    "reinforce": (reinforce, reinforce.Config(**FIT)),
    "a2c": (a2c, a2c.Config(n_steps=3)),
    "npg": (npg, npg.Config(**FIT)),
    "trpo": (trpo, trpo.Config(**FIT, cg_iterations=5)),
    "grpo": (grpo, grpo.Config(num_epochs=2, num_minibatches=2)),
    "grpo-process": (
        grpo,
        grpo.Config(
            supervision="process", dual_clip=True, reset_iterations=1, warm_up_iterations=3
        ),
    ),
    "grpo-turn": (grpo, grpo.Config(supervision="turn")),
    "ppo-turn": (ppo, ppo.Config(num_epochs=1, num_minibatches=2, discount_per="turn")),
    "grpo-statistics": (
        grpo,
        grpo.Config(running_statistics=True, extra_samples=1, group_divisor="root_size"),
    ),
    "dapo": (dapo, dapo.Config(num_epochs=2, train_prompts=4, max_generation_batches=40)),
    "dapo-carry": (
        dapo,
        dapo.Config(
            carry_surplus=True, train_prompts=4, use_reference=True, overlong_filtering=False
        ),
    ),
    "dapo-reweight": (
        dapo,
        dapo.Config(dynamic_sampling="reweight", clip_higher=False, token_level_loss=False),
    ),
    "dr_grpo": (dr_grpo, dr_grpo.Config()),
    "rloo": (rloo, rloo.Config()),
    "reinforce_pp": (reinforce_pp, reinforce_pp.Config()),
    "reinforce_pp-baseline": (reinforce_pp, reinforce_pp.Config(group_baseline=True)),
    "gspo": (gspo, gspo.Config(num_epochs=2)),
    "cispo": (cispo, cispo.Config(num_epochs=2)),
    "sapo": (sapo, sapo.Config(num_epochs=2)),
    "gmpo": (gmpo, gmpo.Config(num_epochs=2)),
    "dppo": (dppo, dppo.Config(num_epochs=2)),
    "pkpo": (pkpo, pkpo.Config(k=2)),
    "kl_cov": (kl_cov, kl_cov.Config(num_epochs=2, num_minibatches=2, share=0.1)),
    "distillation": (distillation, distillation.Config(num_epochs=2)),
    "maxrl-v3.2": (
        grpo,
        grpo.Config(
            scale="mean", num_epochs=2, mask_off_policy=True, off_policy_kl=0.05, reweight_kl=True
        ),
    ),
    "lite_ppo-truncate": (
        dapo,
        dapo.Config(
            scale="batch",
            dynamic_sampling="off",
            correction="truncate",
            correction_high=1.1,
            soft_overlong=False,
        ),
    ),
}
CASES = [
    ("ppo", "CartPole"),
    ("ppo", "addition"),
    ("ppo-all-switches", "table"),
    ("ppo", "everything"),
    ("trpo", "everything"),
    ("ppo-penalty", "table"),
    ("ppo-reference", "learned"),
    ("reinforce", "CartPole"),
    ("a2c", "CartPole"),
    ("npg", "Pendulum"),
    ("trpo", "CartPole"),
    ("trpo", "addition"),
    ("trpo", "vine"),
    ("grpo", "groups"),
    ("grpo", "addition"),
    ("grpo-process", "table"),
    ("grpo-turn", "dialogue"),
    ("ppo-turn", "dialogue"),
    ("dapo", "dialogue"),
    ("grpo-statistics", "table"),
    ("dapo-carry", "table"),
    ("dapo-reweight", "table"),
    ("dr_grpo", "table"),
    ("rloo", "table"),
    ("reinforce_pp", "table"),
    ("reinforce_pp-baseline", "table"),
    ("gspo", "table"),
    ("cispo", "table"),
    ("sapo", "table"),
    ("gmpo", "table"),
    ("dppo", "mismatch"),
    ("pkpo", "table"),
    ("kl_cov", "table"),
    ("distillation", "mismatch"),
    ("maxrl-v3.2", "mismatch"),
    ("lite_ppo-truncate", "mismatch"),
]


def make(algorithm, problem, axis_name=None, given=None, **changes):
    module, config = ALGORITHMS[algorithm]
    config = dataclasses.replace(as_arrays(config), axis_name=axis_name, **changes)
    return module.make(config, PROBLEMS[problem](axis_name), **given or {})


@cache
def jitted(algorithm, problem):
    """Returns jitted `init(key)` and `step(config, state)`; numbers are traced, so that tests share
    programs."""
    module, _ = ALGORITHMS[algorithm]
    instance = PROBLEMS[problem](None)

    @jax.jit
    def step(config, state):
        return module.make(config, instance).step(state)

    return jax.jit(make(algorithm, problem).init), step
