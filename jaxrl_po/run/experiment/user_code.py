"""An environment, network, task or reward of the user: `file.py:name`, or an object of Python."""

import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxrl_po import variables
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data import workers
from jaxrl_po.run.errors import UsageError

FLAGS = ("env", "task", "reward", "policy", "critic", "environment")
OWN = "python:"  # begins the name of an object that no other process can import
DIGESTS = "code"  # entry of a run: what its files of code hold, by flag
# Packages that are not the user's code: a run records their versions.
LIBRARIES = {"jaxrl_po", "jax", "jaxlib", "numpy", "flax", "optax", "gymnax"}
LIBRARIES |= sys.stdlib_module_names
PLAIN = (bool, int, float, str)
MOST = 200_000  # objects of which one may consist
EMPTY = types.CellType()  # of a closure
DATA = ("task.train", "task.test", "demonstrations")
FOLDERS = ("init_from", "teacher", *DATA)  # and files


class UserCodeError(UsageError):
    """A file of the user's own, or a folder that a run began with, cannot be used."""


class Given(str):
    """The text of a flag whose object was given in Python, and that object, its `value`."""

    value: Any

    def __reduce__(self) -> Any:
        # Another process imports the file, whose module may have another name there.
        in_files = all(map(in_file, self.split(",")))
        return (str, (str(self),)) if in_files else super().__reduce__()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def named(flag: str, value: Any) -> str:
    """What a flag is for an object given in Python: `file.py:name`, or `python:name`.

    A reward that its own process can import is that text alone; any other object is held, see
    `Given`.

    Raises:
      ConfigError: the object must be importable.

    Example:
      >>> named("env", lambda: None), named("env", lambda: None).value is None
      ('python:lambda', False)
    """
    if flag == "reward" and type(value) in (list, tuple):
        if len(value) > 1 and any(isinstance(x, str) and x.startswith("regex:") for x in value):
            raise ConfigError(f"{flag}: regex:PATTERN must stand alone, got it in {value!r}")
        each = [_absolute(x) if isinstance(x, str) else named(flag, x) for x in value]
        text = ",".join(each)
        return given(text, each) if any(isinstance(x, Given) for x in each) else text
    name = getattr(value, "__name__", type(value).__name__)
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    importable = file.endswith(".py") and vars(module).get(name) is value
    text = f"{os.path.abspath(file)}:{name}" if importable else OWN + name.strip("<>")
    # A worker that imported the script would run it.
    if importable and module is not sys.modules["__main__"] and flag in ("reward", "environment"):
        inside = getattr(module, "__package__", "")
        return f"{value.__module__}:{name}" if inside and flag == "reward" else text
    if flag == "environment" or (flag == "reward" and not callable(value)):
        raise ConfigError(f"{flag} must be a function or class that can be imported, got {value!r}")
    return given(text, value)


def given(text: str, value: Any) -> Given:
    """Makes the text of a flag that carries an object, or the list of names and objects."""
    held = Given(text)
    held.value = value
    return held


def parts(source: str) -> list[str]:
    """Returns the names, and objects as `Given`, of a flag that takes several."""
    if isinstance(source, Given):
        listed = type(source.value) is list and all(isinstance(x, str) for x in source.value)
        return source.value if listed else [source]
    return source.split(",")


def missing(flag: str, source: str) -> str:
    """The message for an object that was given in Python to a run that is read again."""
    return (
        f"--{flag}={source} was given in Python and cannot be imported: give it again, as in "
        f"run.load(folder, {flag}=…) or run.resume(folder, {flag}=…)"
    )


def is_source(name: str) -> bool:
    """Whether a name stands for code of the user's own.

    Example:
      >>> is_source("my_env.py:Corridor"), is_source("python:Maze"), is_source("CartPole-v1")
      (True, True, False)
    """
    return in_file(name) or name.startswith(OWN)


def in_file(name: str) -> bool:
    """Whether a name reads like `file.py:name`."""
    return ".py:" in name


