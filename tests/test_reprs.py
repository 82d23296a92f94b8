"""Tests the text of a training state and of a run's result: shapes replace arrays."""

import folders
import gymnax
import jax
import jax.numpy as jnp
import learners
import pytest
from flax import struct

from jaxrl_po import control, run
from jaxrl_po.algorithms import a2c
from jaxrl_po.language import pretrained
from jaxrl_po.types import ActorCritic, CollectorState

CASES = [("trpo", "vine"), ("ppo-reference", "learned"), ("ppo-turn", "dialogue")]


@pytest.mark.parametrize(("algorithm", "problem"), CASES)
def test_training_state_has_a_short_text(algorithm, problem):
    learner = learners.make(algorithm, problem)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    for record in (state, jax.eval_shape(learner.sample, state)[1]):
        assert "ShapeDtypeStruct" not in repr(record)
        assert len(repr(record)) < 2000
        again = jax.tree.unflatten(jax.tree.structure(record), jax.tree.leaves(record))
        assert again == record
        assert type(again) is type(record)


def test_text_of_a_record_shows_dtypes_and_shapes():
    params = ActorCritic({"w": jnp.zeros((4, 2))}, [jnp.zeros(3)] * 9)
    assert repr(params) == (
        "ActorCritic(policy={'w': float32[4, 2]}, value=<9 leaves, 27 numbers>, "
        "frozen=None, constants=None)"
    )
    inside = CollectorState({"row": 1, "key": jax.random.key(0)}, {"model": params})
    assert "{'row': 1}" in repr(inside.remove("key"))
    assert "'key': key<fry>[]" in repr(inside)
    assert hash(ActorCritic(1)) == hash((1, None, None, None))
    assert jax.jit(lambda x: x)(params)._replace(value=None).policy["w"].shape == (4, 2)


def test_text_of_a_node_that_checks_its_leaves():
    @struct.dataclass
    class Checked:
        x: jax.Array

        def __post_init__(self):
            assert self.x.shape == (3,)

    state = CollectorState(sharded={"env": Checked(jnp.zeros(3))}, replicated={})
    assert repr(state) == "CollectorState(sharded=<1 leaves, 3 numbers>, replicated={})"


@pytest.mark.usefixtures("trace_only")
def test_results_of_runs_have_a_short_text(tmp_path):
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=8)
    learner = a2c.make(a2c.Config(), problem)
    trained = run.train(learner, 3, seeds=2, log_every=1, out=tmp_path / "run")
    assert repr(trained).startswith("Trained(state=TrainState(params=ActorCritic(policy=")
    assert repr(trained).endswith("interrupted=False, stopped='')")
    loaded = run.load(tmp_path / "run", learner=learner, checkpoint="latest")
    assert repr(loaded).startswith("LearnerState(settings=")
    assert all(len(repr(each)) < 2000 for each in (trained, loaded))


def test_text_of_a_sweep_counts_its_rows():
    swept = run.SweepResult([{}] * 3, {"config.gamma": 0.9}, "runs/a")
    best = "best={'config.gamma': 0.9}"
    assert repr(swept) == f"SweepResult(rows=<3 items>, {best}, folder='runs/a')"


def test_pretrained_model_has_a_short_text(tmp_path):
    folders.write_place(tmp_path)
    (model,) = {path.parent for path in tmp_path.rglob("model.safetensors")}
    text = repr(pretrained.load(model))
    assert "params=<" in text
    assert "Array(" not in text
