"""Tests that an update computes a prompt once for its group: the same values from fewer
products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases, slow
from traced import equations

from jaxrl_po import language, updates
from jaxrl_po.algorithms import grpo, ppo, trpo
from jaxrl_po.language import Transformer, dialogues, unembedding
from jaxrl_po.language.lora import Lora
from jaxrl_po.language.networks import GroupedInputs
from jaxrl_po.language.tasks import addition
from jaxrl_po.types import FastPaths

TASK = addition(2)
DEEP = Transformer(TASK.tokenizer.size, width=8, layers=5, heads=2, mlp_width=8, gated=False)
UNLIKE = {
    "plain": {},
    "gemma": {
        "kv_heads": 1,
        "qk_norm": True,
        "post_norms": True,
        "qkv_bias": True,
        "windows": (0, 3, 0, 5, 2),
    },
    "tied": {"tied": True},
    "adapters": {"lora": Lora(2)},
}
PROMPTS, GROUP = 3, 2


def problem_of(model, **options):
    return language.make_problem(
        TASK, model, num_prompts=PROMPTS, group_size=GROUP, temperature=1.5, top_k=9, **options
    )


def spread(tree):
    """Returns parameters far from an initial model, so that differences are visible."""
    return jax.tree.map(
        lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), tree
    )


def drawn(problem):
    """Returns parameters, and rows that share a prompt within each group."""
    generator = np.random.default_rng(0)
    params, collector = jax.eval_shape(problem.init, jax.random.key(0))
    _, batch = jax.eval_shape(problem.collect, params, collector, jax.random.key(1))
    params = jax.tree.map(
        lambda x: jnp.asarray((x.ndim < 3) + 0.3 * generator.normal(size=x.shape), x.dtype), params
    )
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), batch)
    prompts, answers = (
        generator.integers(2, TASK.tokenizer.size, size=(rows, length), dtype=np.int32)
        for rows, length in ((PROMPTS, TASK.prompt_length), (PROMPTS * GROUP, TASK.answer_length))
    )
    tokens = np.concatenate([np.repeat(prompts, GROUP, axis=0), answers], axis=1)
    assert tokens.shape == batch.inputs.tokens.shape
    pad = np.repeat(np.arange(PROMPTS, dtype=np.int32), GROUP)
    among = generator.integers(0, 2, batch.inputs.kept.shape).astype(batch.inputs.kept.dtype)
    if among.dtype == bool:
        np.put_along_axis(among, answers[..., None], True, axis=2)
    else:
        among[:] = np.arange(2, 2 + among.shape[2])
        among[..., 0] = answers
    inputs = batch.inputs._replace(tokens=tokens, pad=pad, kept=among)
    return params, batch._replace(inputs=inputs, action=answers)


@cases("name", "plain", "gemma", slow("tied"), "adapters")
def test_values_and_gradients_are_those_of_whole_rows(name, monkeypatch):
    if name == "tied":
        monkeypatch.setattr(unembedding, "HELD", 1)
    base = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), DEEP.parameter_shapes())
    initial = base if name == "adapters" else None
    problem = problem_of(DEEP.clone(**UNLIKE[name]), initial=initial)
    params, batch = drawn(problem)
    grouped = problem.fast_paths.grouped(batch.inputs)
    assert isinstance(grouped, GroupedInputs)

    def measured(policy, inputs):
        distribution, value = problem.apply(params._replace(policy=policy), inputs)
        log_prob = distribution.log_prob(batch.action)
        return jnp.sum(log_prob * jnp.cos(jnp.arange(log_prob.size)).reshape(log_prob.shape)), (
            log_prob,
            distribution.entropy(),
            value,
        )

    gradient = jax.value_and_grad(measured, has_aux=True)
    both = jax.jit(lambda policy: [gradient(policy, inputs) for inputs in (batch.inputs, grouped)])(
        params.policy
    )
    (_, of_rows), slope = both[0]
    assert np.abs(of_rows[0]).max() > 0.5
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(slope))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, scale)), *both)


def read_positions(learner, *, sampling=False):
    """Returns the positions that the MLP processes in one update, over all products with its matrix
    `up`."""
    state = jax.eval_shape(learner.init, jax.random.key(0))
    if sampling:
        program = jax.make_jaxpr(learner.sample)(state)
    else:
        state, batch = jax.eval_shape(learner.sample, state)
        program = jax.make_jaxpr(learner.update)(state, batch)
    products = (e.invars for e in equations(program.jaxpr) if e.primitive.name == "dot_general")
    return max(x.aval.shape[0] for x, matrix in products if matrix.aval.shape == (8, 24))


def test_a_core_computes_whole_groups(monkeypatch):
    """In parts that stay in a core's cache, prompts would be computed once per row."""
    asked, update = [], updates.gradient_update

    def recorded(*arguments, slots, **options):
        asked.append(slots)
        return update(*arguments, slots=slots, **options)

    monkeypatch.setattr(updates, "gradient_update", recorded)
    problem = problem_of(DEEP)
    for each in (problem, problem._replace(fast_paths=FastPaths())):
        learner = grpo.make(grpo.Config(use_reference=False), each)
        jax.eval_shape(
            lambda key, step=learner.step, init=learner.init: step(init(key)), jax.random.key(0)
        )
    assert asked == [None, TASK.answer_length]


