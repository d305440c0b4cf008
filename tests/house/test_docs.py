"""README, docs/ and examples/ against the code: the places, commands, settings and metrics they name."""

import json
import os
import re
import shlex
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import build
from algorithms import ALGORITHMS, Settings
from config import dashed, parse_config, parse_settings
from examples import sft
from placement import make_placement
from reproduce.simulation import plans
from tests import ROOT
from tests.house.test_size import PRODUCT
from tests.support.patience import run_process
from training import model

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
SLURM = ROOT / "examples" / "slurm.sh"  # starts several commands
SCRIPTS = sorted({*ROOT.glob("examples/*.sh")} - {SLURM})
ROOMS = (
    "reproduce/bench",
    "reproduce/papers",
    "reproduce/simulation",
    "extras",
    "tests/root",
    "tests/runs",
)
PROGRAMS = [path for room in ROOMS for path in ROOT.glob(f"{room}/*.py")]
SFT = "examples/sft.py"
KINDS = "train|critic|reward|environment|rollout|genrm|eval|perf|time|occupancy|split|sft"
FLAG = r'add_argument\(\s*"(--[a-z-]+)"'
# flags of torchrun, sbatch, docker run
OF_OTHERS = {"--nnodes", "--nproc-per-node", "--max-restarts", "--local-addr", "--rdzv-backend"}
OF_OTHERS |= {"--rdzv-endpoint", "--rdzv-conf", "--help", "--nodes", "--shm-size"}
OF_OTHERS |= {"--signals-to-handle", "--numa-binding", "--show"}
NO_SETTINGS = {"--config"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def defines(path: Path, name: str) -> bool:
    """Return True if a file defines this function, class, constant or field; for Class.name, both."""
    forms = [rf"^ *((async )?def|class) {part}\b|^ *{part}(:| =)" for part in name.split(".")]
    return all(re.search(form, path.read_text(), re.MULTILINE) for form in forms)


def places_in(text: str) -> list[tuple[str, str]]:
    """Return (file, name) of all places in a text: `name` in f.py, `name` (f.py), or `f.py: name`."""
    after = [(path, name) for name, path in re.findall(r"`([\w.]+)` (?:in |\()([\w/]+\.py)", text)]
    return after + re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_place_exists(page):
    for path, name in places_in(" ".join(page.read_text().split())):
        assert (ROOT / path).is_file(), path
        assert defines(ROOT / path, name), f"{path} has no {name}"


def test_the_loop_in_readme_is_the_code():
    (block,) = re.findall(r"```python\n(async def loop.*?)```", README.read_text(), re.DOTALL)
    assert block.rstrip() in (ROOT / "controller.py").read_text().split("\n\n\n")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_resolves(page):
    targets = re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text())
    for target in targets:
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), path
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]
            assert anchor in anchors


def commands_in(page: Path) -> list[list[str]]:
    """Return the words of each command line of a page, without comments and without what follows `&`."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    starts = [line for line in lines if re.match(r"    (\w+=\w+ )?\S*(torchrun|python) ", line)]
    return [shlex.split(line.split("#")[0].split("&")[0]) for line in starts]


def check_run(words: list[str]) -> None:
    """Check that run.py or sft.py accepts the arguments, and that they fit the number of ranks."""
    given = dict(pairwise(words))
    ranks = int(given.get("--nnodes", 1)) * int(given.get("--nproc-per-node", 1))
    if SFT in words:
        arguments = words[words.index(SFT) + 1 :]
        make_placement(
            parse_settings(sft.SftConfig, arguments, "", sft.GROUPS, sft.DEFAULTS), ranks
        )
        return
    arguments = words[words.index("run.py") + 1 :]
    if "--simulate" in arguments:
        parser = plans.parser_of_words()
        ranks = int(words[0].removeprefix("WORLD_SIZE="))
        _, arguments = parser.parse_known_args(arguments)
    config = parse_config(arguments[1:] if arguments[:1] == ["check"] else arguments)
    if words[0].endswith("torchrun"):
        build.check_settings(config, ranks)
        if Path(config.model).is_dir():  # the demo's
            model.check_sizes(model.read_hf_config(config.model), config)


def check_program(words: list[str]) -> None:
    """Check that another command's file exists and has each flag; for pytest, that the tests exist."""
    if "pytest" in words:
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
        return
    (name,) = [word for word in words if word.endswith(".py")] or [words[words.index("-m") + 1]]
    path = ROOT / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
    flags = [word for word in words[words.index(name) :] if word.startswith("--")]
    if path.parent.name == "papers" and path.is_file():
        path = ROOT / "reproduce/papers/tables.py"
    if path.parent != ROOT / "examples":  # those use run.py's flags
        assert set(flags) <= flags_of(path), words


