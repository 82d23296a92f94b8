"""Tests `run.train` and `run.load`: the commands, called from Python."""

import json
import os
import shutil
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripts
import shapes
import tiny
from tables import cases
from test_experiments import with_older_jax

from jaxrl_po import control, language, run
from jaxrl_po.algorithms import a2c, grpo, ppo
from jaxrl_po.cli import evaluate, launch, plot
from jaxrl_po.config import ConfigError
from jaxrl_po.language.tasks import addition
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.run.experiment import control as control_command
from jaxrl_po.run.experiment import earlier, prepare
from jaxrl_po.run.store import metrics
from jaxrl_po.types import Learner

ENV = gymnax.make("CartPole-v1")[0]
PROBLEM = control.make_problem(ENV, num_envs=4, num_steps=8)
LEARNER = a2c.make(a2c.Config(), PROBLEM)
TASK = addition(1)
TALKER = Transformer(TASK.tokenizer.size, width=8, layers=1, heads=2)
SPOKEN = grpo.make(grpo.Config(), language.make_problem(TASK, TALKER, num_prompts=2, group_size=3))
EVALUATE = control.make_evaluate(ENV, PROBLEM, num_episodes=2)


def train(iterations, **options):
    return run.train(LEARNER, iterations, seeds=2, **options)


def test_learner_leaves_command_files_and_resumes(tmp_path, capsys):
    options = {"evaluate": EVALUATE, "score": "return", "watch": ("entropy",), "log_every": 2}
    whole = train(4, out=tmp_path / "whole", **options)
    left = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {"metrics.jsonl", "config.json", "checkpoints", "curves.png"} <= left
    assert whole.rows == metrics.read(tmp_path / "whole" / "metrics.jsonl")
    assert [row["step"] for row in whole.rows] == [0, 64, 128]
    assert len(whole.rows[-1]["return"]) == 2
    assert whole.state.step.tolist() == [4, 4]
    assert not whole.interrupted
    assert " (IQM)  entropy " in capsys.readouterr().out
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / "latest" / "4")
    resumed = train(4, out=cut, resume=True, **options)
    assert "resuming at iteration 2" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, resumed.state.params)
    of_seed = run.load(cut, learner=LEARNER, seed_index=1, checkpoint="latest")
    assert of_seed.iteration == 4
    one = jax.tree.map(lambda x: x[1], whole.state.params)
    jax.tree.map(np.testing.assert_array_equal, of_seed.params, one)
    observation = jax.numpy.array([0.1, -0.2, 0.3, -0.4])
    assert of_seed.act(observation) == PROBLEM.apply(one, observation)[0].mode()
    first = run.load(cut, learner=LEARNER, checkpoint="latest")
    batch = jax.random.normal(jax.random.key(0), (64, 4))
    np.testing.assert_array_equal(resumed.act(batch), first.act(batch))
    assert (first.act(batch) != of_seed.act(batch)).any()
    evaluated = EVALUATE(of_seed.params, of_seed.state.collector, jax.random.key(0))
    assert evaluated["return"].shape == (2,)
    assert plot.unit_of(json.loads((cut / "config.json").read_text())) == "environment steps"
    assert plot.main([str(cut), f"--out={tmp_path / 'plot.png'}"]) == 0
    assert capsys.readouterr().out.startswith("return, final of each seed")


@pytest.mark.usefixtures("trace_only")
def test_a_run_whose_lines_were_removed_goes_on(tmp_path):
    out, options = tmp_path / "run", {"evaluate": EVALUATE, "score": "return", "log_every": 1}
    train(2, out=out, **options)
    before = (out / "summary.json").read_bytes()
    (out / "metrics.jsonl").unlink()
    assert train(2, out=out, resume=True, **options).rows == []
    assert (out / "summary.json").read_bytes() == before
    rows = train(4, out=out, resume=True, **options).rows
    assert [row["iteration"] for row in rows] == [3, 4]
    assert json.loads((out / "summary.json").read_text())["steps"] == 128


WRAPPED = Learner(lambda key: LEARNER.init(key), *LEARNER[1:])


@cases(
    "learner, given, stored, expected",
    (LEARNER, None, {}, (32, "environment steps")),
    (LEARNER, 32, {}, (32, "environment steps")),
    (LEARNER, 1, {}, (1, "iterations")),
    (LEARNER, 10, {}, (10, "steps")),
    (LEARNER, None, {"steps_per_iteration": 1}, (1, "iterations")),
    (SPOKEN, None, {}, (6, "completions")),
    (
        Learner(jax.jit(LEARNER.init), LEARNER.sample, LEARNER.update),
        None,
        {},
        (32, control_command.UNIT),
    ),
    (WRAPPED, None, {}, (1, "iterations")),
    (WRAPPED, None, {"steps_per_iteration": 32, "unit": "dreams"}, (32, "dreams")),
)
def test_steps_of_an_iteration_come_from_the_problem(learner, given, stored, expected):
    assert prepare.steps_of(learner, given, stored) == expected


