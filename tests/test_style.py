"""A name of the package has one meaning."""

import ast
from collections import defaultdict
from pathlib import Path

import jaxrl_po

PACKAGE = Path(jaxrl_po.__file__).parent
# Names that several modules define, since each module keeps the same contract under that name.
METHOD = "a method's hyperparameters and constructor, or a family's or suite's, as `ppo.make`"
PROBLEM = "control, tasks, dialogues and demonstrations are problems with the same factory"
ANSWERS = "a task and a dialogue are evaluated and shown by functions of the same names"
PARTS = "parts that a method's `make` joins, one of each per family of methods"
DOMAIN = "functions of `settings.Domain`, which both training commands have"
FILES = "a module about one format of files reads and writes it, as `gguf.read`"
AGREED = {
    **dict.fromkeys(("Config", "make"), METHOD),
    **dict.fromkeys(("make_problem", "make_evaluate"), PROBLEM),
    **dict.fromkeys(("make_describe", "measure", "render"), ANSWERS),
    **dict.fromkeys(("make_estimate", "make_loss"), PARTS),
    **dict.fromkeys(("build", "initial_model", "open_world", "require_known"), DOMAIN),
    **dict.fromkeys(("rows", "sections", "steps", "title"), DOMAIN),
    **dict.fromkeys(("read", "write"), FILES),
    "load": "`run.load` and `pretrained.load` read a folder, `user_code.load` a user's object",
    "main": "each command and each worker is started by its `main`",
    "names": "each adapter lists the environments of its suite",
    "policy_gradient": "`surrogates.policy_gradient` is the loss of that name, of samples",
    "serve": "each module that `workers.spawn` starts answers requests in `serve`",
}


def homes():
    """Returns `name -> modules` of public classes and module-level functions of the package.

    Nested classes count, methods and nested functions do not.
    """
    found = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for node in classes + functions:
            if not node.name.startswith("_"):
                found[node.name].add(module)
    return found


def test_a_name_has_one_meaning():
    several = {name: sorted(modules) for name, modules in homes().items() if len(modules) > 1}
    assert {name: several[name] for name in several if name not in AGREED} == {}


def test_agreed_names_are_those_of_several_modules():
    found = homes()
    assert [name for name in AGREED if len(found[name]) < 2] == []
