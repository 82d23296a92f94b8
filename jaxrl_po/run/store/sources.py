"""Code, files and folders that flags name: their texts and paths, and digests of the code.

A flag names code as `file.py:name`; in Python, code may also be passed as an object.
"""

import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from jaxrl_po.config import ConfigError, PythonObject, Values

# `environment` is the former name of `tools`, in runs of version 0.4.
READ = ("network.memory",)  # flags whose object is read by the settings record itself
LOSS = ("surrogate", "advantage", "optimizer")  # flags of parts of a method's loss
FLAGS = (
    *("env", "task", "reward", "policy", "critic", "actor_critic", "tools"),
    *(*LOSS, "algorithm", *READ),
)
EXPORTER = "exporter"  # flag of code without effect on numbers: no digest, read at every start
# Flags by which stored runs name code, including flags of former versions.
STORED = (*FLAGS, "environment", EXPORTER)
OWN = "python:"  # prefix of the name of an object that other processes cannot import
DIGESTS = "code"  # entry of `config.json` with the digests of the user's code, by flag
# Packages outside the user's code; a run records their versions instead.
LIBRARIES = {"jaxrl_po", "jax", "jaxlib", "numpy", "flax", "optax", "gymnax"}
LIBRARIES |= sys.stdlib_module_names
PLAIN = (bool, int, float, str)
MOST = 200_000  # maximal number of objects inside an object whose digest is computed
EMPTY = types.CellType()  # cell of a closure without a value
BUILT_IN = (
    *(functools.partial, functools.cached_property, types.MethodType),
    *(staticmethod, classmethod, property),
)
PARTS = ("func", "args", "keywords", "__func__", "__self__", "fget")  # attributes of BUILT_IN
DATA = ("task.train", "task.test", "demonstrations")
PATHS = ("init_from", "teacher", *DATA)


def name_object(flag: str, value: Any) -> str:
    """Returns the flag value that stands for a Python object: `file.py:name` or `python:name`.

    The name of a reward that its worker process can import is returned as a plain `str`; the name
    of any other object is returned as a `PythonObject`.

    Raises:
      ConfigError: The flag needs an importable object, but the object cannot be imported.

    Example:
      >>> name_object("env", lambda: None), name_object("env", lambda: None).value is None
      ('python:lambda', False)
    """
    listed = type(value) in (list, tuple)
    scorers = [x for x in (value if listed else [value]) if hasattr(x, "score_batch")]
    if flag == "reward" and any(listed or isinstance(x, type) for x in scorers):
        raise ConfigError(flag, f"must be one object or functions, got {value!r}")
    if flag == "reward" and listed:
        if len(value) > 1 and any(isinstance(x, str) and x.startswith("regex:") for x in value):
            raise ConfigError(flag, f"regex:PATTERN must stand alone, got it in {value!r}")
        each = [_absolute(x) if isinstance(x, str) else name_object(flag, x) for x in value]
        text = ",".join(each)
        held = any(isinstance(x, PythonObject) for x in each)
        return PythonObject.of(text, each) if held else text
    name = getattr(value, "__name__", type(value).__name__)
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None) or ""
    importable = file.endswith(".py") and vars(module).get(name) is value
    text = f"{os.path.abspath(file)}:{name}" if importable else OWN + name.strip("<>")
    # A worker that imported the main script would run the script a second time.
    if importable and module is not sys.modules["__main__"] and flag in ("reward", "tools"):
        inside = getattr(module, "__package__", "")
        return f"{value.__module__}:{name}" if inside and flag == "reward" else text
    if flag == "tools" or (flag == "reward" and not (scorers or callable(value))):
        raise ConfigError(flag, f"must be a function or class that can be imported, got {value!r}")
    return PythonObject.of(text, value)


def list_parts(source: str) -> list[str]:
    """Returns the entries of a flag that may list several: names, or `PythonObject`s."""
    if isinstance(source, PythonObject):
        listed = type(source.value) is list and all(isinstance(x, str) for x in source.value)
        return source.value if listed else [source]
    return source.split(",")


def missing(flag: str, source: str) -> str:
    """Returns the message that a stored run needs an object which was passed in Python."""
    return (
        f"{source} was given in Python and cannot be imported: give it again, as in "
        f"run.load(folder, {flag}=…) or run.resume(folder, {flag}=…)"
    )