def flags_of(program: Path) -> set[str]:
    """Return a program's flags: those that it adds, and the numbers that bench's parser_of makes flags of."""
    text = program.read_text()
    numbers = re.findall(r"(\w+)=\d", "".join(re.findall(r"parser_of\(.*\)", text)))
    return {*re.findall(FLAG, text)} | {f"--{dashed(name)}" for name in numbers}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_understood(page):
    for words in commands_in(page):
        check_run(words) if {"run.py", SFT} & {*words} else check_program(words)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_every_script_is_understood(script):
    (line,) = re.findall(r'^exec (.*) "\$@"$', script.read_text(), re.MULTILINE)
    check_run(shlex.split(line))
    assert script.stat().st_mode & 0o111, "it can't be executed"


STAND_INS = {
    # without its own flag
    "srun": """for SLURM_NODEID in 0 1; do export SLURM_NODEID; "${@:2}"; done""",
    "scontrol": """[ "$*" = "show hostnames node[7-8]" ] && printf 'node7\nnode8\n'""",
    "hostname": """echo 192.0.2.$SLURM_NODEID 10.1.0.$SLURM_NODEID fd00::$SLURM_NODEID""",
    "torchrun": f"""{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" """,
}
JOB = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "5", "SLURM_NNODES": "2"}
JOB |= {"MODEL": "a b", "JUDGE": "j", "DATA": "d"}


@pytest.mark.parametrize("network,addresses", [("10.1.", "10.1.0."), ("", "192.0.2.")])
def test_slurm_starts_torchrun_on_each_machine(tmp_path, network, addresses):
    """It must pass the machine's own address twice, the first machine's name, and run.py's arguments."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, does in STAND_INS.items():
        path = tmp_path / ".venv" / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(0o755)
    env = os.environ | JOB | {"SLURM_SUBMIT_DIR": str(tmp_path), "NETWORK": network}
    lines = run_process(SLURM, "--steps", 3, env=env).stdout.splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines):
        launch, _, arguments = line.partition('"run.py", ')
        given = get_args_parser().parse_args([*json.loads(f'{launch}"run.py"]')])
        config = parse_config(json.loads(f"[{arguments}"))
        found = (given.nnodes, given.nproc_per_node, given.rdzv_endpoint, given.rdzv_backend)
        assert (*found, given.rdzv_id) == ("2", "8", "node7:29400", "c10d", "5")
        assert given.local_addr == config.host == f"{addresses}{number}"
        assert (config.model, config.steps, config.preset) == ("a b", 3, "cuda")
        build.check_settings(config, 16, 8)


def test_every_flag_that_is_named_exists():
    known = {f"--{dashed(field.name)}" for field in fields(sft.SftConfig)} | OF_OTHERS | NO_SETTINGS
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    for program in PROGRAMS:
        known |= flags_of(program)
    for page in PAGES:
        assert not set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", prose(page))) - known, page.name


def test_the_tables_of_algorithms_are_whole():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| *([^|]*?) *\|", page, re.MULTILINE)
    cells = dict(reversed(rows))  # a later table may name a setting again
    assert ALGORITHMS.keys() <= cells.keys()
    for field in fields(Settings):
        default, *others = cells[field.name].split("; ")
        assert type(field.default)(default) == field.default, field.name
        for name, value in map(str.split, others):
            assert vars(ALGORITHMS[name])[field.name] == float(value), field.name


def test_every_metric_that_a_page_names_is_made():
    """A part of its name must appear in the code that makes it: `loss` of `train/loss`."""
    code = "".join(path.read_text() for path in (*PRODUCT, ROOT / SFT))
    for page in PAGES:
        for name in re.findall(rf"`(?:{KINDS})/([a-z0-9_]+)`", page.read_text()):
            assert name.removeprefix("held_out_").removesuffix("_s") in code, f"{page.name}: {name}"
