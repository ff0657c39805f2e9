"""Rules of the architecture that a test can hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import isostep

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "isostep").rglob("*.py"))
WITHOUT_TORCH = ("", ".units", ".errors", ".cli", ".grouping", ".layout", ".ledger", ".explain.replicas",
                 ".explain.tokens", ".explain.batch", ".explain.draw", ".config", ".learning_rate", ".quality",
                 ".ledger.sheet", ".report.text", ".report.progress", ".report.track", ".audit.verdict", ".audit.text",
                 ".audit.symptoms", ".explain.pipeline", ".explain.draw_pipeline", ".schedule.search",
                 ".schedule.simulate", ".schedule.validate", ".schedule.csv_file", ".schedule.gantt_text",
                 ".schedule.gantt_svg", ".schedule.trace", ".schedule.layers_text", ".schedule.measured",
                 ".schedule.timeline_file", ".report.timeline", ".lab.app")  # fmt: skip


def _imports(path: Path) -> list[str]:
    """Every module that a file imports when it is loaded, as written; those for type checkers alone are left out."""
    tree = ast.parse(path.read_text())
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_only_one_folder_imports_torch_distributed() -> None:
    importing = {p for p in SOURCES if any(name.startswith("torch.distributed") for name in _imports(p))}
    assert importing, "the search finds nothing at all"
    assert {p.parent.name for p in importing} == {"distributed"}


def test_only_one_file_imports_the_pipeline_runtime() -> None:
    importing = {
        p.name for p in SOURCES if any(name.startswith("torch.distributed.pipelining") for name in _imports(p))
    }
    assert importing == {"pipeline.py"}


def test_reference_imports_torch_only() -> None:
    allowed = {"__future__", "collections", "dataclasses", "torch"}
    names = _imports(ROOT / "src/isostep/verification/reference.py")
    assert "torch" in names
    assert {name.split(".")[0] for name in names} <= allowed


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import isostep{module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_control_a_module_that_needs_torch_fails_without() -> None:
    code = "import sys; sys.modules['torch'] = None; import isostep.update"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30).returncode == 1


def test_public_names_are_the_ones_promised() -> None:
    assert isostep.__all__ == sorted(isostep.__all__)
    for name in isostep.__all__:
        assert getattr(isostep, name).__doc__, name
    assert callable(isostep.inspect), "the function, not the module"
    with pytest.raises(AttributeError):
        _ = isostep.no_such_name


def test_files_stay_readable() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in SOURCES}
    assert max(lengths.values()) <= 450, max(lengths, key=lambda name: lengths[name])


def test_readme_code_runs_as_it_is(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = (ROOT / "examples" / "transformers_loop.py").read_text()  # run by test_transformers.py
    assert example in blocks
    for block in blocks:
        if block == example:
            continue
        script = tmp_path / "block.py"
        script.write_text(block)
        finished = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.count("applied") == 9