def absolute(settings: Mapping[str, Any]) -> dict[str, str]:
    """The flags among `settings` that name files or folders to read, with absolute paths.

    They are stored so, for a run may be resumed or evaluated from another folder.

    Example:
      >>> absolute({"env": "/home/me/../us/my_env.py:Corridor", "task": "addition"})
      {'env': '/home/us/my_env.py:Corridor'}
    """
    folders = {name: os.path.abspath(settings[name]) for name in FOLDERS if settings.get(name)}
    return folders | {
        name: ",".join(map(_absolute, settings[name].split(",")))
        for name in FLAGS
        if in_file(settings.get(name, "")) and not isinstance(settings[name], Given)
    }


def _absolute(source: str) -> str:
    if not in_file(source):
        return source
    place, _, name = source.rpartition(":")
    return f"{os.path.abspath(place)}:{name}"


def short(name: str) -> str:
    """A name for titles: that of a file without its folder.

    Example:
      >>> short("/home/me/my_env.py:Corridor"), short("CartPole-v1")
      ('my_env.py:Corridor', 'CartPole-v1')
    """
    return Path(name).name if in_file(name) else name


def files(settings: Mapping[str, Any]) -> list[Path]:
    """The files that the flags among `settings` name.

    Example:
      >>> files({"task": "addition", "reward": "mine.py:nearly,package.module:other"})
      [PosixPath('mine.py')]
    """
    named = [source for name in FLAGS for source in settings.get(name, "").split(",")]
    return [Path(source.rpartition(":")[0]) for source in named if in_file(source)]


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns by flag `digest:name` of the code that it names, wherever the file lies.

    An object of Python whose source cannot be read keeps the name `python:name`.
    """
    named = {name: settings.get(name, "") for name in FLAGS}
    return {
        name: ",".join(map(_digest, parts(source)))
        for name, source in named.items()
        if is_source(source) or (name == "reward" and ":" in source)
    }


def _digest(source: str) -> str:
    place, _, name = source.rpartition(":")
    if isinstance(source, Given) and not in_file(source):
        try:
            texts = repr(sorted(_texts(source.value)))
        except Exception:  # of code that cannot be read, or that raises when its attributes are
            return source
        return f"{hashlib.sha256(texts.encode()).hexdigest()[:16]}:{name}"
    if not in_file(source):  # a reward may name a module, which only its own process imports
        package, *inner = place.split(".")
        spec = importlib.util.find_spec(package) if package else None
        folders = (spec and spec.submodule_search_locations) or [""]
        place = os.path.join(folders[0], *inner) + ".py" if inner else (spec and spec.origin) or ""
    return f"{digest(place)}:{name}" if os.path.isfile(place) else source


def _texts(value: Any) -> set[str]:
    """Returns the source of the functions that an object consists of, without `LIBRARIES`.

    They are the methods of its class and bases, its attributes, and the functions, classes,
    numbers and texts that a function refers to by name.

    Raises:
      OSError, TypeError: the source of a function cannot be read.
    """
    texts, seen, pending = set[str](), dict[int, Any](), [value]
    while pending:
        each = pending.pop()
        if id(each) in seen or each is None or isinstance(each, (types.ModuleType, *PLAIN)):
            continue
        if len(seen) == MOST:
            raise TypeError("too many objects")
        seen[id(each)] = each  # or another object could take its id
        own = not _is_library(getattr(each, "__module__", None) or type(each).__module__)
        members: dict[str, Any] = {}
        if isinstance(each, types.FunctionType):
            texts.add(_text(each) if own else "")
            named = {x: each.__globals__.get(x) for x in _globals(each.__code__) if own}
            members = {x: y for x, y in named.items() if callable(y) or isinstance(y, PLAIN)}
            pending += [cell.cell_contents for cell in each.__closure__ or () if cell != EMPTY]
        elif isinstance(each, type):
            members = dict(vars(each)) if own else {}
            pending += each.__bases__
        else:
            pending += [type(each), *_inside(each)]
        attributes = {} if isinstance(each, type) else getattr(each, "__dict__", {})
        pending += [*members.values(), *attributes.values()]
        plain = (x for x in members if x[:2] != "__" and isinstance(members[x], PLAIN))
        texts |= {f"{x}={members[x]!r}" for x in plain}
    return texts - {""}


@functools.cache
def _is_library(module: str) -> bool:
    """Returns whether a module is the library's, of `LIBRARIES`, or an installed package's."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in LIBRARIES or "site-packages" in file or "dist-packages" in file


