"""The reader's budget: files, functions, rooms and the whole; imports one way; nothing dynamic."""

import ast
import statistics
from pathlib import Path

import pytest

from config import COMMANDS, documented_settings

ROOT = Path(__file__).parent.parent
ROOMS = ("engines", "training", "scheduling", "runtime", "reporting", "commands", "demo", "cpu")
ROOMS += ("images",)
ROOT_FILES = sorted(ROOT.glob("*.py"))
PRODUCT = ROOT_FILES + sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
OUTSIDE = sorted(path for room in ("simulation", "papers") for path in (ROOT / room).rglob("*.py"))
BENCH = sorted(ROOT.glob("bench/*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CHECKED = PRODUCT + OUTSIDE + BENCH + sorted(ROOT.glob("examples/**/*.py"))
# lines of the product, its root files, what is around it
MOST_LINES, MOST_ROOT_LINES, MOST_OUTSIDE, MOST_BENCH = 12_800, 4_050, 2_051, 2_340
TEST_LINES = 1.3  # for each line of the product
MOST_WORDS = 18_000  # of docs/, without the pages that a command writes
MOST_FLAGS = 66  # of run.py rl
MOST_ROOT_FILES, MOST_COLUMNS = 13, 110
LAYERS = (  # each may import what stands below it, and its own line
    {"run", "papers"},
    {"commands", "simulation"},
    {"controller"},
    {"rollout", "rewards", "checkpoint", "demo"},
    {"genrm", "actor", "critic", "reporting"},
    {"training", "placement", "algorithms", "data"},
    {"engines", "scheduling"},
    {"runtime", "config", "sample", "cpu", "images"},
)
FLOOR = {name: len(LAYERS) - number for number, names in enumerate(LAYERS) for name in names}
MEGATRON, SGLANG = {"training", "actor", "critic", "cpu"}, {"cpu"}
DYNAMIC = ("getattr", "hasattr", "setattr", "eval", "exec")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    """The first part of a path: a room, or a root file without its ending."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def lines_of(paths: list[Path]) -> int:
    """As `ruff format` lays them out, which `make lint` sees to."""
    return sum(path.read_text().count("\n") for path in paths)


def functions_of(path: Path):
    tree = ast.parse(path.read_text())
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def only_for_types(path: Path) -> set[str]:
    """What a file imports under TYPE_CHECKING alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        asks_a_name = isinstance(node, ast.If) and isinstance(node.test, ast.Name)
        if asks_a_name and node.test.id == "TYPE_CHECKING":
            inner = [n for n in node.body if isinstance(n, ast.ImportFrom)]
            names |= {n.module for n in inner}
            names |= {f"{n.module}.{a.name}" for n in inner for a in n.names}
    return names


@pytest.mark.parametrize("path", CHECKED, ids=name_of)
def test_budget_of_a_file(path):
    """Met by leaving things out, not by golf."""
    lines = path.read_text().splitlines()
    assert len(lines) < 450
    assert not any("fmt: " in line for line in lines), "the formatter decides the layout"
    assert max(map(len, lines), default=0) <= MOST_COLUMNS
    for function in functions_of(path):
        assert function.end_lineno - function.lineno < 45, function.name


@pytest.mark.parametrize("path", PRODUCT + OUTSIDE, ids=name_of)
def test_nothing_is_dynamic_and_no_error_is_swallowed(path):
    for node in ast.walk(ast.parse(path.read_text())):
        calls_a_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if calls_a_name and room_of(path) != "cpu":
            assert node.func.id not in DYNAMIC, f"{path.name}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.walk(node.type or ast.Name("Exception"))
            names = {n.id for n in caught if isinstance(n, ast.Name)}
            assert not names & {"Exception", "BaseException"}, f"{path.name}:{node.lineno}"


def test_budget_of_the_whole():
    """A total that no test bounds grows."""
    product = lines_of(PRODUCT)
    assert len(ROOT_FILES) <= MOST_ROOT_FILES
    assert product <= MOST_LINES
    assert lines_of(ROOT_FILES) <= MOST_ROOT_LINES
    assert lines_of(OUTSIDE) <= MOST_OUTSIDE
    assert lines_of(BENCH) <= MOST_BENCH
    assert lines_of(TESTS) <= TEST_LINES * product
    lengths = [f.end_lineno - f.lineno + 1 for path in PRODUCT for f in functions_of(path)]
    assert statistics.median(lengths) <= 10


def test_budget_of_docs_and_settings():
    pages = (ROOT / "docs").glob("*.md")  # not docs/papers, which `make papers` writes
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS
    groups = documented_settings()
    assert sum(len(groups[group]) for group in COMMANDS["rl"].groups) <= MOST_FLAGS


@pytest.mark.parametrize("path", PRODUCT + OUTSIDE, ids=name_of)
def test_imports_go_one_way(path):
    """A room imports no role above it; types may be named from above where the import is for them alone."""
    for module in imports_of(path) - only_for_types(path):
        room = module.split(".")[0]
        if room in FLOOR and room != room_of(path):
            assert FLOOR[room] <= FLOOR[room_of(path)], f"{path.name} imports {module}"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_the_product_runs_without_what_is_around_it(path):
    around = {"simulation", "papers", "bench", "examples", "tests"}
    assert not {module.split(".")[0] for module in imports_of(path)} & around


def test_no_import_circles():
    """Between modules, imports for types left out."""
    files = PRODUCT + OUTSIDE
    modules = {name_of(path).removesuffix(".py").replace("/", "."): path for path in files}
    graph = {n: (imports_of(p) - only_for_types(p)) & modules.keys() for n, p in modules.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", PRODUCT + OUTSIDE, ids=name_of)
def test_only_its_rooms_import_an_engine(path):
    for module in imports_of(path):
        assert not module.startswith("megatron") or room_of(path) in MEGATRON, module
        assert not module.startswith("sglang") or room_of(path) in SGLANG, module


def test_the_loop_never_asks_for_the_mode():
    for node in ast.walk(ast.parse((ROOT / "controller.py").read_text())):
        if isinstance(node, ast.If | ast.IfExp):
            assert "mode" not in ast.unparse(node.test), f"controller.py:{node.lineno}"
