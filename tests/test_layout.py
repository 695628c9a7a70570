"""Who may import whom, and what travels to the Hub."""

import ast
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
# Each folder and the folders whose modules it may import at module level or inside a function.
ALLOWED = {
    "modeling": {"modeling"},
    "lilicorr_hf": {"lilicorr_hf", "modeling"},
    "training": {"training", "lilicorr_hf", "modeling"},
    "demo": {"demo", "lilicorr_hf", "modeling"},
}
FILES = [(folder, path) for folder in ALLOWED for path in sorted((ROOT / folder).glob("*.py"))]
FILES += [("lilicorr_hf", path) for path in sorted((ROOT / "lilicorr_hf" / "bench").glob("*.py"))]


def imported_folders(folder: str, path: Path) -> set[str]:
    """Top-level folders a file imports from, relative imports resolved against the installed name."""
    package = ["lilicorr_hf", *path.relative_to(ROOT).parent.parts[folder == "lilicorr_hf" :]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            names = [".".join(filter(None, [base, node.module or alias.name])) for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "lilicorr_hf":
                found.add(parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "lilicorr_hf")
    return found


@pytest.mark.parametrize("folder, path", FILES, ids=lambda value: getattr(value, "stem", value))
def test_imports_point_one_way(folder, path):
    assert imported_folders(folder, path) <= ALLOWED[folder]


@pytest.mark.parametrize("path", sorted((ROOT / "modeling").glob("*_*.py")), ids=lambda path: path.stem)
def test_remote_code_needs_nothing_but_torch_and_transformers(path):
    """The Hub copies these files flat: sibling imports of one level, and no package a user may not have."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            roots = {name.split(".")[0] for name in names}
            # Triton is optional, and its import guarded.
            known = {"torch", "transformers", "huggingface_hub", "safetensors", "triton"} | sys.stdlib_module_names
            assert roots <= known, ast.unparse(node)
