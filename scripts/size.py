"""How large the code is: `python scripts/size.py [FOLDER]` prints lines, files, functions and branches."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.BoolOp, ast.comprehension, ast.Assert, ast.match_case)


def functions(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Name, lines, branches and arguments of each function in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            branches = sum(isinstance(inner, BRANCHES) for inner in ast.walk(node))
            arguments = len(node.args.args) + len(node.args.kwonlyargs)
            yield f"{path.stem}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, branches, arguments


def spread(values: Sequence[int]) -> str:
    """Median, 90th percentile and largest."""
    ordered = sorted(values)
    return f"{statistics.median(ordered):g} / {ordered[int(0.9 * (len(ordered) - 1))]} / {ordered[-1]}"


def main(folder: Path) -> None:
    files = sorted(folder.rglob("*.py"))
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    found = [function for path in files for function in functions(path)]
    print(f"{folder}: {sum(sizes):,} lines in {len(files)} files, {len(found)} functions (median / 90th percentile / largest)")
    print(f"lines of a file      {spread(sizes)}")
    print(f"lines of a function  {spread([lines for _, lines, _, _ in found])}")
    print(f"branches             {spread([branches for _, _, branches, _ in found])}")
    print("most branches        " + ", ".join(f"{n} {b}" for n, _, b, _ in sorted(found, key=lambda f: -f[2])[:10]))
    print("most lines           " + ", ".join(f"{n} {size}" for n, size, _, _ in sorted(found, key=lambda f: -f[1])[:10]))
    print("most arguments       " + ", ".join(f"{n} {a}" for n, _, _, a in sorted(found, key=lambda f: -f[3])[:10]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src")
