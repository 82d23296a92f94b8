"""Tests the package as a user installs it: a wheel in an empty environment.

Tests of dependencies use the oldest and the newest versions; all other tests use the pinned ones.
"""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from jaxrl_po.version import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SMOKE = """
import importlib, pkgutil
import gymnax, jax, jaxrl_po
# Without what needs an extra.
LEFT_OUT = ("mathematics", "reasoning", "adapters")
for module in pkgutil.walk_packages(jaxrl_po.__path__, "jaxrl_po."):
    if not {*LEFT_OUT} & {*module.name.split(".")}:
        importlib.import_module(module.name)
from jaxrl_po import control, language
from jaxrl_po.algorithms import grpo, ppo, trpo

task = language.tasks.addition(1)
settings = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8)
model = settings.build(task.tokenizer.size)
games = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=8)
words = language.make_problem(task, model, num_prompts=2, group_size=4)
cases = (
    (ppo, ppo.Config(num_minibatches=2), games),
    (trpo, trpo.Config(), games),
    (grpo, grpo.Config(), words),
)
for method, config, problem in cases:
    learner = method.make(config, problem)
    train = jax.jit(lambda key, learner=learner: learner.step(learner.init(key)))
    state, metrics = train(jax.random.key(0))
    assert all(bool(jax.numpy.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))
print(jaxrl_po.__file__)
"""


def lowest(requirements):
    """Returns the lower bounds of requirements as pinned versions.

    >>> lowest(["jax>=0.10,<0.12", "six>=1.16"])
    ['jax==0.10', 'six==1.16']
    """
    return [re.sub(r"([\w-]+)>=([\d.]+).*", r"\1==\2", requirement) for requirement in requirements]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "jaxrl_po"
    # The wheel is built from a copy: otherwise the wheel would include files that an earlier build
    # left beside the package, and this build would leave files too.
    shutil.copytree(
        ROOT / "jaxrl_po", source / "jaxrl_po", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        out,
        source,
    ]
    subprocess.run(command, check=True, timeout=300)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxrl_po").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == source
    assert "jaxrl_po/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {
        "jaxrl_po",
        f"jaxrl_po-{__version__}.dist-info",
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("versions", ["lowest", "newest"])
def test_a_wheel_works_in_an_empty_environment(wheel, tmp_path, versions):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    given = lowest(PROJECT["dependencies"]) if versions == "lowest" else []
    install = [python, "-m", "pip", "install", "--quiet", wheel, *given]
    subprocess.run(install, check=True, timeout=900)
    subprocess.run([python, "-m", "pip", "check"], check=True, timeout=60)
    done = subprocess.run(
        [python, "-c", SMOKE],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(str(tmp_path / "venv"))
    if versions == "lowest":
        shown = subprocess.run(
            [python, "-m", "pip", "show", "jax"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert "Version: 0.10.0" in shown.stdout


def canonical(name):
    return name.lower().replace("_", "-")


PINS = dict(
    re.match(r"([\w-]+)==(\S+)", line).groups()
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line
)
PINS = {canonical(name): version for name, version in PINS.items()}


def test_versions_agree():
    assert re.search(r"^## \[", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_each_requirement_is_pinned_within_its_bounds(extra):
    """Pins include the dependencies of extras, as pip resolved them: `make` installs only pinned
    versions."""
    for requirement in PROJECT["optional-dependencies"].get(extra, PROJECT["dependencies"]):
        name, floor = re.match(r"([\w-]+)(?:\[\w+\])?(?:>=([\d.]+))?", requirement).groups()
        if name != PROJECT["name"]:
            tested = [int(x) for x in re.findall(r"\d+", PINS[canonical(name)])]
            assert tested >= [int(x) for x in floor.split(".")], name