def _inside(value: Any) -> Iterable[Any]:
    """Returns the parts of a container, method, property, partial or wrapped function."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, property):
        return (value.fget,)
    return (inspect.getattr_static(value, "__wrapped__", None),)


def _globals(code: types.CodeType) -> set[str]:
    """Returns the names of globals that the code reads, and the functions inside it."""
    inside = [_globals(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    read = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return read.union(*inside)


def _text(function: types.FunctionType) -> str:
    """Returns the source of a function; for a lambda, without the rest of its line."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError:
        if function.__name__ in vars(object):  # as a dataclass generates it
            return ""
        raise
    _, found, body = text.partition(function.__name__.strip("<>"))
    if found != "lambda":
        return text
    code = function.__code__  # two lambdas may stand in one line
    constants = [x for x in code.co_consts if not isinstance(x, types.CodeType)]
    return f"{found}{body.rstrip('),' + chr(10))} {constants} {code.co_code.hex()}"


def digest(path: str) -> str:
    """Of a file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def found(settings: Mapping[str, Any], stored: Mapping[str, str], run: Path) -> dict[str, str]:
    """The flags of a run whose files are gone, with the same files where they are now.

    They are looked for below the current folder and those above the run, as after a project's
    folder was renamed.

    Args:
      settings: flag name to value.
      stored: `digests` when the run began.
      run: its folder.

    Raises:
      ValueError: a flag names more or less than it did.
    """

    def now(source: str, digest: str) -> str:
        place, _, name = source.rpartition(":")
        if in_file(source) and not os.path.isfile(place):
            parts = Path(place).parts[1:]
            for base in (Path.cwd(), *run.absolute().parents):
                for i in range(len(parts)):
                    moved = f"{base.joinpath(*parts[i:])}:{name}"
                    if _digest(moved) == digest:
                        return moved
        return source

    return {
        flag: ",".join(
            now(*pair)
            for pair in zip(settings[flag].split(","), stored[flag].split(","), strict=True)
        )
        for flag in FLAGS
        if flag in stored and flag in settings
    }


def make(flag: str, source: str) -> Any:
    """What a class or a function makes without arguments, or an object that was given in Python.

    Args:
      flag: that names it.
      source: its value.

    Raises:
      UserCodeError: names the flag, the file and, for an error in that file, its line.
    """
    given = source.value if isinstance(source, Given) else None
    if given is not None and not (inspect.isclass(given) or inspect.isroutine(given)):
        return given
    if given is None and source.startswith(OWN):
        raise UserCodeError(missing(flag, source))
    if given is None and not in_file(source):
        raise UserCodeError(f"--{flag}={source} must be a file and a name, file.py:name")
    place = source.rpartition(":")[0]
    # Where a name is too long, `Path.is_file` raises.
    if given is None and not os.path.isfile(place):
        raise UserCodeError(f"--{flag}={source}: there is no file {place}")
    try:
        return (given or workers.load(source))()
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"--{flag}={source}: {workers.describe(error)}") from error


def require_not_imported() -> None:
    """Raises ConfigError where a file that a run reads would itself begin a run."""
    if workers.LOADING:
        raise ConfigError(
            f"{workers.LOADING[-1]} trains when it is imported, as it is here for what it defines: "
            'put that below `if __name__ == "__main__":`'
        )


def network(flag: str, source: str) -> Any:
    """Makes the network that `--policy` or `--critic` names.

    Raises:
      UserCodeError: the network is not a module, see `variables.require_module`.
    """
    try:
        made = make(flag, source)
        variables.require_module(f"--{flag}={source}", made)
    except (ConfigError, UserCodeError) as error:
        called = isinstance(error.__cause__, TypeError)
        raise UserCodeError(f"{error}{f'; {variables.ADVICE}' * called}") from error
    return made
