"""Tests a run's record of its origin, and `--deterministic`.

The modules `test_faults` and `test_kills` test bitwise equality.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrl_po.config import ConfigError
from jaxrl_po.run.store import provenance
from jaxrl_po.types import ActorCritic, CollectorState, Learner, TrainState
from jaxrl_po.version import __version__

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
PERSON = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "checkout" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("A = 1\n")
    return folder


def git(package, *arguments):
    command = ["git", "-C", str(package), *PERSON, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(package):
    git(package, "init", "-q")
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "one")
    return git(package, "rev-parse", "HEAD")


def test_what_is_told():
    told = provenance.describe_process("3 seeds on 1 device")
    assert told["placement"] == "3 seeds on 1 device"
    assert told["device"] == f"{jax.device_count()} × cpu"
    assert told["xla_flags"] == os.environ["XLA_FLAGS"]
    assert told["jax_config"]["jax_enable_x64"] is False
    packages = {
        name: version(name) for name in ("jax", "jaxlib", "numpy", "flax", "optax", "gymnax")
    }
    assert told["versions"] == {
        "python": sys.version.split()[0],
        "jaxrl_po": __version__,
        **packages,
    }
    assert told["source"] == provenance.source(EXPERIMENTS.parent / "jaxrl_po")
    assert told["cores"] >= 1
    assert told["processor"]


def test_the_revision_is_that_of_the_checkout(package, monkeypatch):
    head = commit(package)
    assert provenance.revision(package) == {"commit": head, "dirty": False}
    (package / "notes.txt").write_text("not of the code")
    assert provenance.revision(package) == {"commit": head, "dirty": False}
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # git sets this variable in a hook
    (package / "__init__.py").write_text("A = 2\n")
    assert provenance.revision(package) == {"commit": head, "dirty": True}


@pytest.mark.parametrize("missing", ["checkout", "git", "ours"])
def test_no_revision_and_no_noise(package, monkeypatch, capfd, missing):
    if missing == "git":
        commit(package)
        monkeypatch.setenv("PATH", "")
    if missing == "ours":  # an environment that lies inside a checkout of another project
        installed = package / ".venv" / "lib"
        commit(package)
        installed.mkdir(parents=True)
        (installed / "__init__.py").write_text("")
        package = installed
    assert provenance.revision(package) is None
    assert capfd.readouterr() == ("", "")


def test_digest_counts_every_folder(package, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.py").write_text("A = 1\n")
    alone, both = provenance.source(package), provenance.source(package, other)
    (other / "mine.py").write_text("A = 2\n")
    assert len({alone, both, provenance.source(package, other)}) == 3


def test_digest_changes_with_content_and_name_of_file(package):
    before = provenance.source(package)
    assert provenance.source(package) == before
    (package / "notes.txt").write_text("no code")
    assert provenance.source(package) == before
    (package / "__init__.py").write_text("A = 2\n")
    changed = provenance.source(package)
    (package / "__init__.py").rename(package / "a.py")
    assert len({before, changed, provenance.source(package)}) == 3


NOW = {
    "device": "2 × cpu",
    "versions": {"jax": "2", "numpy": "1"},
    "source": "aa",
    "revision": {"commit": "c", "dirty": False},
}


def test_a_run_keeps_what_it_was_begun_under():
    once = provenance.go_on(NOW, {})
    assert once == NOW
    assert provenance.go_on(NOW, {"iterations": 3, **once}) == NOW
    later = NOW | {"versions": {"jax": "3", "numpy": "1"}}
    again = provenance.go_on(later, {"iterations": 3, **once})
    assert again == {**later, "before": [NOW]}
    assert provenance.go_on(later, again) == again
    assert provenance.go_on(NOW, again) == {**NOW, "before": [NOW, later]}


def test_deterministic_run_resumes_only_under_same_circumstances():
    provenance.require_same_process(NOW, {}, "runs/x")
    provenance.require_same_process(NOW, {"iterations": 3, **NOW}, "runs/x")
    provenance.require_same_process(
        NOW | {"revision": None}, NOW, "runs/x"
    )  # both runs have the same code
    other = NOW | {"device": "1 × cpu", "versions": {"jax": "1", "numpy": "1"}}
    with pytest.raises(
        ConfigError,
        match=r"^deterministic: promises the same bits only under the circumstances of the run in "
        r"runs/x; there differ device: 1 × cpu → 2 × cpu; jax: 1 → 2; "
        r"resume it there, or begin another without deterministic$",
    ):
        provenance.require_same_process(NOW, other, "runs/x")
    with pytest.raises(ConfigError, match="there differ source: None → aa"):
        provenance.require_same_process(
            NOW,
            {"iterations": 3, **{name: NOW[name] for name in NOW if name != "source"}},
            "runs/x",
        )


def test_too_late_matters_on_an_accelerator_alone(monkeypatch):
    count = jax.config.jax_num_cpu_devices
    before = os.environ["XLA_FLAGS"]
    provenance.ask_for_determinism()  # the backend of the tests is already running, and it is a CPU
    assert os.environ["XLA_FLAGS"] == before
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(
        ConfigError,
        match="runs already: start Python with XLA_FLAGS=--xla_gpu_deterministic_ops=true",
    ):
        provenance.ask_for_determinism()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops")
    provenance.ask_for_determinism()  # the user set the flag by hand before the backend started
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with pytest.raises(
        ConfigError, match="must not be contradicted by --xla_gpu_deterministic_ops=false"
    ):
        provenance.ask_for_determinism()
    assert jax.config.jax_num_cpu_devices == count


def test_xla_hears_it(tmp_path):
    """The flag takes effect in the first program that gymnax compiles, long before a chunk of
    training.

    XLA itself reports the flag.
    """
    dump = tmp_path / "xla"
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_dump_to={dump}",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [
        sys.executable,
        str(EXPERIMENTS / "control.py"),
        "--deterministic",
        "--env=none",
        f"--out={tmp_path / 'run'}",
    ]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert process.returncode == 2
    assert "--env: unknown name 'none'" in process.stderr
    options = [path.read_text() for path in dump.glob("*debug_options")]
    assert options
    assert all("xla_gpu_deterministic_ops: true" in text for text in options)


def test_of_arrays_only_frozen_ones_are_the_program():
    def program(policy, base):
        policy, base = jnp.full(2, policy), jnp.full(2, base)

        def init(key):
            params = ActorCritic(jnp.copy(policy), frozen=base)
            return TrainState(params, None, None, policy[0], CollectorState({}), key, policy[1])

        return provenance.program(Learner(init, lambda state: (state, None), lambda *pair: pair))

    assert program(0.0, 0.0) == program(1.0, 0.0)
    assert program(0.0, 0.0) != program(0.0, 1.0)
