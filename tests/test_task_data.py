"""Tests that prompts of a file are arguments of the programs: as constants they were part of the
text."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_prompts import ROWS, write

from jaxrl_po import language
from jaxrl_po.algorithms import grpo
from jaxrl_po.language.tasks import Example, table
from jaxrl_po.language.tasks.types import DATA, reading
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import over_seeds
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment import language_config, settings
from jaxrl_po.run.store import provenance
from jaxrl_po.types import CollectorState, TrainState

HERE = Path(__file__).parent / "support" / "reward_functions.py"
TOKENIZER = language.make_tokenizer("0123456789+=")
MODEL = language.Transformer(TOKENIZER.size, width=8, layers=1, heads=2, mlp_width=8)


def sums(count, answer=lambda i: i % 10):
    train = [Example(f"{i:05d}+{i % 7}=", str(answer(i))) for i in range(count)]
    return table("sums", TOKENIZER, train, [Example(f"{i}=", "1") for i in range(8)])


def learner_of(task, **options):
    sizes = {"num_prompts": 4, "group_size": 2} | options
    problem = language.make_problem(task, MODEL, **sizes)
    return grpo.make(grpo.Config(use_reference=False), problem)


def constant(task):
    """Returns the same task with functions that read arrays from the program."""
    return task._replace(data=None)


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (left, right)))


@pytest.mark.parametrize("prompt_set", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_values_are_those_of_constants_to_the_bit(prompt_set):
    task = sums(50)

    def outcome(each):
        """Returns two batches and an evaluation.

        The task has its data even without the state's data.
        """
        learner = learner_of(each, prompt_set=prompt_set)
        evaluate = language.make_evaluate(each, MODEL, num_prompts=6)

        @jax.jit
        def run(key):
            state, batches = jax.lax.scan(
                lambda s, _: learner.sample(s), learner.init(key), length=2
            )
            assert (state.params.frozen is None) == (each.data is None)
            bare = state.params._replace(frozen=None)
            measured = [evaluate(p, state.collector, key) for p in (state.params, bare)]
            return batches, measured

        batches, (measured, of_bare) = run(jax.random.key(3))
        equal(measured, of_bare)
        return batches, measured

    equal(outcome(task), outcome(constant(task)))


def test_the_text_does_not_grow_with_the_file():
    """The program computes a batch for two seeds on two devices each.

    The program's text changes with a file of other prompts.
    """
    texts = {}
    for count in (200, 2000):
        learner = parallel.over_devices(learner_of(sums(count)), Placement(2, 2, 1))
        state = jax.eval_shape(learner.init, jax.random.split(jax.random.key(0), 2))
        texts[count] = jax.jit(learner.sample).lower(state).as_text()
    assert abs(len(texts[2000]) - len(texts[200])) < 1000
    one, another = (
        provenance.program(learner_of(sums(60, answer))) for answer in (int, lambda i: 3)
    )
    assert one != another
    assert one == provenance.program(learner_of(sums(60, int)))


def test_seeds_and_devices_share_one_copy():
    learner = learner_of(sums(40))
    keys = jax.random.split(jax.random.key(1), 2)
    one = over_seeds(learner, 2)
    two = parallel.over_devices(learner, Placement(2, 2, 1))
    ends = []
    for each in (one, two):
        state, batch = jax.jit(lambda keys, each=each: each.sample(each.init(keys)))(keys)
        assert state.params.frozen[DATA].tokens.shape == (48, 8)
        ends.append((state.params.policy, batch))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), *jax.device_get(ends))


def test_a_function_that_somebody_replaced_stays():
    task = sums(10)._replace(score=lambda row, tokens: jnp.float32(0.25))
    bound = reading(task, {DATA: jax.tree.map(jnp.asarray, sums(10, lambda i: 9).data)})
    assert float(bound.score(0, None)) == 0.25
    assert TOKENIZER.decode(bound.demonstrate(3).tolist()) == "9"
    assert reading(constant(task), None) == constant(task)
    # Binding the task again, to another state, works too.
    again = reading(bound, {DATA: task.data})
    assert TOKENIZER.decode(again.demonstrate(3).tolist()) == "3"


def asked(job):
    """Returns the rows of a run's own evaluations, of its examples, and of a later evaluation."""
    shapes, key = jax.eval_shape(job.learner.init, job.start).params, job.evaluation.key
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    state = TrainState(params, None, None, None, CollectorState({}), None, None)
    return [
        jax.jit(lambda each=each: each(state)["greedy"].problem)().ravel().tolist()
        for each in (job.measure, job.examples.describe, lambda state: job.measure(state, key))
    ]


