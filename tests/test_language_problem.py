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
from jaxrl_po.language.warm_start import greedy_accuracy
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
def program(**options):
    """Returns a program that collects a batch and computes the learner's log-probabilities and
    values."""
    problem = make(**options)

    @jax.jit
    def run(params, collector, key):
        _, batch = problem.collect(params, collector, key)
        distribution, value = problem.apply(params, batch.inputs)
        return batch, distribution.log_prob(batch.action), value

    return run


@functools.cache
def collected(**options):
    params, collector = begun()
    params = params._replace(value=params.value if options.get("critic", CRITIC) else None)
    found = program(**options)(params, collector, jax.random.key(1))
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


class Oracle:
    """Model that always continues with the right answer, so that rewards are known.

    If requested, the model begins with a wrong token: the number of wrong tokens may be traced.
    """

    def __init__(self, wrong_first=False):
        self.vocabulary, self.outputs, self.wrong_first = TASK.tokenizer.size, 0, wrong_first

    def init(self, key, tokens, pad):
        return {}

    def empty_cache(self, batch, length):
        return jnp.zeros((batch, length), jnp.int32)

    def apply(self, params, tokens, pad, cache=None, start=0, *, last=0):
        seen = jax.lax.dynamic_update_slice_in_dim(cache, tokens, start, axis=1)
        zero, plus = TASK.tokenizer.ids["0"], TASK.tokenizer.ids["+"]

        def answer(row, pad):
            at = jnp.arange(TASK.prompt_length)
            prompt = row[: TASK.prompt_length]
            sign = jnp.argmax(prompt == plus)
            first, second = (at >= pad) & (at < sign), (at > sign) & (at < TASK.prompt_length - 1)
            a = jnp.sum(jnp.where(first, (prompt - zero) * 10 ** jnp.clip(sign - 1 - at, 0, 3), 0))
            b = jnp.sum(
                jnp.where(
                    second, (prompt - zero) * 10 ** jnp.clip(TASK.prompt_length - 2 - at, 0, 3), 0
                )
            )
            return TASK.demonstrate((a.astype(jnp.uint32), b.astype(jnp.uint32)))

        answers = jax.vmap(answer)(seen, pad)
        changed = jnp.where(answers[:, 0] == zero, zero + 1, zero)
        first = jnp.where(self.wrong_first, changed, answers[:, 0])
        answers = answers.at[:, 0].set(first)
        t = start + tokens.shape[1] - TASK.prompt_length
        token = jax.lax.dynamic_index_in_dim(answers, t, axis=1, keepdims=False)
        return jnp.where(jax.nn.one_hot(token, self.vocabulary, dtype=bool), 0.0, -jnp.inf)[
            :, None
        ], seen


@functools.cache
def answered():
    """Returns a program that maps `wrong_first` to a batch of each kind of reward and to an
    evaluation."""

    def run(wrong_first):
        model, keys = Oracle(wrong_first), jax.random.split(jax.random.key(0))
        batches = []
        for process_reward in (False, True):
            problem = language.make_problem(
                TASK, model, num_prompts=16, group_size=2, process_reward=process_reward
            )
            params, collector = problem.init(keys[0])
            batches.append(problem.collect(params, collector, keys[1])[1])
        evaluate = language.make_evaluate(TASK, model, num_prompts=8)
        return batches, evaluate(params, collector, keys[0])

    return jax.jit(run)


@cases("wrong_first, accuracy", (False, 1.0), (True, 0.0))
def test_rewards_of_known_answers(wrong_first, accuracy):
    batches, evaluated = jax.tree.map(np.asarray, answered()(wrong_first))
    for batch in batches:
        assert batch.score.shape == (16, 2)
        assert batch.reward.dtype == batch.score.dtype == np.float32
        assert_array_equal(batch.score, accuracy)
        assert_allclose(batch.metrics["accuracy"].value(), accuracy)
    whole, by_token = batches
    assert_array_equal(whole.reward, np.where(whole.terminated, accuracy, 0.0))
    length = by_token.mask.sum(1, dtype=np.float32)
    if accuracy:
        assert_allclose(
            by_token.reward, np.where(by_token.mask, 1.0 / length[:, None], 0.0), rtol=1e-6
        )
    else:
        assert_allclose(by_token.reward.sum(1), 1.0 - 1.0 / length, rtol=1e-5)
        assert_array_equal(by_token.reward[:, 0], 0.0)
    assert_array_equal(evaluated["greedy_accuracy"], accuracy)


