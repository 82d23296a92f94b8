"""Hook of mkdocs: equations as MathML, which needs no script, and notebooks as pages."""

import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BLOCK = re.compile(r"^```math\n(.*?)^```$|^\$\$(.*?)\$\$$", re.M | re.S)
INLINE = re.compile(r"(?<![\w$\\])\$([^$\n]+)\$(?![\w$])")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.M | re.S)
# Note for readers of the repository, which the site leaves out.
REPOSITORY = re.compile(r"^> In the repository .*?\n\n", re.M | re.S)
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        content = "\n\n".join(map(_cell, json.loads(path.read_text(encoding="utf-8"))["cells"]))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def _cell(cell: dict[str, Any]) -> str:
    """Returns a cell in Markdown, with its output and pictures."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"]).replace("\n", "")
            parts.append(f'<img alt="output" src="data:image/png;base64,{image}">')
        elif text := "".join(output.get("text", data.get("text/plain", ""))):
            parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces equations: fences of `math`, and in notebooks `$$…$$` and `$…$`."""
    markdown = REPOSITORY.sub("", markdown)
    markdown = BLOCK.sub(lambda found: _block(found[1] or found[2]), markdown)
    parts = CODE.split(markdown)  # code at odd indices
    parts[::2] = [INLINE.sub(_inline, part) for part in parts[::2]]
    return "".join(parts)


def _block(latex: str) -> str:
    return f'<div class="equation">{mathml(latex.strip(), display="block")}</div>'


def _inline(found: re.Match[str]) -> str:
    return f"<span>{mathml(found[1])}</span>"  # a line that begins with <math would be a paragraph


def mathml(latex: str, **how: str) -> str:
    """Returns an equation as MathML; raises ValueError on an unknown command."""
    found = convert(latex.replace("{aligned}", "{align*}"), **how)
    if re.search(r"&amp;|&#x00026;|\\\\|&#x0005C;", found):
        raise ValueError(f"not understood: {latex}")
    return found
