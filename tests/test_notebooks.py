import os
from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REAL = "07_a_real_model"  # a notebook whose published model is replaced by a tiny model


@pytest.mark.slow
@pytest.mark.timeout(600)  # a separate process compiles dozens of programs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, monkeypatch, tmp_path):
    """Every cell runs within 240 s, in a kernel at the root of the repository."""
    if path.stem == REAL:
        import ggufs

        ggufs.write_folder(tmp_path / "model", "qwen2", "qwen2")
        ggufs.write(tmp_path / "model.gguf", tmp_path / "model", "qwen2")
        monkeypatch.setenv("MODEL", str(tmp_path / "model.gguf"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    )
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    printed = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in printed if output.get("name") == "stderr"], "a cell warned"
    assert any("image/png" in output.get("data", {}) for output in printed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_small_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 600_000
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count is None
            kinds = {output.output_type for output in cell.outputs}
            assert kinds <= {"stream", "display_data", "execute_result"}
