"""Who may import whom: every file is parsed and compared with the table of the architecture."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("wmrl", "tasks", "sim", "world_model", "vla", "configs")

MAY_IMPORT = {
    "wmrl": {"configs"},  # the folder of YAML, no code
    "tasks": {"wmrl"},
    "sim": {"wmrl", "tasks"},
    "world_model": {"wmrl"},
    "vla": {"wmrl", "tasks"},
    "configs": set(),
}
VLA_MAY_BUILD = {"sim", "world_model"}
VLA_COMPOSES = {
    "collect",
    "sft",
    "world_model",
    "train",
    "evaluate",
    "report",
    "demo",
    "config",
    "evaluation",
    "session",
    "videos",
    "stages",
}
"""Entry points and evaluation: files of `vla` that may build worlds and name their configs."""

THIRD_PARTY_HOME = {
    "robosuite": {"sim"},
    "mujoco": {"sim"},
    "metaworld": {"sim"},
    "gymnasium": {"sim"},
    "transformers": {"vla"},
    "sentence_transformers": {"vla"},
    "matplotlib": {"wmrl"},
    "hydra": {"wmrl"},
    "omegaconf": {"wmrl"},
}

IMPORT_TIME_EFFECTS = {
    "os.environ", "os.putenv", "os.chdir", "sys.path", "np.random.seed", "numpy.random.seed", "random.seed",
    "torch.manual_seed",
    "torch.set_num_threads", "torch.set_default_dtype", "torch.set_default_device", "logging.basicConfig", "print", "open",
    "warnings.filterwarnings", "warnings.simplefilter", "multiprocessing.set_start_method",
}  # fmt: skip


def source_files() -> list[Path]:
    """Every Python file of the shipped packages."""
    return [path for package in PACKAGES if (ROOT / package).is_dir() for path in sorted((ROOT / package).rglob("*.py"))]


FILES = source_files()
NAMES = [path.relative_to(ROOT).as_posix() for path in FILES]


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides which package is meant"
            yield node.lineno, node.module or ""


def allowed_packages(path: Path) -> set[str]:
    """Packages of ours that a file may import."""
    package = path.relative_to(ROOT).parts[0]
    allowed = MAY_IMPORT[package] | {package}
    return allowed | VLA_MAY_BUILD if package == "vla" and path.stem in VLA_COMPOSES else allowed


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_point_in_the_direction_of_the_architecture(path):
    for line, module in imported_modules(ast.parse(path.read_text())):
        top = module.split(".")[0]
        assert top not in PACKAGES or top in allowed_packages(path), f"{path.name}:{line} may not import {module}"
        assert top != "tests", f"{path.name}:{line} imports tests"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_third_party_libraries_stay_at_home(path):
    package = path.relative_to(ROOT).parts[0]
    for line, module in imported_modules(ast.parse(path.read_text())):
        top = module.split(".")[0]
        assert package in THIRD_PARTY_HOME.get(top, {package}), f"{path.name}:{line}: {top} belongs to {THIRD_PARTY_HOME[top]}"
        assert top != "lerobot" or path.name.startswith("lerobot_"), (
            f"{path.name}:{line}: lerobot only in files named lerobot_*"
        )
        assert top not in {"pickle", "dill", "cloudpickle", "joblib"}, f"{path.name}:{line}: no pickles"


def module_level_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, without those behind `if __name__ == "__main__"` or `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.ClassDef):
            yield from module_level_statements(node.body)
        elif isinstance(node, ast.If):
            if "__main__" not in ast.unparse(node.test):
                yield from module_level_statements(node.body + node.orelse)
        else:
            yield node


def import_time_effects(tree: ast.Module) -> list[str]:
    """Calls and assignments at import that change the process: `os.environ[...] = ...`, `torch.manual_seed(0)`, loops, ..."""
    found = []
    for node in module_level_statements(tree.body):
        if isinstance(node, ast.For | ast.While | ast.With):
            found.append(f"line {node.lineno}: a loop or with block at import")
        if isinstance(node, ast.Global | ast.Delete):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        for inner in ast.walk(node):
            if isinstance(inner, ast.Lambda):
                continue
            target = inner.func if isinstance(inner, ast.Call) else inner
            writes = isinstance(inner, ast.Call) or (isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store))
            text = ast.unparse(target) if writes and isinstance(target, ast.expr) else ""
            if any(text == effect or text.startswith((f"{effect}.", f"{effect}[")) for effect in IMPORT_TIME_EFFECTS):
                found.append(f"line {inner.lineno}: {text}")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_importing_does_no_work(path):
    assert import_time_effects(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['MUJOCO_GL'] = 'egl'",
        "import os\nos.environ.setdefault('A', 'b')",
        "import torch\ntorch.manual_seed(0)",
        "for i in range(3):\n    pass",
        "class A:\n    print('hello')",
        "try:\n    import os\n    os.chdir('/')\nfinally:\n    pass",
    ],
)
def test_the_check_for_import_time_work_finds(code):
    assert import_time_effects(ast.parse(code))


def test_the_check_for_import_time_work_lets_functions_and_main_be():
    code = "import os\ndef f():\n    os.environ['A'] = 'b'\nif __name__ == '__main__':\n    os.chdir('/')\nX = 3"
    assert import_time_effects(ast.parse(code)) == []


MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_function_fits_a_screen(path):
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{path.name}:{function.lineno} {function.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_the_first_line_says_what_the_file_is(path):
    assert path.read_text().startswith('"""'), f"{path.name} begins without a docstring"


def test_no_file_names_a_path_of_somebodys_machine():
    homes = ("/ho" + "me/", "/ro" + "ot/", "/Us" + "ers/", "C:" + "\\Users")
    for path in [*FILES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "configs").rglob("*.yaml"))]:
        text = path.read_text()
        assert not any(home in text for home in homes), f"{path} names a home folder"


def test_python_is_recent_enough():
    assert sys.version_info >= (3, 12)
