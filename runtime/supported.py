"""The needs of SGLang's wheels. `python runtime/supported.py` prints in one line what a machine lacks."""

# no annotations: an old Python must get as far as its message
import os
import platform
import shutil
import sys
import sysconfig

GLIBC = (2, 34)


def lacks(python=sys.version_info[:2], libc=None):
    """Return why the requirements can't be installed here, or "". libc: its name and version."""
    if not (3, 11) <= python <= (3, 13):
        needed = "Python 3.11, 3.12 or 3.13 is needed (make install PYTHON=python3.11)"
        return needed + ", but this is " + ".".join(map(str, python))
    name, version = libc or platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name != "glibc" or numbers < GLIBC:
        found = (name + " " + version).strip() or "another libc"
        needed = "glibc 2.34 or newer is needed (Ubuntu 22.04, Debian 12, RHEL 9)"
        return needed + ", but this is " + found
    return ""


def lacks_for_gpus():
    """Return why a run on a GPU can't compile its kernels here, or ""."""
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    has_compiler = shutil.which(os.environ.get("CXX", "c++").split()[0])
    if has_compiler and os.path.isfile(header):
        return ""
    package = "python" + ".".join(map(str, sys.version_info[:2])) + "-dev"
    return "GPU runs compile kernels: apt install g++ " + package + " (or make install GPUS=0)"


if __name__ == "__main__":
    has_gpus = sys.argv[1:] not in ([], ["0"])
    sys.exit(lacks() or (has_gpus and lacks_for_gpus()) or None)
