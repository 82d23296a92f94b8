"""Runs that were made before: evaluated again, and compared."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import control
import earlier
import evaluate
import jax
import language
import numpy as np
import plot
import pytest
import report
import tiny
from test_exporters import events

from jaxrl_po.config import ConfigError
from jaxrl_po.flags import UsageError
from jaxrl_po.metrics import append, read


@pytest.fixture(scope="module", autouse=True)
def started_backend():
    """A script would choose the number of devices of a backend that does not run yet."""
    return jax.local_device_count()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each script, over at once."""
    folders = {name: tmp_path_factory.mktemp("runs") / name for name in ("control", "language")}
    sizes = ["--problem.num_envs=4", "--problem.num_steps=8", "--problem.width=8", "--problem.normalize_observations"]
    shared = ["--seeds=2", "--devices=1", "--seed=0"]
    flags = ["--algorithm=a2c", "--total_steps=64", "--eval_episodes=2", "--tensorboard", *shared, *sizes]
    assert control.main([*flags, f"--out={folders['control']}"]) == 0
    sizes = [*tiny.MODEL, "--problem.num_prompts=2", "--problem.group_size=4", "--task.num_digits=1", "--show=0"]
    minibatches = ["--config.num_minibatches=1", "--config.num_epochs=1", "--warm_start.steps=2", "--eval_prompts=16"]
    flags = ["--algorithm=grpo", "--total_steps=0", *shared, *sizes, *minibatches]
    assert language.main([*flags, f"--out={folders['language']}"]) == 0
    return folders


def test_what_a_run_told_is_there_for_tensorboard(runs):
    lines = read(runs["control"] / "metrics.jsonl")
    told = {(name, step): value for step, name, value in events(runs["control"] / "tensorboard")}
    assert {step for _, step in told} == {line["step"] for line in lines} == {0, 32, 64}
    for line in (lines[0], lines[2]):  # the one between them is not evaluated
        assert told["greedy_return/mean", line["step"]] == pytest.approx(line["greedy_return/mean"], rel=1e-6)
        assert told["greedy_return/seed_1", line["step"]] == pytest.approx(line["greedy_return"][1], rel=1e-6)


def test_a_policy_is_evaluated_on_as_much_as_is_asked_for(runs, capsys):
    before = {path.name for path in runs["control"].iterdir()}
    assert evaluate.main([f"--run={runs['control']}", "--size=3", "--seed=5", "--checkpoint=latest"]) == 0
    found = json.loads((runs["control"] / "evaluation.json").read_text())
    assert {path.name for path in runs["control"].iterdir()} - before == {"evaluation.json"}
    assert (found["iteration"], found["run"]) == (2, "a2c on CartPole-v1")
    assert "greedy_return" in capsys.readouterr().out

    records = earlier.read(control.SCRIPT, "run", str(runs["control"]))
    _, _, state = earlier.state(control.SCRIPT, records, "run", str(runs["control"]), "latest")
    env, problem = control.build_problem(records, None)
    play = jax.jit(control.control.make_evaluate(env, problem, num_episodes=3))
    one = jax.tree.map(lambda x: x[1], state)
    np.testing.assert_allclose(found["greedy_return"][1], play(one.params, one.actor, jax.random.key(5))["return"].mean())


def test_the_evaluation_of_a_run_can_be_had_again(runs, tmp_path):
    """With the key of the run, the score of its last line."""
    out = tmp_path / "new" / "again.json"
    _, records = earlier.read_any(evaluate.SCRIPTS, "run", str(runs["language"]))
    experiment, iteration, state = earlier.state(language.SCRIPT, records, "run", str(runs["language"]), "latest")
    key = jax.random.split(jax.random.key(0))[1]
    evaluated = jax.jit(jax.vmap(lambda state: experiment.evaluate(state.params, state.actor, key)))(state)
    scores = evaluated["greedy_accuracy"].mean(axis=1)
    line = json.loads((runs["language"] / "metrics.jsonl").read_text().splitlines()[-1])
    np.testing.assert_allclose(scores, line["greedy_accuracy"], rtol=1e-6)
    assert evaluate.main([f"--run={runs['language']}", f"--out={out}"]) == 0
    assert json.loads(out.read_text())["iteration"] == iteration == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--run must name the folder of a run of control.py or language.py"),
        (["--run={tmp}"], r"--run=.* must be the folder of a run of control.py or language.py; it holds no config.json"),
        (["--run={control}", "--checkpoint=worst"], "checkpoint must be one of"),
        (["--run={control}", "--out={tmp}/a.txt"], "--out=.* must be a file whose name ends in .json"),
        (["--run={control}", "--out=/proc/a.json"], "--out=.* must be a file that can be written"),
    ],
)
def test_what_cannot_be_evaluated_is_named(runs, tmp_path, flags, message):
    with pytest.raises((ConfigError, UsageError), match=message):
        evaluate.main([flag.format(tmp=tmp_path, **runs) for flag in flags])