def is_source(name: str) -> bool:
    """Returns whether the name in a flag stands for the user's code.

    Example:
      >>> is_source("my_env.py:Corridor"), is_source("python:Maze"), is_source("CartPole-v1")
      (True, True, False)
    """
    return in_file(name) or name.startswith(OWN)


def in_file(name: str) -> bool:
    """Returns whether a name has the form `file.py:name`."""
    return ".py:" in name


def split_source(source: str) -> tuple[str, str]:
    """Splits the name of code into its file or module, and the name inside that file or module.

    A leading `gymnasium:` is dropped, since the class itself tells whether it is gymnasium's.

    Example:
      >>> split_source("my_envs.py:suite:Corridor"), split_source("package.module:score")
      (('my_envs.py', 'suite:Corridor'), ('package.module', 'score'))
      >>> split_source("gymnasium:my_envs.py:Corridor")
      ('my_envs.py', 'Corridor')
    """
    source = source.removeprefix("gymnasium:")
    place, _, name = source.rpartition(".py:" if in_file(source) else ":")
    return place + ".py" * in_file(source), name


def absolute(settings: Values) -> dict[str, str]:
    """Returns the flags among `settings` that name files or folders to read, as absolute paths.

    A run stores absolute paths because it may be resumed or evaluated from another folder.

    Example:
      >>> absolute({"env": "/home/me/../us/my_env.py:Corridor", "task": "addition"})
      {'env': '/home/us/my_env.py:Corridor'}
    """
    paths = {name: os.path.abspath(settings[name]) for name in PATHS if settings.get(name)}
    return paths | {
        name: ",".join(map(_absolute, settings[name].split(",")))
        for name in (*FLAGS, EXPORTER)
        if in_file(settings.get(name, "")) and not isinstance(settings[name], PythonObject)
    }


def _absolute(source: str) -> str:
    if not in_file(source):
        return source
    place, name = split_source(source)
    return f"{os.path.abspath(place)}:{name}"


def short(name: str) -> str:
    """Returns a name for titles: `file.py:name` without the folder of the file.

    Example:
      >>> short("/home/me/my_env.py:Corridor"), short("CartPole-v1")
      ('my_env.py:Corridor', 'CartPole-v1')
    """
    return Path(name).name if in_file(name) else name


def files(settings: Values) -> list[str]:
    """Returns the files of code and of data that the flags among `settings` name.

    Example:
      >>> files({"reward": "mine.py:nearly,package.module:other", "task.train": "rows.jsonl"})
      ['mine.py', 'rows.jsonl']
    """
    named = [source for name in FLAGS for source in settings.get(name, "").split(",")]
    code = [split_source(source)[0] for source in named if in_file(source)]
    return code + [settings[name] for name in DATA if settings.get(name)]


def digests(settings: Values) -> dict[str, str]:
    """Returns `digest:name` of each flag's code, independent of the location of the file.

    A Python object whose source cannot be read keeps the name `python:name`.
    """
    named = {name: settings.get(name, "") for name in FLAGS}
    return {
        name: ",".join(_digest(part, values=name in LOSS) for part in list_parts(source))
        for name, source in named.items()
        if is_source(source) or (name == "reward" and ":" in source)
    }


def _digest(source: str, *, values: bool = False) -> str:
    place, name = split_source(source)
    if isinstance(source, PythonObject) and not in_file(source):
        try:
            texts = repr(sorted(_texts(source.value, values=values)))
        except Exception:  # the source is unreadable, or reading an attribute raises an error
            return source
        return f"{hashlib.sha256(texts.encode()).hexdigest()[:16]}:{name}"
    if not in_file(source):  # a reward may name a module, which only its worker process imports
        package, *inner = place.split(".")
        spec = importlib.util.find_spec(package) if package else None
        folders = (spec and spec.submodule_search_locations) or [""]
        place = os.path.join(folders[0], *inner) + ".py" if inner else (spec and spec.origin) or ""
    return f"{digest_file(place)}:{name}" if os.path.isfile(place) else source


