import json
from functools import partial

import gymnax
import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from tables import cases, slow

from jaxrl_po import control
from jaxrl_po.cli import render
from jaxrl_po.config import ConfigError
from jaxrl_po.run.figures import rendering
from jaxrl_po.run.figures.rendering import Episode

ANGLES = np.array([[0.3, -0.5], [1.2, 2.0], [-2.0, 0.7], [3.0, -1.0]])
ACROBOT = np.column_stack(
    [np.cos(ANGLES[:, 0]), np.sin(ANGLES[:, 0]), np.cos(ANGLES[:, 1]), np.sin(ANGLES[:, 1]), ANGLES]
)
RANDOM = np.random.default_rng(0)
CASES = {
    "cart_pole": (
        rendering.cart_pole,
        np.array([[0.0, 0, 0.1, 0], [1.0, 0, 0.1, 0], [1.0, 0, -0.2, 0], [-2.4, 0, 0, 0]]),
    ),
    "pendulum": (rendering.pendulum, ACROBOT[:, :3]),
    "acrobot": (rendering.acrobot, ACROBOT),
    "mountain_car": (
        partial(rendering.mountain_car, goal=0.5),
        np.array([[-1.2, 0], [-0.5, 0], [0.1, 0], [0.6, 0]]),
    ),
    "channels": (rendering.grid, np.eye(400)[:4].reshape(4, 10, 10, 4)),
    "cells": (rendering.grid, np.eye(50)[[0, 7, 30, 49]].reshape(4, 10, 5)),
    "components": (rendering.components, RANDOM.normal(size=(3, 6))),
    "one_component": (rendering.components, RANDOM.normal(size=(2, 1))),
    "many_axes": (rendering.components, RANDOM.normal(size=(2, 3, 4, 5, 6))),
    "not_finite": (rendering.components, np.array([[np.nan, 1.0], [2.0, np.inf]])),
}


def episode(observation, action=None):
    steps = len(observation) - 1
    return Episode(
        observation,
        np.zeros(steps, np.int32) if action is None else action,
        np.ones(steps, np.float32),
    )


def stage(picture):
    """Returns the part of a frame that shows the environment, without title and caption."""
    height = len(picture)
    return picture[int(0.12 * height) : int(0.88 * height)]


@cases("name", "cart_pole", *(slow(name) for name in CASES if name != "cart_pole"))
def test_every_moment_is_a_picture_of_its_own(name):
    draw, observation = CASES[name]
    pictures = list(rendering.frames(draw, episode(observation), title="a $ title_", width=240))
    assert len(pictures) == len(observation)
    for picture in pictures:
        assert picture.shape == (180, 240, 3)
        assert picture.dtype == np.uint8
        assert len(np.unique(stage(picture).reshape(-1, 3), axis=0)) > 2
    assert len({stage(picture).tobytes() for picture in pictures}) == len(pictures)


def test_components_take_actions_of_any_shape():
    actions = RANDOM.normal(size=(2, 2, 2))
    shown = episode(np.zeros((3, 2)), actions)
    assert len(list(rendering.frames(rendering.components, shown, title="", width=120))) == 3


def test_pole_leans_to_the_side_of_its_angle():
    right, left = (
        next(
            rendering.frames(
                rendering.cart_pole,
                episode(np.array([[0.0, 0.0, angle, 0.0]])),
                title="",
                width=240,
            )
        )
        for angle in (0.5, -0.5)
    )
    accent = np.array(rendering.to_rgb(rendering.ACCENT)) * 255
    columns = [
        np.flatnonzero((np.abs(picture - accent) < 3).all(axis=2).any(axis=0)).mean()
        for picture in (right, left)
    ]
    assert columns[0] > 125
    assert columns[1] < 115


def test_the_first_channel_lies_on_top():
    both, first = np.zeros((2, 1, 3, 3, 2), np.float32)
    both[0, 1, 1], first[0, 1, 1, 0] = 1.0, 1.0
    pictures = [
        next(rendering.frames(rendering.grid, episode(each), title="", width=120))
        for each in (both, first)
    ]
    assert_array_equal(*pictures)


def test_a_gif_holds_every_frame_and_its_time(tmp_path):
    pictures = [np.full((90, 120, 3), shade, np.uint8) for shade in (0, 100, 200)]
    rendering.save_gif(pictures, tmp_path / "a.gif", fps=20)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]
    with Image.open(tmp_path / "a.gif") as gif:
        assert (gif.format, gif.n_frames, gif.size, gif.info["loop"]) == ("GIF", 3, (120, 90), 0)
        durations = []
        for i in range(3):
            gif.seek(i)
            durations.append(gif.info["duration"])
    assert durations == [50, 50, rendering.HOLD]


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    """Returns the folder of a finished run of `control.py`."""
    return finished("control", tmp_path_factory.mktemp("runs") / "cartpole")


@pytest.fixture(scope="module")
def player(run):
    return render.restore(
        render.RenderOptions(run=str(run)),
        render.earlier.read_config(render.control, "run", str(run)),
    )


@pytest.fixture(scope="module")
def whole(player):
    """Returns a sampled episode, played in one call of the program."""
    return render.play_episode(player, jax.random.key(0), max_steps=100, greedy=False)


