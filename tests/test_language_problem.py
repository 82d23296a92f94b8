"""Tests language as a `Problem`, its evaluation and its warm start."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases, slow

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.language import demonstrations, dialogues, reward_model
from jaxrl_po.language.warm_start import BETWEEN
from jaxrl_po.types import ActorCritic, CollectorState

TASK = language.tasks.addition(2, zero_pad=False)
SIZES = language.ModelSettings(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)
MODEL, CRITIC = SIZES.build(TASK.tokenizer.size), SIZES.build(TASK.tokenizer.size, outputs=1)


def make(**options):
    return language.make_problem(
        TASK,
        MODEL,
        **({"num_prompts": 6, "group_size": 3, "critic": CRITIC, "temperature": 1.3} | options),
    )


def drawn(model):
    return jax.device_get(probes.drawn(model.parameter_shapes(), 0.3, (1,)))


def begun():
    """Returns parameters with a non-uniform policy, and the state of a collector."""
    params = ActorCritic(drawn(MODEL), drawn(CRITIC))
    return params, CollectorState({"prompt_number": np.arange(6, dtype=np.int32)})


@functools.cache
def collected(**options):
    """Returns parameters, a collector, and a batch with the learner's log-probabilities and
    values."""
    problem = make(**options)
    params, collector = begun()
    params = params._replace(value=params.value if options.get("critic", CRITIC) else None)

    @jax.jit
    def run(params, collector, key):
        _, batch = problem.collect(params, collector, key)
        distribution, value = problem.apply(params, batch.inputs)
        return batch, distribution.log_prob(batch.action), value

    found = run(params, collector, jax.random.key(1))
    return params, collector, *jax.tree.map(np.asarray, found)


@cases(
    "options",
    {},
    {"temperature": 0.7, "top_p": 0.8, "critic": None},
    *(slow(options) for options in ({"temperature": 0.7}, {"top_k": 4})),
)
def test_sampler_and_learner_agree(options):
    """For ragged prompts, any temperature and truncation, the ratio is 1 before the first
    update."""
    params, _, batch, log_prob, _ = collected(**options)
    assert len(np.unique(batch.inputs.pad)) > 1
    assert_allclose(np.where(batch.mask, log_prob, 0.0), batch.log_prob, atol=1e-4)
    if params.value is None:
        assert not batch.value.any()
        assert not batch.next_value.any()


def test_mask_follows_the_length_and_keeps_eos():
    _, _, batch, _, _ = collected()
    eos, pad = TASK.tokenizer.eos, TASK.tokenizer.pad
    tokens, mask = batch.action, batch.mask
    some_end = False
    for row, kept in zip(tokens, mask, strict=True):
        length = kept.sum()
        assert kept[:length].all()
        assert (row[length:] == pad).all()
        if length < len(row) or row[-1] == eos:
            assert row[length - 1] == eos
            some_end = True
        assert (row[: length - 1] != eos).all()
    assert some_end
    assert (tokens[mask] == eos).any()


def test_last_token_terminates_and_the_budget_truncates():
    _, _, batch, _, _ = collected()
    length = batch.mask.sum(1)
    last = np.arange(batch.mask.shape[1]) == length[:, None] - 1
    assert_array_equal(batch.terminated, last)
    # The score is that of the complete answer.
    assert_array_equal(batch.columns["step_end"], last)
    ended = (batch.action == TASK.tokenizer.eos).any(1)
    assert not ended.all()
    assert_array_equal(batch.truncated, last & ~ended[:, None])
    assert_allclose(batch.metrics["truncated"].value(), 1.0 - ended.mean())
    assert_allclose(batch.metrics["response_length"].value(), length.mean())


def test_values_are_shifted_and_end_at_zero():
    _, _, batch, _, value = collected()
    assert_allclose(batch.value, value, rtol=1e-4, atol=1e-6)
    last = batch.terminated
    assert_array_equal(batch.next_value[last], 0.0)
    inner = batch.mask & ~last
    assert_allclose(batch.next_value[inner], np.roll(value, -1, 1)[inner], rtol=1e-4, atol=1e-6)


@cases("process_reward", False, True)
def test_rewards_match_the_verifier_exactly(process_reward):
    """Each completion scores .9; credit depends on the token, the form on the first token."""
    task = TASK._replace(
        score=lambda problem, tokens: jnp.float32(0.9),
        credit=lambda problem, tokens: 0.25 * tokens,
        parses=lambda problem, tokens: tokens[0] > 5,
    )
    problem = language.make_problem(
        task, MODEL, num_prompts=4, group_size=4, process_reward=process_reward
    )
    batch = jax.jit(lambda key: problem.collect(*problem.init(key), key)[1])(jax.random.key(0))
    credit = np.where(batch.mask, 0.25 * batch.action, 0.0)
    at_end = np.where(batch.terminated, np.float32(0.9), np.float32(0.0))
    assert_array_equal(batch.reward, credit if process_reward else at_end)
    assert_array_equal(batch.score, np.float32(0.9))
    assert batch.metrics["accuracy"].value() == np.float32(0.9)
    assert 0.0 < batch.metrics["malformed"].value() == np.mean(batch.action[:, 0] <= 5) < 1.0


def test_training_and_evaluation_ask_of_their_own_split():
    asked = []

    def sample(key, held_out):
        asked.append(held_out)
        return TASK.sample(key, held_out)

    problem = language.make_problem(
        TASK._replace(sample=sample), MODEL, num_prompts=2, group_size=2
    )
    asked.clear()  # `make_problem` has already called the sampler of prompts to check lengths
    state = jax.eval_shape(problem.init, jax.random.key(0))
    jax.eval_shape(problem.collect, *state, jax.random.key(1))
    assert asked == [False]
    jax.eval_shape(
        language.make_evaluate(TASK._replace(sample=sample), MODEL, num_prompts=2),
        *state,
        jax.random.key(1),
    )
    assert asked == [False, True]


def test_groups_share_their_prompt_but_not_their_completion():
    _, _, batch, _, _ = collected()
    prompts = batch.inputs.tokens[:, : TASK.prompt_length].reshape(6, 3, -1)
    assert (prompts == prompts[:, :1]).all()
    assert len(np.unique(prompts[:, 0], axis=0)) > 1
    assert len(np.unique(batch.action[:3], axis=0)) > 1


def test_completions_do_not_depend_on_where_prompts_lie():
    params, collector, batch, _, _ = collected()
    problem = make()
    tokens = jax.jit(
        lambda part: (
            problem.collect(params, CollectorState({"prompt_number": part}), jax.random.key(1))[
                1
            ].inputs.tokens
        )
    )
    halves = map(tokens, np.split(np.asarray(collector.sharded["prompt_number"]), 2))
    assert_array_equal(batch.inputs.tokens, np.concatenate([*halves]))


def test_warm_start_stops_at_accuracy_of_the_verifier():
    """A verifier that accepts every answer ends the warm start at its first measurement."""
    warm = language.WarmStart(steps=2 * BETWEEN, accuracy=0.5, batch_size=2)

    def init(right):
        task = TASK._replace(score=lambda problem, tokens: jnp.float32(right))
        problem = language.make_problem(task, MODEL, num_prompts=2, group_size=2, warm=warm)
        return jax.jit(problem.init)(jax.random.key(0))[0].policy

    stopped, whole = init(1.0), init(0.0)
    assert not np.array_equal(jax.tree.leaves(stopped)[0], jax.tree.leaves(whole)[0])


@cases(
    "changes, message",
    (
        {"answer_length": 7},
        r"^task: demonstrate of 2-digit addition must give tokens of the shape \[7\], its "
        r"answer_length, padding included, got \[4\]$",
    ),
    ({"prompt_length": 9}, r"^task: sample of .* shape \[9\], its prompt_length, .* got \[6\]$"),
    (
        {"sample": lambda key, test: TASK.sample(key, test)._replace(pad=jnp.zeros(1, int))},
        r"^task: sample of .* must give a pad of the shape \[\], got \[1\]$",
    ),
    (
        {"score": lambda problem, tokens: jnp.ones(tokens.shape)},
        r"^task: score of .* must give a number of the shape \[\], got \[4\]$",
    ),
)
def test_a_task_whose_shapes_disagree_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        language.make_problem(TASK._replace(**changes), MODEL)


@cases(
    "options, match",
    ({"temperature": 0.0}, "temperature"),
    ({"top_p": 0.0}, r"top_p: must lie in \(0, 1\], got 0"),
    ({"top_k": 15}, "top_k: must be at most 14, the vocabulary, got 15"),
    ({"max_new_tokens": 3}, "max_new_tokens: must be at least 4"),
    ({"critic": MODEL}, "critic: must have outputs = 1"),
)
def test_bad_arguments_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        make(**options)


@cases(
    "sizes, match",
    ({"width": 12, "heads": 4}, "width: must be a multiple of 2 × heads = 8, got "),
    ({"heads": 4, "kv_heads": 3}, "kv_heads"),
)
def test_bad_models_are_named(sizes, match):
    with pytest.raises(ConfigError, match=match):
        language.ModelSettings(**sizes).build(14)


def test_other_bad_input():
    with pytest.raises(ConfigError, match=r"^model: vocabulary must be 14"):
        language.make_problem(TASK, SIZES.build(15))
    with pytest.raises(ConfigError, match=r"^critic: vocabulary must be 14"):
        language.make_problem(TASK, MODEL, critic=SIZES.build(15, outputs=1))
    for steps, accuracy, message in ((0, 0.5, "has no effect"), (1, 1.5, "must lie in")):
        warm = language.WarmStart(steps=steps, accuracy=accuracy)
        with pytest.raises(ConfigError, match=f"accuracy: {message}"):
            language.make_problem(TASK, MODEL, warm=warm)


def test_task_says_where_process_reward_is_due():
    """A reward is due at every token if digits are scored, otherwise at a chain's marks and at its
    end."""
    for task, marks in (
        (language.tasks.addition(1), None),
        (language.tasks.countdown(2, max_number=9), []),
        (language.tasks.multiplication(2), [3, 8, 13]),
    ):
        model = SIZES.build(task.tokenizer.size)
        problem = language.make_problem(
            task, model, num_prompts=4, group_size=2, process_reward=True, initial=drawn(model)
        )

        def collect(problem=problem):
            return problem.collect(*problem.init(jax.random.key(0)), jax.random.key(1))[1]

        if marks is None:
            assert "step_end" not in jax.eval_shape(collect).columns
            continue
        batch = jax.tree.map(np.asarray, jax.jit(collect)())
        want = np.array(batch.terminated)
        want[:, marks] = True
        assert_array_equal(batch.columns["step_end"], want)
        # Slots where no reward is due have a reward of 0.
        assert not ((batch.reward != 0.0) & ~want).any()


@cases(
    "got, model",
    ("the class Transformer", language.Transformer),
    ("the nnx module Linear", nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    ("function", lambda tokens, pad: tokens),
    ("Dense", nn.Dense(2)),  # a module that does not declare its vocabulary
)
def test_models_that_are_no_modules_are_named(got, model):
    dialogue = dialogues.mastermind(2, symbols=2)
    sound = language.Transformer(dialogue.tokenizer.size, 8, 1, 2)
    makes = {
        "model": (
            lambda: language.make_problem(TASK, model),
            lambda: language.make_evaluate(TASK, model),
            lambda: demonstrations.make_problem(TASK, model),
            lambda: dialogues.make_problem(dialogue, model),
            lambda: dialogues.make_evaluate(dialogue, model),
        ),
        "critic": (
            lambda: language.make_problem(TASK, MODEL, critic=model),
            lambda: dialogues.make_problem(dialogue, sound, critic=model),
        ),
        "reward_model": (lambda: reward_model.learned_reward(None, TASK, model, None),),
    }
    for role, factories in makes.items():
        for make in factories:
            message = f"^{role}: must be an instance of flax.linen.Module.* got {got}: .*ToLinen"
            with pytest.raises(ConfigError, match=message):
                make()
