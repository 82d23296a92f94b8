"""Counts habits that make prose hard to read: `python tests/prose.py jaxrl_po` lists each place.

Prose consists of docstrings, comments and the help texts of fields. A reader meets a sentence
alone, in `grep`, `help()` or `--help`; each of the habits points to a word elsewhere. The test file
`test_prose.py` holds the limits of the habits.
"""

import ast
import io
import re
import sys
import tokenize

from size import FUNCTION, ROOT, listed

PHRASES = {  # rates are per 1,000 words
    "that of": re.compile(r"\b(that|those|the ones?) of\b", re.I),
    "what": re.compile(r"\bwhat\b", re.I),
    "likewise": re.compile(r"\b(likewise|as for|the same of)\b", re.I),
    "is no": re.compile(
        r"(?i)\b((is|are) no|there (is|are) (none|not)|that there (is|are)"
        r"|(of|in|by|with|from|over|to) (which|whom))\b"
    ),
}
# Shares of the entries under Args and Attributes, and of the functions with a docstring.
ENTRY, SUMMARY = "entry without a noun", "summary without a verb"
BARE = re.compile(r"(of|likewise|as|see|whether it)\b", re.I)
VERBLESS = re.compile(r"(What|Whether|How|Where|That|Of|With|By)\b")


def texts(source):
    """Yields `(kind, line number, text)` for the prose in a module; functions have the kind "f"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and ast.get_docstring(node):
            text = re.sub(r">>>.*|^ *\.\.\..*$", "", ast.get_docstring(node), flags=re.M)
            yield "f" if isinstance(node, FUNCTION) else "", node.body[0].lineno, text
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("static", "number")):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and " " in str(part.value):
                    yield "", part.lineno, str(part.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and " " in token.string[2:]:
            yield "", token.start[0], token.string[1:]


def habits(kind, text):
    """Yields `(habit, row, occurs)` for each phrase that occurs, for each entry, and for the
    summary."""
    inside = False
    for row, line in enumerate(text.splitlines()):
        yield from ((name, row, True) for name, p in PHRASES.items() for _ in p.findall(line))
        if header := re.fullmatch(r"([A-Z]\w+):", line.strip()):
            inside = header[1] in ("Args", "Attributes")
        elif inside and (entry := re.match(r" +[\w, *`.\[\]]+: +(.*)", line)):
            yield ENTRY, row, bool(BARE.match(entry[1]))
    if kind == "f":
        yield SUMMARY, 0, bool(VERBLESS.match(text))


def measure(sources):
    """Returns `{habit: rate}` over `{file: text}` of several modules, and the places of all
    habits."""
    words, seen, places = 0, [], []
    for file, source in sources.items():
        for kind, start, text in texts(source):
            words += len(re.findall(r"[A-Za-z]{2,}", text))
            for name, row, occurs in habits(kind, text):
                seen.append((name, occurs))
                if occurs:
                    places.append(f"{file}:{start + row}: {name}: {text.splitlines()[row].strip()}")
    of = dict.fromkeys(PHRASES, words / 1000)
    of |= {name: len([x for x, _ in seen if x == name]) for name in (ENTRY, SUMMARY)}
    return {name: seen.count((name, True)) / (of[name] or 1) for name in of}, places


def read(folder):
    """Returns `{file: text}` for the modules in a folder of the repository."""
    return {file: (ROOT / file).read_text(encoding="utf-8") for file in listed(f"{folder}/**/*.py")}


if __name__ == "__main__":
    rates, places = measure(read(sys.argv[1]))
    print(*places, *(f"{name:24} {rate:.2f}" for name, rate in rates.items()), sep="\n")
