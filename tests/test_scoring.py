"""Tests rewards from Python functions, and every kind of failure."""

import asyncio
import pickle
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from tables import cases

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.language.evaluation import Answers
from jaxrl_po.run.data import scoring_worker, workers
from jaxrl_po.run.data.guard import Guard
from jaxrl_po.run.data.scoring import HostScore, Reward, RewardError, Worker
from jaxrl_po.run.experiment import registry, rewarding
from jaxrl_po.run.experiment.experiment import with_names
from jaxrl_po.run.store import sources
from jaxrl_po.types import Batch

HERE = Path(__file__).parent / "support" / "reward_functions.py"
TASK = language.tasks.addition(1)  # prompts have four tokens, answers two digits and EOS


def of(name, weight=1.0):
    return Reward(f"{HERE}:{name}", weight)


def rows(texts, length, *, left=False):
    tokens = [TASK.tokenizer.encode(text) for text in texts]
    return np.array(
        [[0] * (length - len(t)) + t if left else t + [0] * (length - len(t)) for t in tokens],
        np.int32,
    )


def batch_of(prompts, completions, *, seeds=1):
    """Returns a batch without a reward: groups of two, a budget of three tokens."""
    texts = rows(prompts, 4, left=True)
    action = rows(completions, 3)
    length = np.array([min(len(c) + 1, 3) for c in completions])
    for i, n in enumerate(map(len, completions)):
        if n < 3:
            action[i, n] = TASK.tokenizer.eos
    at = np.arange(3)[None]
    pad = np.array([4 - len(p) for p in prompts], np.int32)
    operands = tuple(np.array([int(prompt[i]) for prompt in prompts], np.uint32) for i in (0, 2))
    inputs = language.Sequences(np.concatenate([texts, action], axis=1), pad, operands)
    nothing = np.zeros(action.shape, np.float32)
    batch = Batch(
        inputs=inputs,
        action=action,
        log_prob=nothing,
        reward=None,
        value=nothing,
        next_value=nothing,
        terminated=at == length[:, None] - 1,
        truncated=np.zeros(action.shape, bool),
        mask=at < length[:, None],
        score=np.zeros((len(prompts) // 2, 2), np.float32),
        metrics={},
    )
    return jax.tree.map(lambda x: np.stack([x] * seeds), batch)


PROMPTS = ["1+2=", "1+2=", "9+9=", "9+9="]
COMPLETIONS = ["30", "31", "81", "8+1"]  # the last completion does not have an EOS


def score(*rewards, first=False, seeds=1, told=None, columns=None, **options):
    with HostScore(rewards, TASK._replace(columns=columns), **options) as give:
        return give.score_batch(
            batch_of(PROMPTS, COMPLETIONS, seeds=seeds),
            first=first,
            report=(told if told is not None else []).append,
        )


def test_scores_weights_and_the_last_token():
    batch, means = score(of("exact", 2.0), of("digits", 0.5), of("empties", 0.0), seeds=2)
    np.testing.assert_array_equal(batch.score, [[[1, 0], [1, 0]]] * 2)
    np.testing.assert_allclose(batch.reward.sum(axis=2), [[2.5, 0.5, 2.5, 0.0]] * 2)
    np.testing.assert_array_equal(
        batch.reward != 0, batch.terminated & (batch.reward.sum(axis=2) > 0)[..., None]
    )
    assert batch.reward.dtype == batch.score.dtype == np.float32
    values = {name: float(mean.value()[1]) for name, mean in means.items()}
    told = {"accuracy": 0.5, "wrong_length": 3.0, "dead_groups": 0.0, "reward_failures": 0.0}
    told |= {"reward/digits": 0.75, "reward/empties": 1.0}
    assert values == {"reward/exact": 0.5, "reward": 1.375, **told}


def test_a_function_is_given_columns_and_ids():
    batch, _ = score(of("columns_of"))
    other, _ = score(
        of("columns_of"), columns=lambda problem: {"answer": ["31" for _ in problem[0]]}
    )
    np.testing.assert_array_equal(other.score, [[[0, 1], [0, 0]]])
    np.testing.assert_array_equal(batch.score, [[[1, 0], [1, 0]]])


FAILURES = {
    "raises": f"raised ZeroDivisionError: no reward today ({HERE}, line 29)",
    "short": "returned 3 numbers for 4 completions",
    "words": "returned 'good' where a number is wanted",
    "lone": "returned float where a list of 4 numbers is wanted",
    "dies": "ended its process, with status 3",
    "hangs": "did not return within 0.5 s",
    "runs_text": "tried to run text as code",
    "nan": "returned nan for 2 of 4 completions",
    "huge": "returned inf for 1 of 4 completions",
    "scalar": "returned float64 where a list of 4 numbers is wanted",
    "lazily": "tried to run text as code",
    "rude": "raised Rude: (it has no message)",
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_score_0_are_counted_and_told_once(name):
    told = []
    with HostScore(
        [of(name), of("exact", 0.25)], TASK, timeout=0.5 if name == "hangs" else 30.0
    ) as give:
        for _ in range(1 if name == "hangs" else 2):
            batch, means = give.score_batch(
                batch_of(PROMPTS, COMPLETIONS), first=False, report=told.append
            )
        with pytest.raises(RewardError, match=f"reward_functions.py:{name} .*first batch"):
            give.score_batch(batch_of(PROMPTS, COMPLETIONS), first=True, report=told.append)
    failed = {"nan": [1, 1, 0, 0], "huge": [1, 0, 0, 0]}.get(name, [1, 1, 1, 1])
    kept = 1.0 - np.array(failed, np.float32)
    np.testing.assert_array_equal(batch.score.ravel(), kept)
    # the other reward function still counts
    np.testing.assert_array_equal(batch.reward.sum(axis=2)[0], kept + 0.25 * np.array([1, 0, 1, 0]))
    assert float(means["reward_failures"].value()[0]) == np.mean(failed)
    assert len(told) == 1
    assert f"reward_functions.py:{name} {FAILURES[name]}" in told[0]


def test_what_stands_in_the_data_set_may_run(tmp_path):
    """The sorting task of reasoning-gym evaluates its own answer; a completion must not run code,
    even in a `try`."""
    path = tmp_path / "own.py"
    path.write_text(
        "def own(completions, answer, **columns):\n    return [float(eval(a)) for a in answer]\n"
        "def theirs(completions, answer, **columns):\n"
        "    try:\n        return [float(eval(c)) for c in completions]\n"
        "    except BaseException:\n        return [1.0] * len(completions)\n"
        "def named(completions, **columns):\n"
        "    [exec(compile(c, 'answer.py', 'exec')) for c in completions]\n"
        "    return [1.0] * len(completions)\n"
        "def imports(completions, **columns):\n"
        "    import statistics\n    return [1.0] * len(completions)\n"
        "def later(completions, **columns):\n"
        "    code = [compile(c, '<c>', 'exec') for c in completions]\n"
        "    compile('1', '<t>', 'exec')\n"
        "    [exec(each) for each in code]\n    return [1.0] * len(completions)\n"
    )
    guard, given = Guard(), {"completions": ["2 + 2"], "answer": ["1 + 1"]}
    refused = {"own": False, "theirs": True, "named": True, "later": True, "imports": False}
    for name, expected in refused.items():
        function = workers.load_source(f"{path}:{name}")
        reply = scoring_worker.answer_request(function, guard, given)
        assert ("error" in reply) == expected, reply
    del sys.modules["own"]


def test_packages_may_run_their_text_unlike_completions(tmp_path, monkeypatch):
    """Packages make functions and classes by `exec`: scipy and attrs, and jinja2 for each
    template."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "maker.py").write_text(
        "exec('def f(x): return print(x) or x')\n"
        "def made():\n    exec('class Made: one = float(1)')\n    return locals()['Made'].one\n"
        "def value(text):\n    return eval(text)\n"
        "def of_tree(text):\n    import ast\n"
        "    return eval(compile(ast.parse(text, mode='eval'), '<tree>', 'eval'))\n"
    )
    (tmp_path / "own.py").write_text(
        "import timeit\n"
        "def own(completions, **columns):\n"
        "    import maker\n    return [maker.made() for _ in completions]\n"
        "def changed(completions, **columns):\n"
        "    import maker\n    return [maker.value(c.replace('^', '**')) for c in completions]\n"
        "def tree(completions, **columns):\n"
        "    import maker\n    return [maker.of_tree(c) for c in completions]\n"
        "def timed(completions, **columns):\n"
        "    return [0 * timeit.timeit(c, number=1) for c in completions]\n"
    )
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
    guard = Guard()
    for name, completion, why in (
        ("own", "print(f(x))", ""),
        ("changed", "1 + 2^0 * len('a')", "tried to run text"),
        ("changed", "(len#\n('a'))^2", "tried to run text"),
        ("changed", "(len)('a')", "tried to run text"),
        ("tree", "len('a')", "tried to run text"),
        ("timed", "import antigravity", "tried to run text"),
    ):
        function = workers.load_source(f"{tmp_path}/own.py:{name}")
        reply = scoring_worker.answer_request(function, guard, {"completions": [completion]})
        assert reply.get("error", "")[:17] == why, (completion, reply)
    for name in ("own", "maker"):
        del sys.modules[name]


def test_what_no_function_judges_takes_no_part():
    told = []
    batch, means = score(of("abstains", 2.0), told=told, seeds=2)
    assert batch.mask.any(axis=2).tolist() == [[True, False, False, False]] * 2
    # An unscored row gets the mean of the other rows, so that the group's mean is theirs.
    np.testing.assert_array_equal(batch.score, [[[1, 1], [0, 0]]] * 2)
    np.testing.assert_array_equal(batch.reward.sum(axis=2), [[2, 2, 0, 0]] * 2)
    values = {name: float(mean.value()[1]) for name, mean in means.items()}
    told_of = {"accuracy": 1.0, "reward/abstains": 1.0, "reward": 2.0, "reward_failures": 0.0}
    assert values == {"dead_groups": 1.0, "wrong_length": 0.0, **told_of}
    assert len(told) == 1
    assert "no reward function judges 6 of 8 completions" in told[0]
    # Another function scores the unscored and the failed rows: failed rows count 0.
    both, means = score(of("abstains", 2.0), of("exact"), told=told)
    assert both.mask.any(axis=2).all()
    np.testing.assert_array_equal(both.score, [[[1, 0], [1, 0]]])
    np.testing.assert_array_equal(both.reward.sum(axis=2), [[3, 0, 1, 0]])
    assert float(means["reward/abstains"].value()[0]) == 1.0


def answered():
    """Returns answers of two seeds to four prompts."""
    batch = batch_of(PROMPTS, ["30", "3", "81", "81"], seeds=2)
    length = batch.mask.sum(axis=2)[..., None]
    return Answers(
        prompt=batch.inputs.tokens[..., :4],
        pad=batch.inputs.pad,
        problem=batch.inputs.problem,
        tokens=batch.action[:, :, None],
        length=length,
        ended=length > 0,
        score=np.zeros(length.shape, np.float32),
        expected=batch.action,
    )


def test_an_evaluation_is_of_what_is_judged():
    """The first prompt is right, the second wrong, and no function scores the other prompts."""
    answers = answered()
    with HostScore([of("abstains"), of("exact")], TASK) as give:
        both = rewarding.rescore(give, {"greedy": jax.tree.map(lambda x: x[0], answers)})
    assert both["greedy"].score.tolist() == [[1.0], [1.0], [1.0], [1.0]]
    with HostScore([of("strict")], TASK) as give:
        found = rewarding.score_evaluation(give, {"greedy": answers, "sampled": answers})
    for name in ("greedy_accuracy", "avg@1", "pass@1"):
        assert np.asarray(found[name]).mean(axis=1).tolist() == [0.5, 0.5], name


def test_rows_with_failed_reward_leave_the_mean(tmp_path, capsys):
    """The first two of four rows fail, and the other rows are right; the line counts the failed
    rows."""
    answers = answered()
    with HostScore([of("nan")], TASK) as give:
        found = rewarding.score_evaluation(give, {"greedy": answers})
        rewarding.score_evaluation(give, {"greedy": answers})
    assert np.asarray(found["greedy_accuracy"]).mean(axis=1).tolist() == [1.0, 1.0]
    assert found["evaluation_failures"].mean(axis=1).tolist() == [0.5, 0.5]
    said = capsys.readouterr().out
    assert said.count("reward_functions.py:nan returned nan for 2 of 4 completions in an eval") == 1


def test_a_worker_that_was_ended_works_again():
    worker = Worker(f"{HERE}:later", 30.0)
    results = []
    for _ in range(2):
        worker.ask({"prompts": [""], "completions": [""]}, 1)
        results.append(worker.take())
    worker.close()
    worker.ask({"prompts": [""], "completions": [""]}, 1)
    results.append(worker.take())
    worker.close()
    assert [scores.values.tolist() for scores in results] == [[1.0], [0.0], [1.0]]


def test_worker_imports_neither_jax_nor_main():
    worker = Worker(f"{HERE}:crowded", 30.0)
    worker.ask({"completions": [""]}, 1)
    assert worker.take().values.tolist() == [0.0]
    worker.close()


@cases(
    "source, match",
    ("{here}:exacts", "holds no 'exacts', but exact, digits"),
    ("{tmp}/broken.py:f", "SyntaxError"),
    ("jaxrl_po.nowhere:f", "ModuleNotFoundError"),
    ("{tmp}/one.py:ONE", "ONE in .* is not a function"),
)
def test_what_cannot_be_loaded_is_named(tmp_path, source, match):
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "one.py").write_text("ONE = 1")
    source = source.format(here=HERE, tmp=tmp_path)
    with pytest.raises(ConfigError, match=match) as caught:
        score(Reward(source))
    assert source in str(caught.value)


@cases(
    "rewards, match",
    ([Reward("exact")], "file.py:function or module:function, got 'exact'"),
    ([Reward("nowhere.py:exact")], "there is no file nowhere.py"),
    ([of("exact"), of("exact")], "exact twice"),
    ([of("exact", float("nan"))], "reward_weights: must lie in .*, got nan"),
    ([of("exact", "0.5")], "reward_weights: must be a number, got '0.5'"),
    ([of("exact", True)], "reward_weights: must be a number, got True"),
)
def test_bad_functions_are_named(rewards, match):
    with pytest.raises(ConfigError, match=match):
        HostScore(rewards, TASK)


def test_async_functions_are_awaited():
    with HostScore([of("awaiting")], TASK) as scorer:
        given, _ = scorer.score_batch(
            batch_of(["1+2=", "1+2="], ["3", "33"]), first=True, report=print
        )
    assert given.score.reshape(-1).tolist() == [1.0, 2.0]

    lock = asyncio.Semaphore(1)

    async def one(text):
        async with lock:
            await asyncio.sleep(0)
        return float(len(text))

    async def each(completions):
        return await asyncio.gather(*map(one, completions))

    for function in (each, lambda completions: [one(text) for text in completions]):
        for _ in range(2):  # a lock belongs to one event loop
            reply = scoring_worker.answer_request(function, None, {"completions": ["a", "bc"]})
            assert reply == {"scores": [1.0, 2.0]}

    async def notebook():  # the thread of a notebook already runs an event loop
        return scoring_worker.awaited(asyncio.sleep(0, "slept"))

    assert asyncio.run(notebook()) == "slept"


class Held:
    """Reward that is a callable object."""

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


def test_functions_names_and_objects_may_be_listed():
    """The list has Python functions, names of built-in rewards and `file.py:name`, each with its
    weight."""

    def long(completions, **columns):
        return [float(len(text)) for text in completions]

    rewards = [long, "last_number", f"{HERE}:digits"]
    named = with_names({"reward": rewards, "reward_weights": [1.0, 2.0, 0.5]})
    options = types.SimpleNamespace(task="file", reward=named["reward"])
    found = rewarding.functions(options)
    assert found[0].value is long
    assert found[1:] == [registry.REWARDS["last_number"].function, f"{HERE}:digits"]
    assert rewarding.finds_answers(options)
    with pytest.raises(ConfigError, match=r"^reward: regex:PATTERN must stand alone"):
        with_names({"reward": ["regex:(a)", "math"]})
    alone = with_names({"reward": ["regex:a,b"]})["reward"]
    whole = types.SimpleNamespace(task="file", reward=alone)
    assert rewarding.pattern(whole) == {"pattern": "a,b"}
    held = sources.name_object("reward", [f"{HERE}:digits", Held()])
    assert isinstance(pickle.loads(pickle.dumps(held)).value[1].value, Held)
    assert with_names({"reward": ["math", f"{HERE}:digits"]})["reward"] == f"math,{HERE}:digits"
    digests = sources.digests({"reward": named["reward"]})["reward"].split(",")
    assert [re.fullmatch(r"\w{16}:\w+", each) is not None for each in digests[:3]] == [
        True,
        False,
        True,
    ]
    assert with_names({"reward": [of, "math"]})["reward"] == f"{__file__}:of,math"