def fake_run(folder, scores):
    """Two lines of as many seeds; the second is final."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"script": "control"}))
    lines = [{"iteration": i, "step": 10 * i, "greedy_return": x} for i, x in enumerate(([0.0] * len(scores), scores))]
    append(folder / "metrics.jsonl", *lines)
    return str(folder)


def test_runs_are_compared_seed_by_seed(tmp_path, capsys):
    """4 and 5 beat 1, 2 and 3 always; 3, NaN against the same: 2 wins and a tie of 3, (2 + ½) / 3."""
    paths = [fake_run(tmp_path / name, x) for name, x in (("a", [1.0, 2.0, 3.0]), ("b", [4.0, 5.0]), ("c", [3.0, None]))]
    assert plot.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    a, b, c = (tmp_path / "out" / "table.txt").read_text().splitlines()[1:]
    assert a.split()[:3] == ["a", "3", "2"]
    assert b.split()[-3:] == ["1.00", "[1.00,", "1.00]"]
    assert c.split()[:3] == ["c", "2", "3"]
    assert " 0.83 [" in c
    lines = (tmp_path / "out" / "curves.csv").read_text().splitlines()
    assert lines[0] == "run,step,seed,name,value"
    assert len(lines) == 1 + 2 * (3 + 2) + 3  # a missing number has no line
    assert "b,10,1,greedy_return,5.0" in lines
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name 1 to 8 folders of runs"),
        (["{tmp}/nowhere"], "nowhere must be the folder of a run; it holds no config.json"),
        (["{run}", "--metric=speed"], "--metric=speed must be in the lines of all runs, which have greedy_return"),
        (["{run}", "--metrics=speed"], "did you mean --metric"),
    ],
)
def test_what_cannot_be_compared_is_named(tmp_path, arguments, message):
    run = fake_run(tmp_path / "a", [1.0])
    with pytest.raises(UsageError, match=message):
        plot.main([argument.format(tmp=tmp_path, run=run) for argument in arguments])
    assert (tmp_path / "a" / "metrics.jsonl").exists()


class Page(HTMLParser):
    """What a browser would build: the tags that stay open, the text, and where pictures come from."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.sources = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.sources.append(dict(attributes)["src"])
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(tmp_path):
    """Of two runs, one of which wrote what must not become HTML."""
    paths = [fake_run(tmp_path / name, scores) for name, scores in (("a", [1.0, 2.0]), ("b", [2.0, 2.5]))]
    settings = {"script": "control", "env": "Acrobot-v1", "resolved": {"device": "1 × cpu"}}
    (tmp_path / "b" / "config.json").write_text(json.dumps(settings))
    append(
        tmp_path / "b" / "samples.jsonl",
        *(
            {"iteration": i, "step": 10 * i, "decoding": "greedy", "prompt": "1+1=", "completion": text, "score": 0.0}
            for i, text in enumerate(("<script>alert(1)</script>", "unseen", "&lt;2"))
        ),
    )
    out = tmp_path / "new" / "report.html"
    assert report.main([*paths, f"--out={out}"]) == 0
    return out


def test_a_report_is_whole_in_one_file(page):
    text = page.read_text()
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.sources) == 1
    assert all(source.startswith("data:image/png;base64,") for source in parsed.sources)
    assert not re.search(r"(src|href)=.?https?:", text)
    said = "".join(parsed.text)
    for part in ("a · b", "1.00", "2.25", "<script>alert(1)</script>", "&lt;2", "Acrobot-v1", "1 × cpu"):
        assert part in said, part
    assert "unseen" not in said
    assert text.count('<td class="differs">') == 2


@pytest.mark.skipif(not shutil.which("chromium"), reason="no browser here")
def test_a_browser_shows_the_report(page, tmp_path):
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    shown = subprocess.run(["chromium", *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    assert Page(shown).open == []
    assert "<h2>What b wrote, first and last</h2>" in shown
    assert "<script>" not in shown