@pytest.mark.parametrize(
    "config", [{"num_minibatches": 3}, {"num_microbatches": 6}], ids=["shuffled", "parts of groups"]
)
def test_partial_groups_are_read_whole(config):
    learner = grpo.make(grpo.Config(**config), problem_of(DEEP.clone(mlp_width=24)))
    parts = 3 if "num_minibatches" in config else 6
    rows = PROMPTS * GROUP // parts
    assert read_positions(learner) == rows * (TASK.prompt_length + TASK.answer_length - 1)


def test_omitted_members_make_groups_partial():
    """Two of four members are trained: the rows of two prompts must not be taken for one group."""
    problem = language.make_problem(TASK, DEEP.clone(mlp_width=24), num_prompts=2, group_size=4)
    learner = grpo.make(grpo.Config(extra_samples=2, use_reference=False), problem)
    assert read_positions(learner) == 4 * (TASK.prompt_length + TASK.answer_length - 1)


def test_shallow_models_read_whole_rows():
    """The sums of shallow models keep the order that a seed has always given."""
    assert problem_of(DEEP.clone(layers=2)).fast_paths.grouped is None


CRITIC = Transformer(TASK.tokenizer.size, outputs=1, width=4, layers=1, heads=1, mlp_width=4)
IN_ORDER = {
    "ppo": lambda problem: ppo.make(ppo.Config(num_minibatches=1, num_epochs=1), problem),
    "trpo": lambda problem: trpo.make(
        trpo.Config(fisher_stride=3, cg_iterations=2, value_minibatches=3, value_epochs=1), problem
    ),
    "grpo": lambda problem: grpo.make(grpo.Config(num_microbatches=3), problem),
}


@cases("name", "grpo", slow("ppo"), slow("trpo"))
def test_ordered_update_reads_prompts_once(name):
    """The policy computes prompts once, in parts of whole groups for GRPO; the critic and rows of
    Fisher products are computed completely."""
    parts = 3 if name == "grpo" else 1
    problem = problem_of(DEEP.clone(mlp_width=24), critic=None if name == "grpo" else CRITIC)
    learners = [IN_ORDER[name](x) for x in (problem, problem._replace(fast_paths=FastPaths()))]
    rows, columns, budget = PROMPTS * GROUP, TASK.prompt_length, TASK.answer_length
    assert read_positions(learners[1]) == rows // parts * (columns + budget - 1)
    assert read_positions(learners[0]) == (PROMPTS * columns + rows * (budget - 1)) // parts

    @jax.jit
    def both(key):
        state, batch = learners[0].sample(learners[0].init(key))
        reward = jnp.where(batch.terminated, jnp.arange(rows)[:, None] % 3, 0.0)
        return [each.update(state, batch._replace(reward=reward)) for each in learners]

    ends = [
        (state.params.policy, state.params.value, metrics["kl"].value())
        for state, metrics in both(jax.random.key(2))
    ]
    assert float(ends[0][2]) > 1e-7
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), *ends)


@cases("name", "ppo", "trpo")
def test_old_log_probs_match_pass_of_update(name):
    """In another pass the log-probabilities would round differently, and no ratio would begin at
    1."""
    problem = problem_of(DEEP.clone(mlp_width=24), critic=CRITIC, old_log_prob="learner")
    rows, columns, budget = PROMPTS * GROUP, TASK.prompt_length, TASK.answer_length
    read = read_positions(IN_ORDER[name](problem), sampling=True)
    assert read == PROMPTS * columns + rows * (budget - 1)


def test_dialogues_share_their_prompts_too():
    dialogue = dialogues.higher_lower(numbers=8, max_turns=3)
    model = DEEP.clone(vocabulary=dialogue.tokenizer.size)
    problem = dialogues.make_problem(dialogue, model, num_prompts=PROMPTS, group_size=GROUP)

    @jax.jit
    def both(key):
        params, collector = problem.init(key)
        params = params._replace(policy=spread(params.policy))
        _, batch = problem.collect(params, collector, key)
        grouped = problem.fast_paths.grouped(batch.inputs)
        assert grouped.prompt.shape == (PROMPTS, dialogue.prompt_length)
        return [
            problem.apply(params, inputs)[0].log_prob(batch.action)
            for inputs in (batch.inputs, grouped)
        ]

    of_rows, of_groups = both(jax.random.key(0))
    np.testing.assert_allclose(of_groups, of_rows, atol=2e-5)


def test_shuffled_rows_with_critic_are_read_whole():
    problem = problem_of(DEEP.clone(mlp_width=24), critic=CRITIC)
    learner = ppo.make(ppo.Config(num_minibatches=PROMPTS, num_epochs=1), problem)
    assert read_positions(learner) == GROUP * (TASK.prompt_length + TASK.answer_length - 1)
