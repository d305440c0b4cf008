"""The pins: none may contradict the engines' own requirements, or the CUDA install couldn't be resolved."""

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT

LINUX = {"extra": "", "sys_platform": "linux", "platform_machine": "x86_64"}


def read(name):
    """Return name -> the requirement in a file, without options and comments."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = map(Requirement, [line for line in lines if line and not line.startswith("-")])
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in found}


def exact(specifier):
    """Return the one version that a specifier allows, None if it allows several."""
    pins = [part.version for part in specifier if part.operator == "=="]
    return pins[0] if pins else None


@pytest.mark.parametrize("package", ["sglang", "megatron-core"])
def test_no_pin_contradicts_an_engines_own(package):
    """Our pin must be one that the package allows; its own pin must be in our range."""
    ours, compared = read("requirements.txt"), 0
    for needed in map(Requirement, requires(package)):
        name = canonicalize_name(needed.name)
        if name not in ours or (needed.marker and not needed.marker.evaluate(LINUX)):
            continue
        compared += 1
        wrong = f"{name}{ours[name]}, but {package} asks for {needed}"
        if version := exact(ours[name]):
            assert needed.specifier.contains(version), wrong
        elif version := exact(needed.specifier):
            assert ours[name].contains(version), wrong
    assert compared >= 2


def test_the_install_without_cuda_is_within_the_pins():
    """It must add to them, and narrow ranges: sglang's own torch has no build without CUDA."""
    ours, cpu = read("requirements.txt"), read("cpu/requirements.txt")
    both = ours.keys() & cpu.keys()
    compiler = {name for name in ours if name.startswith("nvidia-")}
    assert len(compiler) == len({ours[name] for name in compiler}) + 3  # four of one version
    assert both == ours.keys() - {"sglang", "torch-memory-saver", *compiler}
    for name in both:
        assert exact(cpu[name]) is None or ours[name].contains(exact(cpu[name])), name
    assert exact(cpu["torch"])