def snapshot(path):
    return {
        file: (file.stat().st_mtime_ns, file.read_bytes())
        for file in path.rglob("*")
        if file.is_file()
    }


@pytest.mark.slow
def test_an_episode_of_a_run(run, tmp_path, capsys):
    before = snapshot(run)
    out = tmp_path / "new" / "episode.gif"
    flags = [f"--run={run}", "--seed_index=1", "--checkpoint=latest", "--seed=3"]
    assert render.main([*flags, f"--out={out}", "--width=160"]) == 0
    assert snapshot(run) == before

    options = render.flags.parse_records(flags, {"": render.RenderOptions})[""]
    player = render.restore(options, render.earlier.read_config(render.control, "run", str(run)))
    assert player.iteration == 10
    evaluate = jax.jit(control.make_evaluate(player.world.env, player.problem, num_episodes=1))
    expected = evaluate(player.state.params, player.state.collector, jax.random.key(3))
    length = int(expected["length"][0])
    with Image.open(out) as gif:
        assert (gif.n_frames, gif.size) == (length + 1, (160, 120))
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"ppo on CartPole-v1, seed 1, latest checkpoint (iteration 10): {length} steps, "
        f"return {length}, see {out}"
    )


def assert_begins(whole, episode):
    jax.tree.map(lambda x, y: assert_allclose(x[: len(y)], y, rtol=1e-5, atol=1e-6), whole, episode)


@cases("max_steps, length", (100, None), (8, 8), (3, 3))
def test_a_long_episode_is_played_in_several_calls(player, whole, monkeypatch, max_steps, length):
    monkeypatch.setattr(render, "STEPS", 3)
    parts = render.play_episode(player, jax.random.key(0), max_steps=max_steps, greedy=False)
    assert len(parts.action) == (length or len(whole.action))
    assert_begins(whole, parts)


@pytest.fixture
def played(monkeypatch):
    """Replaces the function that plays an episode by a stored episode."""
    monkeypatch.setattr(render, "play_episode", lambda *_, **__: episode(CASES["cart_pole"][1]))


@pytest.mark.usefixtures("played")
def test_default_is_a_file_in_the_runs_folder(run):
    assert render.main([f"--run={run}", "--width=120"]) == 0
    with Image.open(run / "episode.gif") as gif:
        assert gif.n_frames == 4


@pytest.mark.usefixtures("played")
def test_unwritable_place_is_reported(run):
    with pytest.raises(OSError, match=r"No such file or directory: '/proc/\.a\.gif'"):
        render.main([f"--run={run}", "--width=120", "--out=/proc/a.gif"])


@cases(
    "arguments, message",
    (["--run={tmp}/language"], r"max_steps: must be left out with a run of jaxrl-po language"),
    (["--all"], r"all: must be left out with a run of jaxrl-po control"),
    (
        ["--run={tmp}/other"],
        r"run: \S+ does not suit this version of the library: algorithm: unknown name 'vpg'",
    ),
    (
        ["--run={tmp}/wider"],
        r"run: \S+ does not suit this version of the library: the checkpoint holds",
    ),
    (["--run={tmp}/early"], r"checkpoint: run = \S+ holds no intact best checkpoint"),
    (["--seed_index=2"], r"seed_index: must be below 2, the seeds of run = \S+, got 2"),
    (["--out={tmp}/a.png"], r"out: must be a file whose name ends in \.gif, got \S+a\.png"),
    (["--out={tmp}/folder.gif"], r"out: must be a file whose name ends in \.gif"),
    (
        ["--out={tmp}/file/a.gif"],
        r"out: \S+ must be a file that can be written; .*file is no folder",
    ),
)
def test_bad_input_gives_one_line_naming_the_flag(run, tmp_path, arguments, message):
    stored = json.loads((run / "config.json").read_text())
    (tmp_path / "folder.gif").mkdir()
    (tmp_path / "file").touch()
    contents = {
        "language": json.dumps({"format": 1, "script": "language"}),
        "other": json.dumps(stored | {"algorithm": "vpg"}),
        "wider": json.dumps(stored | {"network.width": 16}),
        "early": json.dumps(stored),
    }
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    (tmp_path / "wider" / "checkpoints").symlink_to(run / "checkpoints")
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        render.main([f"--run={run}", "--max_steps=1", "--width=120", *arguments])
    assert "\n" not in str(caught.value)


def test_scenes_are_of_environments_that_exist():
    assert set(render.SCENES) <= set(gymnax.registered_envs)


def test_structured_observation_is_drawn_as_image_or_numbers():
    image = np.full((3, 4, 4, 2), 51, np.uint8)
    vector = np.arange(6.0).reshape(3, 2)
    seen = control.Observation({"image": image, "vector": vector}, {"more": vector}, None)
    assert_allclose(render.to_draw(seen), 0.2)
    assert render.to_draw(seen).shape == (3, 4, 4, 2)
    pair = {"a": vector, "b": np.ones((3, 1, 2))}
    assert_array_equal(render.to_draw(pair), np.hstack([vector, np.ones((3, 2))]))
    assert_array_equal(render.to_draw(vector), vector)
