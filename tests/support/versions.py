"""The decoding tests on several versions of transformers, each beside this environment's other packages: a table.

python tests/support/versions.py 5.23.0 5.24.0 [--tests tests/exactness ...]
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path


TESTS = ("tests/exactness", "tests/modeling", "tests/lilicorr_hf/test_bench.py")


def install(version: str, folder: Path) -> Path:
    """A folder with that version and what it needs, made on first use."""
    path = folder / version
    if not (path / ".complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", path, f"transformers=={version}"]
        subprocess.run(command, check=True)
        (path / ".complete").touch()
    return path


def run(path: Path, tests: list[str]) -> tuple[str, str]:
    """Pytest's last line and the first reason for a failure."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]
    settings = os.environ | {"PYTHONPATH": str(path.absolute())}
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    reasons = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    return lines[-1], reasons[0] if reasons else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path(".venv-versions"))
    parser.add_argument("--tests", nargs="+", default=TESTS)
    args = parser.parse_args()
    sys.stdout.write("| transformers | outcome | first reason |\n| --- | --- | --- |\n")
    for version in args.versions:
        outcome, reason = run(install(version, args.folder), args.tests)
        sys.stdout.write(f"| {version} | {outcome.strip('= ')} | {reason.strip()[:160]} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
