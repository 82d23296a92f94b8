"""In an update a prompt is read once for its group: the same values, of fewer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced import equations

from jaxrl_po import language
from jaxrl_po.algorithms import grpo
from jaxrl_po.language import Transformer, dialogues, unembedding
from jaxrl_po.language.lora import Lora
from jaxrl_po.language.networks import Grouped
from jaxrl_po.language.tasks import addition

TASK = addition(2)
DEEP = Transformer(TASK.tokenizer.size, width=8, layers=5, heads=2, mlp_width=8)
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
}
PROMPTS, GROUP = 3, 2


def problem_of(model, **options):
    return language.make_problem(
        TASK, model, num_prompts=PROMPTS, group_size=GROUP, temperature=1.5, **options
    )


def spread(tree):
    """Parameters far from an initial model, so that differences show."""
    return jax.tree.map(
        lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), tree
    )


def sampled(problem):
    params, collector = problem.init(jax.random.key(0))
    params = params._replace(policy=spread(params.policy))
    _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    pad = jnp.repeat(jnp.arange(PROMPTS), GROUP)
    return params, batch._replace(inputs=batch.inputs._replace(pad=pad))


@pytest.mark.parametrize("name", UNLIKE)
def test_values_and_gradients_are_those_of_whole_rows(name, monkeypatch):
    if name == "tied":
        monkeypatch.setattr(unembedding, "HELD", 1)
    problem = problem_of(DEEP.clone(**UNLIKE[name]))
    params, batch = sampled(problem)
    grouped = problem.grouped(batch.inputs)
    assert isinstance(grouped, Grouped)

    @jax.jit
    def measured(policy, inputs):
        distribution, value = problem.apply(params._replace(policy=policy), inputs)
        log_prob = distribution.log_prob(batch.action)
        return jnp.sum(log_prob * jnp.cos(jnp.arange(log_prob.size)).reshape(log_prob.shape)), (
            log_prob,
            distribution.entropy(),
            value,
        )

    both = [
        jax.jit(jax.value_and_grad(measured, has_aux=True))(params.policy, inputs)
        for inputs in (batch.inputs, grouped)
    ]
    (_, of_rows), gradient = both[0]
    assert float(jnp.abs(of_rows[0]).max()) > 0.5
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, scale)), *both)


def test_adapters_get_the_gradients_of_whole_rows():
    base = DEEP.init(jax.random.key(5), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    problem = problem_of(DEEP.clone(lora=Lora(2)), initial=base)
    params, batch = sampled(problem)

    def loss(policy, inputs):
        held = params._replace(policy=policy)
        return problem.apply(held, inputs)[0].log_prob(batch.action).mean()

    gradients = [
        jax.jit(jax.grad(loss))(params.policy, inputs)
        for inputs in (batch.inputs, problem.grouped(batch.inputs))
    ]
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients[0])) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *gradients)


def read_positions(learner):
    """Positions that the MLP sees in one update, over all products with its matrix `up`."""
    state = jax.eval_shape(learner.init, jax.random.key(0))
    state, batch = jax.eval_shape(learner.sample, state)
    program = jax.make_jaxpr(learner.update)(state, batch)
    products = (e.invars for e in equations(program.jaxpr) if e.primitive.name == "dot_general")
    return max(x.aval.shape[0] for x, matrix in products if matrix.aval.shape == (8, 24))


@pytest.mark.parametrize("parts", [1, 3])
def test_an_update_in_order_reads_prompts_once_and_equals_one_of_whole_rows(parts):
    problem = problem_of(DEEP.clone(mlp_width=24))
    whole = problem._replace(grouped=None)
    config = grpo.Config(num_microbatches=parts, learning_rate=0.01)
    learners = [grpo.make(config, each) for each in (problem, whole)]
    columns, budget = TASK.prompt_length, TASK.answer_length
    members = GROUP * PROMPTS // parts
    assert read_positions(learners[1]) == members * (columns + budget - 1)
    assert read_positions(learners[0]) == PROMPTS // parts * columns + members * (budget - 1)
    ends = []
    for learner in learners:
        state, batch = jax.jit(learner.sample)(learner.init(jax.random.key(2)))
        reward = jnp.where(batch.terminated, jnp.arange(PROMPTS * GROUP)[:, None] % 3, 0.0)
        state, metrics = jax.jit(learner.update)(state, batch._replace(reward=reward))
        ends.append((state.params.policy, metrics["kl"].value(), metrics["grad_norm"].value()))
    assert float(ends[0][1]) > 1e-7
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), *ends)


@pytest.mark.parametrize(
    "config", [{"num_minibatches": 3}, {"num_microbatches": 6}], ids=["shuffled", "parts of groups"]
)
def test_rows_that_are_no_whole_groups_are_read_whole(config):
    learner = grpo.make(grpo.Config(**config), problem_of(DEEP.clone(mlp_width=24)))
    parts = 3 if "num_minibatches" in config else 6
    rows = PROMPTS * GROUP // parts
    assert read_positions(learner) == rows * (TASK.prompt_length + TASK.answer_length - 1)


def test_members_that_are_left_out_leave_no_whole_groups():
    """Two of four are trained: the rows of two prompts must not be taken for one group."""
    deep = DEEP.clone(mlp_width=24)
    problem = language.make_problem(TASK, deep, num_prompts=2, group_size=4)
    learner = grpo.make(grpo.Config(extra_samples=2, use_reference=False), problem)
    assert read_positions(learner) == 4 * (TASK.prompt_length + TASK.answer_length - 1)


def test_shallow_models_and_those_with_a_critic_read_whole_rows():
    """Their sums keep the order that a seed has always given."""
    shallow = problem_of(DEEP.clone(layers=2))
    critic = problem_of(DEEP, critic=DEEP.clone(outputs=1))
    for problem in (shallow, critic):
        assert problem.grouped is None


def test_dialogues_share_their_prompts_too():
    dialogue = dialogues.higher_lower(numbers=8, max_turns=3)
    model = DEEP.clone(vocabulary=dialogue.tokenizer.size)
    problem = dialogues.make_problem(dialogue, model, num_prompts=PROMPTS, group_size=GROUP)
    params, collector = problem.init(jax.random.key(0))
    params = params._replace(policy=spread(params.policy))
    _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    grouped = problem.grouped(batch.inputs)
    assert grouped.prompt.shape == (PROMPTS, dialogue.prompt_length)
    of_rows, of_groups = (
        jax.jit(problem.apply)(params, inputs)[0].log_prob(batch.action)
        for inputs in (batch.inputs, grouped)
    )
    np.testing.assert_allclose(of_groups, of_rows, atol=2e-5)
