"""Models that runs train: new, pretrained or of an earlier run, with or without adapters."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer, lora
from jaxrl_po.language.dialogue import TaskLike
from jaxrl_po.language.mismatch import DTYPES
from jaxrl_po.language.pretrained import architectures, files, read_files, text, weights
from jaxrl_po.language.settings import Computation
from jaxrl_po.run import errors
from jaxrl_po.run.data import prompts, tables
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.errors import UserCodeError
from jaxrl_po.run.experiment import earlier
from jaxrl_po.run.experiment.language_config import (
    TAUGHT,
    LanguageConfig,
    LanguageOptions,
    task_entry,
)
from jaxrl_po.run.experiment.options import InitialModel
from jaxrl_po.run.experiment.registry import TASKS
from jaxrl_po.run.experiment.settings import Domain
from jaxrl_po.run.store import checkpoint, folder
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.types import ActorCritic, PyTree

DIGESTED = files.CONFIG, files.TOKENIZER, files.SETTINGS, files.TEMPLATE, files.GENERATION

Language = Domain[LanguageConfig]


def root(init_from: str, *seen: str) -> str:
    """Returns the pretrained model that a run starts from, directly or through earlier runs.

    Args:
      init_from: Value of `--init_from`.
      seen: Absolute paths of folders that `init_from` must not lead to, such as a folder that is
        overwritten.

    Returns:
      Folder or GGUF file of the pretrained model; empty if the first run started with a new model,
      or if the folder holds neither a run nor a model.

    Raises:
      UserCodeError: A folder on the way is missing, lacks its `config.json`, or leads back to a
        folder of `seen`.
    """
    if not init_from or os.path.isfile(init_from):
        return init_from
    here = os.path.realpath(init_from)
    if here in seen:
        raise UserCodeError(
            "init_from",
            f"leads back to {init_from}, which another run replaces, or has replaced: keep the "
            "run that others started from",
        )
    makers = "jaxrl-po language or of a pretrained model, or a GGUF file"
    stored = folder.read_settings(Path(init_from), "init_from", makers)
    if "script" in stored:
        return root(stored.get("init_from", ""), here, *seen)
    return init_from if "model_type" in stored or "architectures" in stored else ""


class PretrainedBase(NamedTuple):
    """A pretrained model, without the parameters.

    Attributes:
      files: Contents of the model's text files, and its tensors, which stay on disk until read.
      model: Transformer of the model.
      text: Conversion of prompts to the model's tokens.
    """

    files: files.ModelFiles
    model: Transformer
    text: prompts.PromptEncoder


def initial_model(options: LanguageOptions) -> InitialModel:
    """Reads from the files of `--init_from` which model a run starts from; see `root`."""
    found = root(options.init_from, *[os.path.realpath(options.out)] * options.overwrite)
    return InitialModel(os.path.abspath(found) if found else "", found != options.init_from)


def read_base(path: str, settings: Computation) -> PretrainedBase | None:
    """Reads a pretrained model without its parameters; returns None for an empty path.

    Args:
      path: Folder or GGUF file; see `InitialModel.pretrained`.
      settings: Settings of `--model.*`.

    Raises:
      ConfigError: The model cannot be used; the error names the flag.
    """
    if not path:
        return None
    if Path(path).is_file():
        errors.require("init_from", "gguf", "gguf")
    errors.require("init_from", "tokenizers", "pretrained")
    try:
        found = read_files(path)
        config = found.json(files.CONFIG)
        dtype = DTYPES[settings.dtype]
        model = architectures.read(config, dtype=dtype, remat=settings.remat)
        model = model.clone(fused_attention=settings.fused_attention)
        tokenizer, template = text.read_tokenizer(found, model.vocabulary)
    except ConfigError as error:
        raise ConfigError("init_from", f"{path}: {error.message}") from None
    encoder = prompts.PromptEncoder(tokenizer, template, config.get(files.CONTEXT, 0))
    return PretrainedBase(found, model, encoder)


class Teacher(NamedTuple):
    """The final policy of an earlier run, which is not trained further.

    Attributes:
      model: Transformer of the teacher, of any size.
      params: Parameters of the teacher, `{"params": …}` on the host.
    """

    model: Transformer
    params: PyTree


class RunModels(NamedTuple):
    """Task and models of a run.

    Attributes:
      task: Task, in the tokens of the model.
      policy: Transformer of the policy, with its adapters if it has any.
      params: Parameters `{"params": …}` on the host, of the first policy or of the base under the
        adapters; None if each seed draws its own parameters.
      base: Pretrained model, without parameters; None for a model of this library.
      digest: Digest of the base parameters below adapters; empty without adapters.
      critic: Transformer of the critic; None without a critic.
      teacher: Final policy of an earlier run; None without a teacher.
    """

    task: TaskLike
    policy: Transformer
    params: PyTree
    base: PretrainedBase | None
    digest: str
    critic: Transformer | None = None
    teacher: Teacher | None = None


def make_task(
    config: LanguageConfig, base: PretrainedBase | None, *, answers: bool = True
) -> TaskLike:
    """Makes the task of a run.

    Args:
      config: Settings of the run.
      base: Pretrained model; None for a new model.
      answers: Whether each prompt of a table needs an answer, if completions are sampled for it.

    Raises:
      ConfigError: Settings cannot be used, or the vocabulary of the task is not the model's.
    """
    options, entry = config.run, task_entry(config.run.task)
    if base is not None and not entry.any_vocabulary:
        others = ", ".join(name for name, each in TASKS.items() if each.any_vocabulary)
        raise ConfigError(
            "task",
            f"{options.task} has its own vocabulary: choose {others} or a task of your own for a "
            "pretrained model",
        )
    supervised, hosted = options.entry.supervised, bool(options.tools)
    reading = tables.TableReading(
        base and base.text,
        answers and not hosted and not supervised,
        hosted,  # a class of tools reads all columns of a prompt's row
        supervised,
        config.model.shape if isinstance(config.model, language.ModelSettings) else "",
    )
    return entry.make(config.task, reading)


def make_models(domain: Language, config: LanguageConfig, *, answers: bool = True) -> RunModels:
    """Makes the task, model and initial parameters of a run.

    Args:
      domain: Domain `language`, which reads earlier runs.
      config: Settings of the run.
      answers: Whether each prompt needs an answer.

    Raises:
      ConfigError: The value of `--init_from`, `--task` or `--lora` cannot be used.
    """
    options, adapters = config.run, config.lora
    base = read_base(config.initial.pretrained, config.model)
    task = make_task(config, base, answers=answers)
    whole = bare_model(config, base, task)
    policy = whole.clone(lora=adapters.lora)
    if task.tokenizer.size != whole.vocabulary:
        raise ConfigError(
            "task",
            f"{options.task} has a vocabulary of {task.tokenizer.size} tokens, but init_from = "
            f"{options.init_from} has {whole.vocabulary}",
        )
    params: PyTree = None
    if base is not None and not config.initial.by_run:
        # A base in the dtype of the matrix products is not rounded again in these products.
        half = adapters.rank > 0 and config.model.dtype != "float32"
        try:
            params = weights.read(
                base.files, whole, dtype=None if half else "float32", place=on_host
            )
        except ConfigError as error:
            raise ConfigError("init_from", f"{options.init_from}: {error.message}") from None
    elif options.init_from:
        settings = earlier.read_config(domain, "init_from", options.init_from)
        if isinstance(config.model, language.ModelSettings):
            require_alike(config, settings, task)
        params = _latest(domain, "init_from", options.init_from, settings, whole)
    elif adapters.rank and options.compile_for:  # compilation needs no values of parameters
        dtype = DTYPES[config.model.dtype]
        shapes = whole.parameter_shapes()
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
        return RunModels(task, policy, params, base, "")
    elif adapters.rank:
        drawn = jax.jit(whole.init)(
            jax.random.key(options.seed), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
        )
        params = jax.device_get(drawn)
    return RunModels(task, policy, params, base, digest_base(params, base) if adapters.rank else "")


def bare_model(config: LanguageConfig, base: PretrainedBase | None, task: TaskLike) -> Transformer:
    """Returns the transformer of a run without adapters: of the given sizes, or pretrained."""
    if base is not None:
        return base.model
    assert isinstance(config.model, language.ModelSettings)
    return config.model.build(task.tokenizer.size)


def on_host(path: tuple[str, ...], array: PyTree) -> PyTree:
    """Returns a parameter of a pretrained model unchanged, so that it stays on the host."""
    del path
    return array


def require_shares(start: RunModels, placement: Placement) -> None:
    """Raises ConfigError if the transformer cannot be sharded evenly over the devices."""
    model = start.policy
    over_data = {"width": model.width} if placement.shard_params else {}
    over_model = {"kv_heads": model.kv_heads, "mlp_width": model.mlp_width}
    for axis, devices, sizes in (
        ("data", placement.data_devices, over_data),
        ("model", placement.model_devices, over_model),
    ):
        for name, size in sizes.items():
            if size % devices:
                flag, subject = ("init_from", f"{name} ") if start.base else (f"model.{name}", "")
                raise ConfigError(
                    flag,
                    f"{subject}must be a multiple of {devices}, the devices of the {axis} axis of "
                    f"the mesh, got {size}",
                )


def teacher(domain: Language, config: LanguageConfig, task: TaskLike) -> Teacher | None:
    """Returns the latest policy of the first seed of the run `--teacher`; None without a teacher.

    Raises:
      ConfigError: The method has no use for a teacher, or needs one; the folder does not hold a run
        with a model of this library and the vocabulary of this task, or has no intact checkpoint.
    """
    options = config.run
    taught = options.entry.has_teacher
    if options.teacher and not taught:
        raise ConfigError("teacher", f"has no effect unless algorithm = {' or '.join(TAUGHT)}")
    if not taught:
        return None
    if not options.teacher:
        raise ConfigError("teacher", "must name a run of jaxrl-po language, e.g. runs/first")
    run = options.teacher
    settings = earlier.read_config(domain, "teacher", run)
    if settings.initial.pretrained:
        raise ConfigError("teacher", f"must be a run without a pretrained model, got {run}")
    require_vocabulary("teacher", run, config, settings, task)
    assert isinstance(settings.model, language.ModelSettings)
    model = settings.model.build(task.tokenizer.size)
    return Teacher(model, _latest(domain, "teacher", run, settings, model))


def _latest(
    domain: Language, flag: str, run: str, settings: LanguageConfig, model: Transformer
) -> PyTree:
    """Returns the newest policy of the first seed of a run whose settings are `settings`.

    Raises:
      ConfigError: The run has no intact checkpoint, or the base model has changed since the run.
    """
    adapted = settings.lora.rank > 0
    try:
        shapes = model.clone(lora=settings.lora.lora).parameter_shapes()
        found = checkpoint.peek(
            Path(run) / "checkpoints" / "latest",
            {lora.ADAPTERS: shapes[lora.ADAPTERS]} if adapted else shapes,
            part=".params.policy",
            seed_index=0,
        )
        over = make_models(domain, settings, answers=False) if adapted else None
    except (CheckpointError, ConfigError) as error:
        raise earlier.unsuitable(flag, run, error) from None
    if found is None:
        raise ConfigError(
            flag, f"{run} holds no intact checkpoint; wait for one, or choose another run"
        )
    if over is None:
        return jax.device_get(found[1])
    earlier.require_base(over.digest, flag, run)
    return jax.device_get(_merged(over.policy, over.params, found[1]))


def require_alike(config: LanguageConfig, settings: LanguageConfig, task: TaskLike) -> None:
    """Raises ConfigError unless the run of `settings` has the vocabulary and model of `config`."""
    run = config.run.init_from
    require_vocabulary("init_from", run, config, settings, task)
    for name, mine in vars(config.model).items():
        its = vars(settings.model)[name]
        # Fields of `Computation` change how the model is computed, not its parameters.
        if mine != its and name not in vars(Computation()):
            raise ConfigError(
                f"model.{name}", f"must be {errors.spell(its)}, as in init_from = {run}, got {mine}"
            )


def require_vocabulary(
    flag: str, run: str, config: LanguageConfig, settings: LanguageConfig, task: TaskLike
) -> None:
    """Raises ConfigError unless the run of `settings`, named by a flag, has the task's tokens."""
    tokenizer = make_task(settings, None, answers=False).tokenizer
    if tokenizer != task.tokenizer:
        raise ConfigError(
            flag,
            f"must have the vocabulary of task = {config.run.task}, {task.tokenizer}; {run} was "
            f"trained on {settings.run.task}, {tokenizer}",
        )


def digest_base(params: PyTree, base: PretrainedBase | None) -> str:
    """Returns the digest of a base model: parameters and, if pretrained, the other files."""
    found = hashlib.blake2b(digest_size=16)
    for part in _parts(params, base):
        found.update(part)
    return found.hexdigest()


def _parts(params: PyTree, base: PretrainedBase | None) -> Iterator[Any]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        yield f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode()
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if base is not None:
        contents = base.files.contents
        for name in DIGESTED:
            yield contents.get(name, b"")


def merge_policy(policy: Transformer, params: ActorCritic) -> PyTree:
    """Returns the parameters of one seed's policy; adapters are merged into the base matrices."""
    if policy.lora is None:
        return params.policy
    base = {lora.BASE: params.frozen[lora.BASE]}
    return _merged(policy, base, params.policy)


def _merged(policy: Transformer, base: PyTree, adapters: PyTree) -> PyTree:
    """Merges adapters in float32 at least, since a half type would round their changes away."""
    wide = jax.tree.map(lambda x: x.astype(np.promote_types(x.dtype, np.float32)), base)
    return lora.merge_adapters(policy, wide, adapters)
