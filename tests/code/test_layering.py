"""The code about itself: who may import whom, what stays free of torch, and how long things may get."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "moestro"
ORDER = (
    ("errors", "settings", "logs"),
    ("spec",),
    ("text",),
    ("quant",),
    ("checkpoint",),
    ("kernels",),
    ("dist",),
    ("layers",),
    ("kv",),
    ("moe",),
    ("model",),
    ("engine",),
    ("observe",),
    ("plan",),
    ("tune",),
    ("bench",),
    ("server",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
WITHOUT_TORCH = (
    "spec",
    "moe/cache.py",
    "moe/placement.py",
    "kv/pages.py",
    "kv/prefix.py",
    "engine/scheduler.py",
    "cli/main.py",
)
FILES = sorted(SRC.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_left(path: Path) -> None:
    package = path.relative_to(SRC).parts[0].removesuffix(".py")
    if package in ("__init__", "__main__"):
        return
    assert package in RANK, f"{package} has no place in the order"
    for name in imports(path):
        if name.startswith("moestro."):
            imported = name.split(".")[1]
            if name != "moestro.__version__":
                assert imported in RANK, f"{path.relative_to(SRC)} imports {name} through the package's front door"
                assert RANK[imported] <= RANK[package], f"{path.relative_to(SRC)} imports {name}"


def closure(start: Path) -> set[str]:
    """Third-party and own modules that are loaded with a file, following top-level imports of our own."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        path = todo.pop()
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in seen:
                    continue
                seen.add(name)
                if name.startswith("moestro"):
                    base = SRC.parent.joinpath(*name.split("."))
                    todo += [p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()]
    return seen


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_is_pure_stays_free_of_torch(name: str) -> None:
    target = SRC / name
    files = sorted(target.rglob("*.py")) if target.is_dir() else [target] if target.exists() else []
    for path in files:
        assert not {m for m in closure(path) if m.split(".")[0] in ("torch", "numba", "numpy")}, path


def test_only_settings_reads_the_environment() -> None:
    for path in FILES:
        if path.name != "settings.py":
            text = path.read_text()
            assert "os.environ" not in text, path
            assert "getenv" not in text, path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_gets_too_long(path: Path) -> None:
    text = path.read_text()
    limit = 150 if path.relative_to(SRC).parts[0] == "cli" else 500
    assert len(text.splitlines()) <= limit
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= (150 if "kernels" in path.parts else 80), f"{node.name} has {length} lines"


def test_public_names_exist() -> None:
    import moestro

    for name in moestro.__all__:
        assert getattr(moestro, name) is not None
    assert set(moestro._HOMES) | {"__version__"} == set(moestro.__all__)


def test_version_is_the_changelogs() -> None:
    import moestro

    assert f'version = "{moestro.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {moestro.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_help_starts_without_torch() -> None:
    script = (
        "import sys; sys.argv = ['moestro', '--help']\n"
        "from moestro.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numba', 'fastapi', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_the_commands_of_the_readme_are_the_scripts() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("scripts/run", "scripts/test"):
        assert name in readme
        assert (ROOT / name).stat().st_mode & 0o111, f"{name} is not executable"


def test_the_options_page_is_current() -> None:
    from moestro.cli.reference import options_page

    assert (ROOT / "docs" / "options.md").read_text() == options_page(), (
        "run: python -m moestro.cli.reference > docs/options.md"
    )
