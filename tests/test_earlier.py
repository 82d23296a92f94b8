"""Tests finished runs that are evaluated again and compared."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import jax
import numpy as np
import pytest
from tables import cases

from jaxrl_po.cli import evaluate, plot, report
from jaxrl_po.config import ConfigError
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import control, earlier, language
from jaxrl_po.run.store import folder
from jaxrl_po.run.store.metrics import append, read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(finished, tmp_path_factory):
    """Returns a finished run of each script."""
    out = tmp_path_factory.mktemp("runs")
    return {name: finished(name, out / name) for name in ("control", "language")}


def test_policy_is_evaluated_on_the_size_asked(runs, capsys):
    before = {path.name for path in runs["control"].iterdir()}
    assert (
        evaluate.main([f"--run={runs['control']}", "--size=3", "--seed=5", "--checkpoint=latest"])
        == 0
    )
    found = json.loads((runs["control"] / "evaluation.json").read_text())
    assert {path.name for path in runs["control"].iterdir()} - before == {"evaluation.json"}
    assert (found["iteration"], found["run"]) == (10, "ppo on CartPole-v1")
    told = capsys.readouterr().out
    assert "latest checkpoint (iteration 10), 3 episodes, " in told
    assert "greedy_return" in told

    config = earlier.read_config(control, "run", str(runs["control"]))
    _, _, state = earlier.state(control, config, "run", str(runs["control"]), "latest")
    world = control.open_world(config)
    problem = control.build_problem(config, world)
    play = jax.jit(control.control.make_evaluate(world.env, problem, num_episodes=3))
    one = jax.tree.map(lambda x: x[1], state)
    np.testing.assert_allclose(
        found["greedy_return"][1],
        play(one.params, one.collector, jax.random.key(5))["return"].mean(),
    )


@pytest.mark.usefixtures("trace_only")
def test_evaluation_of_a_run_is_reproduced(runs, tmp_path):
    """The run's key gives the score of its last line, even where the run's kernels are not
    available."""
    out = tmp_path / "new" / "again.json"
    _, config = earlier.read_any(evaluate.DOMAINS.values(), "run", str(runs["language"]))
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, fused_attention=True)
    )
    job, iteration, state = earlier.state(language, config, "run", str(runs["language"]), "latest")
    key = jax.random.split(jax.random.key(0))[1]

    def measure(state):
        scores = job.evaluation.measure(state.params, state.collector, key)
        return {name: scores[name].mean() for name in ("greedy_accuracy", "greedy_length")}

    line = read(runs["language"] / "metrics.jsonl")[-1]
    for name, scores in jax.jit(jax.vmap(measure))(state).items():
        np.testing.assert_allclose(scores, line[name], rtol=1e-6)
    assert evaluate.main([f"--run={runs['language']}", "--checkpoint=latest", f"--out={out}"]) == 0
    assert json.loads(out.read_text())["iteration"] == iteration == 3


@cases(
    "flags, message",
    ([], "run: must name the folder of a run of jaxrl-po control or jaxrl-po language"),
    (
        ["--run={tmp}"],
        (
            r"^run: must be the folder of a run of jaxrl-po control or jaxrl-po language, "
            r"got .*; it holds no config.json"
        ),
    ),
    (["--run={control}", "--checkpoint=worst"], "checkpoint: must be one of"),
    (
        ["--run={control}", "--out={tmp}/a.txt"],
        "out: must be a file whose name ends in .json, got .*a.txt",
    ),
)
def test_what_cannot_be_evaluated_is_named(runs, tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        evaluate.main([flag.format(tmp=tmp_path, **runs) for flag in flags])


def fake_run(folder, scores, score="greedy_return", **settings):
    """Returns two lines of as many seeds as scores; the second line is final."""
    folder.mkdir(parents=True)
    place = {} if "task" in settings else {"script": "control", "env": "CartPole-v1"}
    (folder / "config.json").write_text(json.dumps({"format": 1} | place | settings))
    zeros = [0.0] * len(scores)
    lines = [
        {"iteration": i, "step": 10 * i, score: x, "entropy": zeros}
        for i, x in enumerate((zeros, scores))
    ]
    (folder / "metrics.jsonl").touch()
    append(folder / "metrics.jsonl", *lines)
    return str(folder)


def test_runs_are_compared_seed_by_seed(tmp_path, capsys):
    """The numbers 4 and 5 always exceed 1, 2 and 3; 3 and NaN, which is the worst, win (2 + ½) of 6
    comparisons."""
    paths = [
        fake_run(tmp_path / name, x)
        for name, x in (("a", [1.0, 2.0, 3.0]), ("b", [4.0, 5.0]), ("c", [3.0, None]))
    ]
    assert plot.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    a, b, c = (tmp_path / "out" / "table.txt").read_text().splitlines()[2:5]
    assert a.split()[:3] == ["a", "3", "2"]
    assert b.split()[-4:-1] == ["1.00", "[0.44,", "1.00]"]
    assert c.split()[:5] == ["c", "1", "of", "2", "-inf"]
    assert " 0.42 [" in c
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")


ADDITION = {"script": "language", "task": "addition", "score": "greedy_accuracy"}


@cases("name", "new/two.pdf", "TWO.SVG")
def test_a_figure_alone_is_written_to_a_file(tmp_path, capsys, name):
    """A name that begins with an underscore is in the legend."""
    paths = [fake_run(tmp_path / "runs" / each, [1.0, 2.0]) for each in ("_a$_", "b{")]
    out = tmp_path / name
    assert plot.main([*paths, f"--out={out}"]) == 0
    assert [path for path in tmp_path.rglob("*.*") if "runs" not in path.parts] == [out]
    assert out.read_bytes().startswith(b"%PDF" if name.endswith("pdf") else b"<?xml")
    shown = capsys.readouterr().out
    assert shown.endswith(f"see {out}\n")
    assert "_a$_" in shown


def test_profile_stays_at_one_for_best_scores():
    """Three of four seeds reach 500, and all seeds of the second run; both curves extend to the
    end."""
    runs = [
        plot.Run(name, [{"step": 1, "greedy_return": scores}], {}, "")
        for name, scores in (("a", [9.0, 500.0, 500.0, 500.0]), ("b", [500.0] * 4))
    ]
    axes = plot.Figure().subplots()
    plot.draw_profiles(axes, plot.scores_of(runs, "greedy_return", plot.FINAL), "greedy_return")
    some, all_ = axes.get_lines()
    assert some.get_xdata()[-1] == all_.get_xdata()[-1] == 500.0
    assert (some.get_ydata()[0], some.get_ydata()[-1]) == (1.0, 0.75)
    assert set(all_.get_ydata()) == {1.0}
    assert some.get_linewidth() > all_.get_linewidth()


@pytest.fixture
def drawn(monkeypatch):
    """Returns the titles, axis labels and legends of each set of axes that is written."""
    panels = []

    def write(figure, path):
        for axes in figure.axes:
            legend = axes.get_legend()
            named = [text.get_text() for text in legend.get_texts()] if legend else []
            ticks = [text.get_text() for text in axes.get_yticklabels()]
            panels.append((axes.get_title(loc="left"), axes.get_xlabel(), named or ticks))

    monkeypatch.setattr(plot.plotting, "write_figure", write)
    return panels


def test_runs_on_one_environment_compare_without_note(tmp_path, capsys, drawn):
    paths = [
        fake_run(tmp_path / name, x, env="Acrobot-v1")
        for name, x in (("a", [1.0, 2.0]), ("b", [3.0, 4.0]))
    ]
    assert plot.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().err == ""
    assert drawn[0][0] == "greedy return on Acrobot-v1"
    assert drawn[1][1] == "final greedy return (reward units)"
    assert drawn[0][2] == ["a", "b"]
    flags = ["--by=final", "--title=Two runs", "--labels=first,second"]
    assert plot.main([*paths, *flags, f"--out={tmp_path / 'out'}"]) == 0
    assert (drawn[2][0], drawn[2][2]) == ("Two runs", ["first", "second"])
    with pytest.raises(ConfigError, match=r"^labels: must name the 2 runs"):
        plot.main([*paths, "--labels=one", f"--out={tmp_path / 'out'}"])


def test_settings_that_differ_are_listed(tmp_path, capsys):
    tuned = {"resolved": {"origin": {"config.learning_rate": "tuned"}}}
    paths = [
        fake_run(tmp_path / name, [1.0, 2.0], env="Acrobot-v1", algorithm=name, **more)
        for name, more in (("ppo", tuned), ("trpo", {}))
    ]
    assert plot.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    out, err = capsys.readouterr()
    assert "the runs differ in\n  algorithm: ppo, trpo\nsee" in out
    assert err == "note: only 1 of 2 have tuned settings: ppo\n"


def test_runs_on_different_environments_are_not_ranked(tmp_path, capsys, drawn):
    settings = {
        "a": ([1.0, 2.0], "CartPole-v1"),
        "b": ([3.0, 4.0], "Acrobot-v1"),
        "c": ([5.0, 6.0], "CartPole-v1"),
    }
    paths = [fake_run(tmp_path / name, scores, env=env) for name, (scores, env) in settings.items()]
    assert plot.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().err == ""
    titles = ["greedy return on CartPole-v1", "greedy return on Acrobot-v1"]
    assert [(title, labels) for title, _, labels in drawn[::2]] == [
        (titles[0], ["a", "c"]),
        (titles[1], ["b"]),
    ]
    lines = (tmp_path / "out" / "table.txt").read_text().splitlines()
    assert lines[0] == "greedy_return on CartPole-v1, final of each seed"
    assert lines[3].startswith("c ")
    assert "1.00 [0.39, 1.00]" in lines[3]
    assert lines[5].startswith("c is better than a with probability 1.00 [0.39, 1.00]")
    assert lines[8] == "greedy_return on Acrobot-v1, final of each seed"
    # A seed on Acrobot is not compared with a seed on CartPole.
    assert lines[10].split()[-3:] == ["[3,", "4]", "3"]
    assert plot.main([*paths, "--title=Three runs", f"--out={tmp_path / 'out'}"]) == 0
    assert drawn[4][0] == "Three runs on CartPole-v1"


def test_a_task_of_another_size_is_another_task(tmp_path, capsys, drawn):
    sizes = ({"task.num_digits": 1, "task.base": 10}, {"task.num_digits": 3, "task.base": 10})
    paths = [
        fake_run(tmp_path / name, [0.5, 0.6], **ADDITION, **size)
        for name, size in zip("ab", sizes, strict=True)
    ]
    assert plot.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    assert "better than" not in capsys.readouterr().out.replace("better than the first", "")
    where = [title.partition(" on ")[2] for title, *_ in drawn[::2]]
    assert where == ["addition num_digits=1", "addition num_digits=3"]


def test_control_and_language_have_no_score_in_common(tmp_path, capsys, drawn):
    paths = [
        fake_run(tmp_path / "a", [1.0], env="CartPole-v1"),
        fake_run(tmp_path / "b", [0.5], **ADDITION),
    ]
    with pytest.raises(
        ConfigError,
        match=r"^metric: must be given, one of entropy: the runs have no score in common$",
    ):
        plot.main([*paths, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
    assert plot.main([*paths, "--metric=entropy", f"--out={tmp_path / 'out'}"]) == 0
    units = ["environment steps, each seed", "completions, each seed"]
    assert [x_label for _, x_label, _ in drawn[::2]] == units


@cases("metric", [], ["--metric=entropy"])
def test_runs_without_a_metric_in_common_are_refused(tmp_path, metric):
    paths = [fake_run(tmp_path / name, [1.0]) for name in "ab"]
    (tmp_path / "b" / "metrics.jsonl").write_text('{"iteration": 0, "step": 0, "kl": [0.0]}\n')
    with pytest.raises(UsageError, match=r"^the runs have no metric in common: name evaluated"):
        plot.main([*paths, *metric, f"--out={tmp_path / 'out'}"])


@cases(
    "arguments, error, message",
    ([], UsageError, "name 1 to 8 folders of runs"),
    (["{tmp}/nowhere"], UsageError, r"\S+nowhere: must be the folder .*; it holds no config"),
    (
        ["{run}", "--metric=speed"],
        ConfigError,
        "metric: must be in all runs, which have entropy, greedy_return, got speed",
    ),
    (["{run}", "--metrics=speed"], ConfigError, "metrics: is .*; did you mean metric"),
    (["{tmp}/grid"], UsageError, r"\S+grid must be the folder of a run; a sweep has its own "),
)
def test_what_cannot_be_compared_is_named(tmp_path, arguments, error, message):
    run = fake_run(tmp_path / "a", [1.0])
    (tmp_path / "grid").mkdir()
    folder.write_settings(tmp_path / "grid", {"script": "sweep"})
    with pytest.raises(error, match=f"^{message}"):
        plot.main([argument.format(tmp=tmp_path, run=run) for argument in arguments])
    assert (tmp_path / "a" / "metrics.jsonl").exists()


class Page(HTMLParser):
    """Parsed page, with open tags, text, and sources of pictures."""

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


def test_a_report_is_whole_in_one_file(tmp_path):
    """The second of two runs has texts that must not become HTML."""
    cpu = {"algorithm": "a2c", "resolved": {"device": "1 × cpu"}}
    paths = [fake_run(tmp_path / "a", [1.0, 2.0]), fake_run(tmp_path / "b", [2.0, 2.5], **cpu)]
    sample = {"decoding": "greedy", "prompt": "1+1=", "score": 0.0}
    answers = ("<script>alert(1)</script>", "unseen", "&lt;2")
    (tmp_path / "b" / "samples.jsonl").touch()
    for i, answer in enumerate(answers):
        row = {"iteration": i, "step": 10 * i, "completion": answer, **sample}
        append(tmp_path / "b" / "samples.jsonl", row)
    out = tmp_path / "new" / "report.html"
    with pytest.raises(ConfigError, match="metric"):
        report.main([*paths, f"--out={out}", "--metric=unknown"])
    assert not out.parent.exists()
    assert report.main([*paths, f"--out={out}"]) == 0
    text = out.read_text()
    parsed = Page(text)
    assert parsed.open == []
    assert len(parsed.sources) == 1
    assert all(source.startswith("data:image/png;base64,") for source in parsed.sources)
    assert not re.search(r"(src|href)=.?https?:", text)
    said = "".join(parsed.text)
    for part in ("a · b", "0.88", "2.25", "<script>alert(1)</script>", "&lt;2", "a2c", "1 × cpu"):
        assert part in said, part
    assert "unseen" not in said
    assert text.count('<td class="differs">') == 2