def test_rows_of_the_test_set_select_no_checkpoint(tmp_path):
    """The rows of evaluations remain readable with a reward function."""
    rows = [{"prompt": f"{i}+{i}="} for i in range(40)]
    train = write(tmp_path / "train.jsonl", rows[:30])
    test = write(tmp_path / "test.jsonl", rows[30:])
    for files, last, count in (
        ([f"--task.train={train}", f"--task.test={test}"], 40, 10),
        ([f"--task.train={train}", "--task.test_fraction=0.3"], 30, 5),
    ):
        flags = [
            *("--task=file", *files, "--algorithm=grpo", "--seeds=1", "--devices=1", "--show=2"),
            *(f"--reward={HERE}:digits", "--problem.max_new_tokens=2", *tiny.MODEL),
            *("--warm_start.steps=0", "--problem.num_prompts=2", "--problem.group_size=2"),
        ]
        built = script.build(settings.parse_settings(script, flags).config, Placement(1, 1, 1))
        own, shown, later = asked(built)
        assert own + later == list(range(own[0], last))
        assert (len(later), own[:2]) == (count, shown)


def test_a_list_of_ones_own_is_shared_too(tmp_path):
    """The list is shared even if it does not name validation rows."""
    (tmp_path / "own.py").write_text(
        "from jaxrl_po.language import make_tokenizer\n"
        "from jaxrl_po.language.tasks import Example, table\n"
        "ROWS = [Example(a + b, a) for a in 'abc' for b in 'abc']\n"
        "def made():\n    return table('own', make_tokenizer('abc'), ROWS[:4], ROWS[4:])\n"
        "def named():\n"
        "    return table('own', make_tokenizer('abc'), ROWS[:4], ROWS[6:], validation=ROWS[4:6])\n"
    )
    for name, validation, test in (("made", [4, 6, 8], [5, 7]), ("named", [4, 5], [6, 7, 8])):
        task = language_config.own_task(f"{tmp_path / 'own.py'}:{name}")
        assert (list(task.validation), list(task.test)) == (validation, test)


def test_no_program_of_a_run_holds_the_file(tmp_path):
    rows = [dict(row, prompt=f"{i}+{i}=") for i, row in enumerate(ROWS * 50)]
    flags = [
        *("--task=file", f"--task.train={write(tmp_path / 'all.jsonl', rows)}", *tiny.MODEL),
        *("--algorithm=grpo", "--seeds=2", "--devices=1", f"--out={tmp_path / 'run'}"),
        *("--warm_start.steps=2", "--warm_start.batch_size=2"),
        *("--problem.num_prompts=2", "--problem.group_size=2", "--eval_prompts=2"),
    ]
    config = settings.parse_settings(script, flags).config
    job = script.build(config, Placement(2, 1, 1))
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(job.given))
    assert held > 80_000
    state = jax.eval_shape(job.learner.init, job.start)
    programs = {
        "init": job.learner.init.lower(job.start),
        "step": jax.jit(job.learner.step).lower(state),
        "evaluate": jax.jit(job.evaluate).lower(state),
        "describe": jax.jit(job.examples.describe).lower(state),
    }
    fit = jax.eval_shape(job.warm.begin, job.start)
    programs["advance"] = jax.jit(job.warm.advance).lower(fit, np.int32(0), job.given)
    for name, program in programs.items():
        text = program.as_text()
        constants = [part.split('"')[0] for part in text.split('dense<"0x')[1:]]
        assert sum(map(len, constants)) < held / 8, name
