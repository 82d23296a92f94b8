"""Tests `on_row`: its argument, the numbers that it adds, and how it ends a run."""

import json
import traceback

import pytest
from scripts import lines
from tables import cases
from toy_run import SEEDS, Silent, bits, job

from jaxrl_po.config import ConfigError
from jaxrl_po.run.loop import progress, runner
from jaxrl_po.run.store.checkpoint import Store


def run(path, on_row, **options):
    path.mkdir(exist_ok=True)
    return runner.run(job(), path, Silent(), on_row=on_row, **options)


def saved(path, like):
    with Store(path / "checkpoints" / "latest") as latest:
        return latest.load(like)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a run whose hook adds two numbers and empties its argument."""
    path, seen = tmp_path_factory.mktemp("whole"), []

    def on_row(row):
        seen.append(json.loads(json.dumps(row)))
        assert seen[-1] == row  # the added values are plain numbers
        step = row["step"]
        row.clear()
        return {"tripled": 3 * step, "own/one": [step, 0.0, float("nan")]}

    return path, seen, run(path, on_row)


def test_hook_gets_each_row_and_adds_numbers(whole):
    path, seen, outcome = whole
    assert [row["iteration"] for row in seen] == [0, 5, 10, 15, 20, 23]
    assert [row["iteration"] for row in seen if "greedy_return" in row] == [0, 10, 20, 23]
    assert all(len(row["size"]) == SEEDS for row in seen[1:])
    for row, given in zip(lines(path), seen, strict=True):
        timeless = {name: value for name, value in given.items() if not name.startswith("time/")}
        assert timeless.items() <= row.items()
        assert row["tripled"] == [3.0 * row["step"]] * SEEDS
        assert row["tripled/iqm"] == 3.0 * row["step"]
        assert row["own/one"] == [row["step"], 0.0, None]
    assert not outcome.interrupted
    assert outcome.stopped == ""


def test_hook_ends_run_saved_evaluated_and_resumable(whole, tmp_path):
    path, _, outcome = whole

    def on_row(row):
        if row["iteration"] == 15:
            raise progress.Stop("good enough")

    stopped = run(tmp_path, on_row)
    assert (stopped.iteration, stopped.stopped, stopped.interrupted) == (15, "good enough", False)
    assert "greedy_return" in lines(tmp_path)[-1]  # an evaluation is not due until 20
    iteration, state = saved(tmp_path, stopped.state)
    assert (iteration, bits(state)) == (15, bits(stopped.state))
    resumed = run(tmp_path, None, resume=True)
    assert resumed.stopped == ""
    assert bits(resumed.state) == bits(outcome.state)
    for row, alone in zip(lines(path)[4:], lines(tmp_path)[4:], strict=True):
        assert alone.items() <= row.items()


def test_error_of_hook_is_raised_after_saving(whole, tmp_path):
    def on_row(row):
        return {} if row["iteration"] < 10 else {"ratio": 1 / (row["iteration"] - 10)}

    with pytest.raises(ZeroDivisionError) as error:
        run(tmp_path, on_row)
    said = "".join(traceback.format_exception(error.value))
    assert '1 / (row["iteration"] - 10)' in said
    assert "on_row ended the run, which is saved at iteration 10" in said
    assert saved(tmp_path, whole[2].state)[0] == lines(tmp_path)[-1]["iteration"] == 10


@cases(
    "returned, message",
    ({"size": 1.0}, "^on_row: must return new names, got 'size', which the line has"),
    (3.0, "^on_row: must return a dict of numbers or None, got 3.0"),
    ({"own": [1.0, 2.0]}, "^on_row: must return one number or 3, one per seed, for each"),
    ({"own": "good"}, "^on_row: must return one number or 3, one per seed, for each"),
)
def test_what_a_hook_may_not_return_is_named(returned, message):
    with pytest.raises(ConfigError, match=message):
        progress.added_fields(lambda row: returned, {"size": [1.0], "step": 3}, 3)