def test_rewards_match_the_verifier_exactly():
    task = TASK._replace(score=lambda problem, tokens: jnp.float32(0.9))
    problem = language.make_problem(task, Oracle(), num_prompts=2, group_size=2)
    batch = jax.jit(lambda key: problem.collect(*problem.init(key), key)[1])(jax.random.key(0))
    assert_array_equal(batch.reward, np.where(batch.terminated, np.float32(0.9), np.float32(0.0)))
    assert_array_equal(batch.score, np.float32(0.9))


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


def test_groups_share_their_prompt_and_keys_differ():
    params, collector, batch, _, _ = collected()
    prompts = batch.inputs.tokens[:, : TASK.prompt_length].reshape(6, 3, -1)
    assert (prompts == prompts[:, :1]).all()
    assert len(np.unique(prompts[:, 0], axis=0)) > 1
    assert len(np.unique(batch.action[:3], axis=0)) > 1
    run = program()
    again = run(params, collector, jax.random.key(1))[0]
    programs = run._cache_size()
    other = run(params, collector, jax.random.key(2))[0]
    assert_array_equal(again.inputs.tokens, batch.inputs.tokens)
    assert not np.array_equal(other.inputs.tokens, batch.inputs.tokens)
    assert run._cache_size() == programs


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


def test_evaluation_is_greedy_repeatable_and_held_out():
    params, collector = begun()
    evaluate = jax.jit(language.make_evaluate(TASK, MODEL, num_prompts=16))
    first, second = (evaluate(params, collector, jax.random.key(3)) for _ in range(2))
    assert_array_equal(first["greedy_length"], second["greedy_length"])
    assert first["greedy_accuracy"].shape == (16,)


def test_warm_start_stops_at_accuracy_of_the_verifier():
    """If right answers differ from the demonstration, only the verifier can stop the warm start."""
    task = language.tasks.running_sum(2, max_filler=8)
    model = language.ModelSettings(width=32, layers=1, heads=2, kv_heads=2, mlp_width=64).build(
        task.tokenizer.size
    )

    def init(key, **options):
        problem = language.make_problem(task, model, num_prompts=2, group_size=2, **options)
        return problem.init(key)[0].policy

    @jax.jit
    def measured(key):
        warm = language.WarmStart(steps=1500, accuracy=0.3, batch_size=64, learning_rate=5e-3)
        some = init(key, warm=warm)
        accuracy = greedy_accuracy(model, some, task, jax.random.key(9))
        return some, init(key, warm=language.WarmStart(steps=0)), init(key), accuracy

    some, none, untouched, accuracy = measured(jax.random.key(0))
    assert 0.2 < accuracy < 0.7  # all steps of the warm start would exceed an accuracy of 0.9
    jax.tree.map(assert_array_equal, none, untouched)
    assert not np.array_equal(jax.tree.leaves(some)[0], jax.tree.leaves(none)[0])


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
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 0.0}, r"top_p: must lie in \(0, 1\], got 0"),
    ({"top_p": 1.1}, r"top_p: must lie in \(0, 1\], got 1.1"),
    ({"top_p": float("nan")}, r"top_p: must lie in \(0, 1\], got nan"),
    ({"min_p": 1.0}, r"min_p: must lie in \[0, 1\), got 1"),
    ({"min_p": -0.1}, r"min_p: must lie in \[0, 1\), got -0.1"),
    ({"top_k": -1}, "top_k: must lie in"),
    ({"top_k": 15}, "top_k: must be at most 14, the vocabulary, got 15"),
    ({"num_prompts": 0}, "num_prompts"),
    ({"group_size": -2}, "group_size"),
    ({"max_new_tokens": 3}, "max_new_tokens: must be at least 4"),
    ({"critic": MODEL}, "critic: must have outputs = 1"),
)
def test_bad_arguments_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        make(**options)


@cases(
    "sizes, match",
    ({"width": 12, "heads": 4}, "width: must be a multiple of 2 × heads = 8, got "),
    ({"width": 10, "heads": 4}, "width: must be a multiple of 2 × heads = 8, got "),
    ({"heads": 4, "kv_heads": 3}, "kv_heads"),
    ({"layers": 0}, "layers"),
    ({"dtype": "float8"}, "dtype"),
)
def test_bad_models_are_named(sizes, match):
    with pytest.raises(ConfigError, match=match):
        language.ModelSettings(**sizes).build(14)


def test_other_bad_input():
    with pytest.raises(ConfigError, match=r"^model: vocabulary must be 14"):
        language.make_problem(TASK, SIZES.build(15))
    with pytest.raises(ConfigError, match=r"^critic: vocabulary must be 14"):
        language.make_problem(TASK, MODEL, critic=SIZES.build(15, outputs=1))
    with pytest.raises(ConfigError, match="num_prompts"):
        language.make_evaluate(TASK, MODEL, num_prompts=0)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        language.make_evaluate(TASK, MODEL, decoding=language.Decoding(2))
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