def _texts(value: object, *, values: bool = False) -> set[str]:
    """Returns the source of all functions that an object consists of, except in `LIBRARIES`.

    The functions come from the methods of the object's class and bases, from the object's
    attributes, and from the functions, classes, numbers and texts that a function refers to by
    name.

    Args:
      value: Object of the user.
      values: Whether to add the numbers and texts that closures, attributes and containers hold.

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
        seen[id(each)] = each  # a reference to the object, so that no new object gets the same id
        own = not _is_library(getattr(each, "__module__", None) or type(each).__module__)
        members: dict[str, Any] = {}
        if isinstance(each, types.FunctionType):
            texts.add(_text(each) if own else "")
            named = {x: each.__globals__.get(x) for x in _globals(each.__code__) if own}
            members = {x: y for x, y in named.items() if callable(y) or isinstance(y, PLAIN)}
            cells = zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
            held = {x: cell.cell_contents for x, cell in cells if cell != EMPTY}
            members |= held if values else {}
            pending += held.values()
        elif isinstance(each, type):
            members = dict(vars(each)) if own else {}
            pending += each.__bases__
        else:
            pending += [type(each), *_inside(each)]
        attributes = {} if isinstance(each, type) else getattr(each, "__dict__", {})
        pending += [*members.values(), *attributes.values()]
        members |= attributes | _by_name(each) if values else {}
        plain = (x for x in members if x[:2] != "__" and isinstance(members[x], PLAIN))
        texts |= {f"{x}={members[x]!r}" for x in plain}
    return texts - {""}


@functools.cache
def _is_library(module: str) -> bool:
    """Returns whether a module belongs to this library, `LIBRARIES` or an installed package."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in LIBRARIES or "site-packages" in file or "dist-packages" in file


def _by_name(value: object) -> dict[str, Any]:
    """Returns the items of a container, or the arguments that a partial holds, by name."""
    if isinstance(value, functools.partial):
        return _by_name(value.args) | value.keywords
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    return {str(i): each for i, each in enumerate(value)} if isinstance(value, list | tuple) else {}


def _inside(value: object) -> Iterable[object]:
    """Returns the parts of a container, method, property, partial or wrapped function."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    names = PARTS if isinstance(value, BUILT_IN) else ()
    inside = [getattr(value, name, None) for name in names]
    return *inside, inspect.getattr_static(value, "__wrapped__", None)


def _globals(code: types.CodeType) -> set[str]:
    """Returns the names of the globals that a code object and the functions inside it read."""
    inside = [_globals(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    read = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return read.union(*inside)


def _text(function: types.FunctionType) -> str:
    """Returns the source of a function; for a lambda, without the rest of the lambda's line."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError:
        if function.__name__ in vars(object):  # a method that a dataclass generated, for example
            return ""
        raise
    _, found, body = text.partition(function.__name__.strip("<>"))
    if found != "lambda":
        return text
    code = function.__code__  # its bytes distinguish two lambdas in one line
    constants = [x for x in code.co_consts if not isinstance(x, types.CodeType)]
    return f"{found}{body.rstrip('),' + chr(10))} {constants} {code.co_code.hex()}"


def digest_file(path: str) -> str:
    """Returns a digest of a file's content."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def located(settings: Values, code: Mapping[str, str], before: str, run: Path) -> dict[str, str]:
    """Returns the flags of a stored run that name files or folders, with their current paths.

    A path is first resolved relative to the run's folder, as at the start of the run, then as the
    stored absolute path. The first existing path is returned; for code, a path to a file with the
    stored digest is preferred. If no path exists, the first candidate is returned.

    Args:
      settings: Stored settings, by flag name.
      code: Result of `digests` when the run started.
      before: Path of the run's folder when the settings were stored: absolute, or relative in runs
        of former versions, or empty.
      run: Current folder of the run.

    Raises:
      ValueError: A flag names more or fewer files than its stored digests.
    """

    def now(stored: str, fits: Callable[[str], bool] = os.path.exists) -> str:
        # Former versions stored relative paths, which may start at any folder above the file.
        bases = (os.path.join(above, before) for above in Path(stored).parents)
        moved = [os.path.normpath(run.absolute() / os.path.relpath(stored, base)) for base in bases]
        places = [*moved, stored] if os.path.isabs(before) else [stored, *reversed(moved)]
        return next(chain(filter(fits, places), filter(os.path.exists, places), places))

    def of_code(source: str, digest: str) -> str:
        if not in_file(source):
            return source
        place, name = split_source(source)
        return f"{now(place, lambda path: _digest(f'{path}:{name}') == digest)}:{name}"

    found = {name: now(settings[name]) for name in PATHS if settings.get(name)}
    code = {EXPORTER: "," * settings.get(EXPORTER, "").count(","), **code}
    for name in (name for name in STORED if name in code and name in settings):
        pairs = zip(settings[name].split(","), code[name].split(","), strict=True)
        found[name] = ",".join(of_code(*pair) for pair in pairs)
    return found
