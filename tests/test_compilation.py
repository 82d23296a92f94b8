"""Tests that programs compile with the settings of their backend and are stored, unless the user
has chosen otherwise."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import cases

from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices import compilation
from jaxrl_po.run.loop import programs

SIDE_BY_SIDE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
LARGE = jax.ShapeDtypeStruct((compilation.SMALL // 4,), jnp.float32)
SMALL = jax.ShapeDtypeStruct((compilation.SMALL // 4 - 1,), jnp.float32)


LEVEL = "xla_backend_optimization_level"
OLDER = "xla_cpu_use_fusion_emitters"


@cases(
    "backend, flags, argument, light, wanted",
    ("cpu", "", SMALL, False, {LEVEL: "1"}),
    ("cpu", "", LARGE, False, {LEVEL: "1"}),
    ("cpu", "", SMALL, True, {LEVEL: "0", OLDER: False}),
    ("cpu", f"--{OLDER}=true", SMALL, True, {LEVEL: "0"}),
    ("cpu", f"--{LEVEL}=3", SMALL, False, None),
    ("gpu", "", SMALL, True, SIDE_BY_SIDE),
    ("gpu", "", LARGE, False, None),
    ("gpu", "--xla_gpu_command_buffer_scheduling_mode=LHS", SMALL, False, None),
    ("tpu", "", SMALL, True, None),
)
def test_a_program_has_the_settings_of_its_backend(
    monkeypatch, backend, flags, argument, light, wanted
):
    """On a CPU, XLA knows the settings of every backend, and refuses unknown names and values."""
    given = []
    compile_ahead = jax.stages.Lowered.compile

    def record(lowered, compiler_options=None):
        given.append(compiler_options)
        return compile_ahead(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", record)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XLA_FLAGS", flags)
    compilation.compiled(lambda x: x + 1.0, argument, light=light)
    if wanted and not compilation.OLDER_EMITTERS:
        wanted.pop(OLDER, None)
    assert given == [wanted]


@cases("small", True, False)
def test_rarely_run_small_programs_compile_with_little_effort(monkeypatch, small):
    """The training step and evaluations compile with full effort, even for a small state.

    The function of an iteration is traced once.
    """
    effort, traced = {}, []

    def record(function, *arguments, light=False, **options):
        effort[function.__name__] = light
        return compilation.compiled(function, *arguments, light=light, **options)

    toy = toy_run.toy()

    def begin(keys):
        return toy.init(keys)

    def sample(state):
        traced.append(state)
        return toy.sample(state)

    def describe(state):
        return state.step

    learner = toy._replace(init=begin, sample=jax.jit(sample), update=jax.jit(toy.update))
    mesh = jax.make_mesh((len(jax.devices()),), ("seed",), (AxisType.Auto,))
    keys = jax.device_put(toy_run.job().keys, NamedSharding(mesh, P()))
    examples = Examples(describe, list)
    job = toy_run.job(learner=learner, keys=keys, examples=examples, cheap_init=True)
    size = sum(x.nbytes for x in jax.tree.leaves(begin(job.keys)))
    monkeypatch.setattr(compilation, "LIGHT", size if small else size - 1)
    monkeypatch.setattr(programs, "compiled", record)
    programs.check_job(job)
    programs.compile_programs(job)
    assert len(traced) == 1
    assert effort == {"begin": small, "chunk": False, "evaluate": False, "describe": small}


def test_programs_compile_in_parallel_and_first_error_raises():
    """The error keeps its own message while the other programs still compile.

    Results are in the order of the call's programs.
    """
    other, ended = threading.Event(), []

    def fails():
        raise ValueError("the evaluation has no such axis")

    assert compilation.side_by_side(lambda: other.wait(60), lambda: other.set() or 2) == [True, 2]
    other.clear()
    with pytest.raises(ValueError, match="the evaluation has no such axis"):
        compilation.side_by_side(lambda: ended.append(other.wait(20)), fails)
    assert not ended
    other.set()


def test_a_program_runs_with_the_options_of_jit():
    program = compilation.compiled(lambda x: x + 1.0, jnp.zeros(3), donate_argnums=0)
    x = jnp.zeros(3)
    assert program(x).tolist() == [1.0, 1.0, 1.0]
    assert x.is_deleted()


def test_what_compiling_freed_is_returned_to_the_system(monkeypatch):
    returned = []
    monkeypatch.setattr(compilation, "return_freed_memory", lambda: returned.append(True))
    compilation.compiled(lambda x: x + 1.0, jnp.zeros(3))
    assert returned == [True]


def test_memory_below_used_blocks_returns_to_the_system(memory_held):
    """Without the call, the C library would retain the freed pages."""
    blocks = [np.ones(12_500) for _ in range(2_000)]  # the freed blocks take 190 MiB
    last = blocks.pop()
    del blocks
    before = memory_held()
    compilation.return_freed_memory()
    assert last.sum() == 12_500
    assert before - memory_held() > 143


@pytest.fixture
def no_cache():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_compiled_programs_are_kept_unless_told_otherwise(tmp_path, monkeypatch, no_cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compilation.keep_programs("")
    assert jax.config.jax_compilation_cache_dir is None
    with monkeypatch.context() as patch:  # as in a container, whose user has no name
        for name in ("XDG_CACHE_HOME", "HOME"):
            patch.delenv(name)
        patch.setattr(os, "getuid", lambda: 2**31 - 7)
        compilation.keep_programs("auto")
    assert jax.config.jax_compilation_cache_dir is None
    compilation.keep_programs("auto")
    chosen = jax.config.jax_compilation_cache_dir
    assert os.path.dirname(chosen) == str(tmp_path / "cache" / "jaxrl_po")
    # The folder that the environment variable names remains.
    compilation.keep_programs(str(tmp_path / "other"))
    assert jax.config.jax_compilation_cache_dir == chosen
    jax.config.update("jax_compilation_cache_dir", None)
    compilation.keep_programs(str(tmp_path / "other"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "other")