@cases(
    "name, make, settings",
    ("trajectories", control.make_problem, {"num_envs": 4, "num_steps": 8}),
    ("groups", control.make_groups, {"num_prompts": 2, "group_size": 3, "num_steps": 5}),
    ("vine", control.make_vine, {"num_envs": 2, "num_steps": 8, "num_states": 3, "horizon": 4}),
)
def test_problems_count_the_steps_that_commands_count(name, make, settings):
    way = control_command.SAMPLINGS[name]
    assert make(ENV, **settings).steps == way.steps(way.settings(**settings), 2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Returns a run of two iterations, traced only."""
    out = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.MonkeyPatch.context() as patch:
        shapes.trace_only(patch)
        train(2, out=out, log_every=2)
    return out


def test_what_differs_from_the_run_is_named(stopped):
    given = {"iterations": 4, "seeds": 2, "log_every": 2, "resume": True}
    for changed, message in (
        ({"resume": False}, r"^out: \S+ already holds files; give resume"),
        ({"seeds": 3}, r"^seeds: must be 2, as in the run .* got 3; leave it"),
        ({"log_every": 3}, r"^log_every: must be 2, as in the run .* got 3; leave it"),
        ({"iterations": 1}, r"^iterations: must be at least 2, those of .* got 1: "),
    ):
        with pytest.raises(ConfigError, match=message):
            run.train(LEARNER, **given | changed, steps_per_iteration=32, out=stopped)


@cases(
    "config, options, why",
    ({"learning_rate": 1e-3}, {}, "the program of an iteration is another"),
    ({}, {"normalize_observations": True}, r"the checkpoint holds nothing for .collector\S+, "),
)
def test_a_run_is_not_resumed_with_another_learner(stopped, config, options, why):
    problem = control.make_problem(ENV, num_envs=4, num_steps=8, **options)
    other = a2c.make(a2c.Config(**config), problem)
    with pytest.raises(
        ConfigError,
        match=rf"^learner: must be the learner of the run in \S+ that.*{why}.*; give that learner",
    ):
        run.train(other, 4, seeds=2, steps_per_iteration=32, out=stopped, resume=True)


def test_a_folder_without_its_learner_says_so(stopped, finished, tmp_path):
    lacks = "holds a run of run.train, whose learner is not stored: in Python, run.load"
    with pytest.raises(ConfigError, match=r"^folder: \S+ " + lacks):
        run.load(stopped)
    with pytest.raises(ConfigError, match=r"^run: \S+ " + lacks):
        evaluate.main([f"--run={stopped}"])
    other = control.make_problem(ENV, num_envs=4, num_steps=8, normalize_observations=True)
    with pytest.raises(ConfigError, match=r"^learner: must be the learner of the run in \S+: the"):
        run.load(stopped, learner=a2c.make(a2c.Config(), other), checkpoint="latest")
    with pytest.raises(
        ConfigError, match=r"^seed_index: must be below 2, the seeds of folder = \S+, got 2$"
    ):
        run.load(stopped, learner=LEARNER, seed_index=2)
    with pytest.raises(ConfigError, match=r"^learner: must be left out: \S+ holds a run of"):
        run.load(finished("control", tmp_path / "run"), learner=LEARNER)


def test_run_without_a_score_loads_its_latest_checkpoint(stopped, tmp_path):
    assert run.load(stopped, learner=LEARNER).iteration == 2
    scored = shutil.copytree(stopped, tmp_path / "run")
    config = json.loads((scored / "config.json").read_text())
    (scored / "config.json").write_text(json.dumps(config | {"score": "return"}))
    with pytest.raises(ConfigError, match=r"^checkpoint: folder = \S+ holds no intact best"):
        run.load(scored, learner=LEARNER)


@pytest.mark.usefixtures("trace_only")
def test_run_resumes_with_a_learner_made_again(stopped, tmp_path):
    out = shutil.copytree(stopped, tmp_path / "run")
    again = a2c.make(a2c.Config(), PROBLEM)
    resumed = run.train(again, 4, seeds=2, steps_per_iteration=32, out=out, resume=True)
    assert resumed.rows[-1]["iteration"] == 4


@pytest.mark.usefixtures("trace_only")
def test_learner_resumes_under_other_versions_with_a_line(stopped, tmp_path, capsys):
    train(3, out=with_older_jax(stopped, tmp_path / "run"), resume=True, log_every=2)
    assert f"may differ: jax: 0.0.1 → {jax.__version__}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("trace_only")
def test_without_steps_iterations_are_shown(tmp_path, monkeypatch, capsys):
    drawn = []

    def save(panels, path):
        drawn.extend(panels)
        raise RuntimeError("no TeX")

    monkeypatch.setattr("jaxrl_po.run.figures.plotting.save_panels", save)
    unknown = LEARNER._replace(init=lambda key: LEARNER.init(key))
    assert len(run.train(unknown, 1, out=tmp_path / "run").rows) == 2
    shown = capsys.readouterr()
    assert "training: 1/1 iterations" in shown.out
    assert shown.err.endswith("curves.png was not drawn, all else is there: RuntimeError: no TeX\n")
    labels = ("iterations, each seed", "episode return (reward units)")
    assert (drawn[0].x_label, drawn[0].y_label) == labels
    # the return is drawn unless a metric is named
    assert [series.metric for series in drawn[0].series] == ["episode_return"]


@pytest.mark.usefixtures("trace_only")
def test_what_cannot_run_loses_nothing(tmp_path):
    train(1, out=tmp_path / "run", log_every=1)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    unfit = ppo.make(ppo.Config(num_minibatches=5), PROBLEM)
    with pytest.raises(ConfigError, match="num_minibatches"):
        run.train(unfit, 1, out=tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.usefixtures("trace_only")
def test_without_a_folder_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trained = train(1)
    assert trained.folder is None
    assert trained.rows[-1]["iteration"] == 1
    assert list(tmp_path.iterdir()) == []


@cases(
    "arguments, message",
    ({"resume": True}, "^out: must name the folder of a run"),
    ({"iterations": 1.5}, "^iterations: must be a whole number in"),
    ({"total_steps": 9}, "^total_steps: is not an argument of train with a learner: iterat"),
    ({"devices": 5}, "^devices: must divide the 1 seeds or the 1 rows"),
    ({"seeds": 9, "devices": 9}, "^devices: must be at most 8"),
    ({"title": 1}, "^title: must be of type str, got 1"),
    ({"steps_per_iteration": 0}, "^steps_per_iteration: must be a whole number in"),
    ({"score": "return"}, "^evaluate: must be given where score = 'return'"),
    ({"score": "retrun", "evaluate": EVALUATE}, "^score: must be one of ended, length, return"),
    ({"watch": ("entrpy",)}, "^watch: must name metrics of the learner"),
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run.train(LEARNER, **{"iterations": 1, **arguments})


def test_loaded_control_policy_acts_as_evaluated(tmp_path, finished):
    out = finished("control", tmp_path / "run")
    policy = run.load(out, checkpoint="latest", seed_index=1)
    assert policy.settings["env"] == "CartPole-v1"
    reset, step = jax.jit(ENV.reset), jax.jit(ENV.step)
    observation, state = reset(jax.random.key(3), ENV.default_params)
    total = 0.0
    for i in range(500):
        action = policy.act(observation)
        observation, state, reward, terminated, truncated, _ = step(
            jax.random.key(i), state, action, ENV.default_params
        )
        total += float(reward)
        if terminated or truncated:
            break
    # The same initial states are evaluated by the run's own evaluation of the same parameters.
    config = earlier.read_config(control_command, "run", str(out))
    world = control_command.open_world(config)
    problem = control_command.build_problem(config, world)
    evaluated = control.make_evaluate(world.env, problem, num_episodes=64)
    stacked = earlier.state(control_command, config, "run", str(out), "latest")[2]
    one = jax.tree.map(lambda x: x[1], stacked)
    spread = evaluated(one.params, one.collector, jax.random.key(0))["return"]
    assert float(spread.min()) <= total <= float(spread.max())
    jax.tree.map(np.testing.assert_array_equal, policy.params, one.params)
    normal = control.statistics.normalize(one.collector, observation)
    seen, raw = (problem.apply(one.params, x[None])[0] for x in (normal, observation))
    assert int(policy.act(observation)) == int(seen.mode()[0])
    # Otherwise the comparison above would not test the property.
    assert np.abs(np.asarray(raw.logits - seen.logits)).max() > 1e-3
    drawn = {int(policy.act(jnp.zeros(4), jax.random.key(i))) for i in range(64)}
    assert drawn == {0, 1}
    with pytest.raises(
        ConfigError,
        match=r"^observation: must have the shape \[4\] .* CartPole-v1, or .* got \[3\]",
    ):
        policy.act(jnp.zeros(3))
    with pytest.raises(ConfigError, match=r"^observation: must have .* got \[2, 8, 4\]"):
        policy.act(jnp.zeros((2, 8, 4)))
    assert jax.vmap(policy.act)(jnp.zeros((8, 4))).shape == (8,)
    with pytest.raises(ConfigError, match=r"^checkpoint: must be one of best, latest"):
        run.load(out, checkpoint="worst")
    with pytest.raises(ConfigError, match=r"^folder: must be the folder of a run .* got \S+;"):
        run.load(tmp_path)


def test_the_policy_of_a_language_run_answers_texts(tmp_path, finished):
    out = finished("language", tmp_path / "run")
    rows = metrics.read(out / "samples.jsonl")
    for row in rows:
        total = sum(map(int, row["prompt"][:-1].split("+")))
        assert row["expected"] == f"{total:02d}"[::-1]
    policy = run.load(out, checkpoint="latest")
    last = [
        r for r in rows if r["iteration"] == rows[-1]["iteration"] and r["decoding"] == "greedy"
    ]
    # The texts have the shape of the samples below, so that both share a program.
    texts = policy.generate([r["prompt"] for r in last] + ["1+2="] * (64 - len(last)))
    for text, row in zip(texts, last, strict=False):
        assert text == row["completion"].removesuffix("$")[: len(text)]
        assert len(text) == row["length"] - row["ended"]
    sampled = policy.generate(["1+2="] * 64, jax.random.key(0))
    assert len(set(sampled)) > 1
    assert max(map(len, sampled)) == 3
    with pytest.raises(ConfigError, match=r"^prompts: must be a list of texts"):
        policy.generate("1+2=")
    with pytest.raises(
        ConfigError, match=r"^prompts: must have at most 4 tokens, .* train on longer"
    ):
        policy.generate(["1+2+3="])


def test_a_policy_has_the_budget_of_its_run(tmp_path, monkeypatch):
    """DAPO leaves room around an answer in the budget."""
    flags = [flag for flag in tiny.LANGUAGE if not flag.startswith("--warm_start.")]
    flags += ["--warm_start.steps=0", "--algorithm=dapo", "--total_steps=8"]
    with monkeypatch.context() as patch:
        shapes.trace_only(patch)
        assert launch.language([*flags, f"--out={tmp_path / 'run'}"]) == 0
    # parameters of zeros, which choose every token equally often
    sampled = run.load(tmp_path / "run").generate(["1+2="] * 64, jax.random.key(0))
    assert max(map(len, sampled)) == 4


@pytest.mark.usefixtures("trace_only")
def test_summary_says_that_a_hook_ended(tmp_path, capsys):
    def on_row(row):
        if row["iteration"] == 1:
            raise run.Stop("enough")
        return {"seen": row["return/mean"]}

    trained = train(
        3, out=tmp_path / "run", evaluate=EVALUATE, score="return", log_every=1, on_row=on_row
    )
    assert (trained.stopped, trained.interrupted) == ("enough", False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] == "enough"
    assert "training: stopped at iteration 1: enough" in capsys.readouterr().out
    assert trained.rows[0]["seen"] == [0.0, 0.0]


ON_ALL_CORES = """
import os
os.sched_getaffinity = lambda _: {0, 1}
import jax, jax.numpy as jnp, numpy as np
jnp.zeros(1)  # starts JAX, as the import of gymnax does
assert jax.device_count() == 1
from jaxrl_po import config, run
from toy_run import WALK

both = run.train(WALK, 2, seeds=4, log_every=1, out="run")
alone = run.train(WALK, 2, seeds=4, log_every=1, devices=1)
more = run.train(WALK, 3, seeds=4, log_every=1, out="run", resume=True)
assert run.load("run", learner=WALK, checkpoint="latest").iteration == 3
here = [each.state.step.devices() == {jax.devices()[0]} for each in (both, alone, more)]
rows = ([row["size"] for row in each.rows[1:]] for each in (both, alone))
np.testing.assert_allclose(*rows, rtol=1e-6)
try:
    run.train(WALK, 2, seeds=4, devices=3)
except config.ConfigError as error:
    print(error)
print(here, more.state.step.tolist())
"""


@pytest.mark.slow
def test_learner_uses_all_cores_with_same_randomness(tmp_path):
    paths = [str(scripts.ROOT), str(Path(scripts.__file__).parent)]
    environment = scripts.surroundings() | {"PYTHONPATH": os.pathsep.join(paths)}
    done = scripts.python("-c", ON_ALL_CORES, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    *_, refused, here = done.stdout.splitlines()
    assert refused.startswith("devices: must divide the 4 seeds or the 1 rows")
    assert here == "[True, True, True] [3, 3, 3, 3]"
    assert done.stdout.count("4 seeds on 2 devices, 2 on each") == 2
