"""This machine's GPUs: what a run sets up before using them, and the toolkit that compiles kernels."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError
from runtime.hooks import added

if TYPE_CHECKING:
    from torch import Tensor


Settings = Any  # a config.Config: that module is above this one
DEVICE_FILES = Path("/dev")  # nvidia0, nvidia1 ... if there is a driver
DRIVER = Path("/sys/module/nvidia/version")
OLDEST_DRIVER = 580
VISIBLE = re.compile(r"\d|GPU-|MIG-")  # how CUDA_VISIBLE_DEVICES begins if it shows a device
CUDA_FOLDER = Path("/usr/local/cuda")  # where SGLang looks last
OLDEST_NVCC = (12, 8)  # older ones lack flags that SGLang and flashinfer use
LDCONFIG = "/sbin/ldconfig"  # lists the driver's libraries
LIBCUDART = "libcudart.so.13"  # SGLang's wheels are linked with it
# settings of torch's allocator; the second is the older name
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# otherwise a tensor pinned on the host takes the next power of two, up to twice its size
PIN_EXACTLY = "pinned_max_round_threshold_mb:1"
# usable fraction of a GPU's free memory: an allocator leaves gaps, and a forecast may be wrong
FULL = 0.9


def has_devices() -> bool:
    """True if this machine has GPUs that CUDA_VISIBLE_DEVICES doesn't hide; doesn't import torch."""
    devices = [*DEVICE_FILES.glob("nvidia[0-9]*"), *DEVICE_FILES.glob("dxg")]  # Linux; WSL
    return bool(devices) and shows_devices()


def default_device() -> str:
    """Return cuda if torch finds a device, cpu if there is none. Raises UserError if torch can't use it."""
    # importing torch takes a second, during which engines can start
    if not has_devices():
        return "cpu"
    from torch import cuda

    check_usable()
    return "cuda" if cuda.is_available() else "cpu"


def shows_devices() -> bool:
    """True unless CUDA_VISIBLE_DEVICES hides every device."""
    return VISIBLE.match(os.environ.get("CUDA_VISIBLE_DEVICES", "0")) is not None


def check_usable() -> None:
    """Raise UserError if torch can't use this machine's device; not if none is there or visible."""
    import torch

    devices = sorted(DEVICE_FILES.glob("nvidia[0-9]*"))
    if torch.cuda.is_available() or not devices or not shows_devices():
        return
    if not torch.version.cuda:
        raise UserError(
            f"torch can't use {devices[0]}: it is built for CPUs; install requirements.txt; "
            "--device cpu trains without it"
        )
    driver = DRIVER.read_text().strip() if DRIVER.exists() else "unknown"
    if driver[:1].isdigit() and int(driver.partition(".")[0]) < OLDEST_DRIVER:
        raise UserError(
            f"torch can't use {devices[0]}: CUDA 13 needs driver {OLDEST_DRIVER} or newer, "
            f"and this is {driver}; --device cpu trains without it"
        )
    raise UserError(
        f"torch can't use {devices[0]}: its driver is {driver}; nvidia-smi may show more; "
        "--device cpu trains without it"
    )


def choose_device(config: Settings) -> None:
    """Set up this process and its children for --device. Raises UserError if the run would fail on it."""
    if config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    settings = [value for value in map(os.environ.get, ALLOCATOR) if value][:1]
    if config.command == "rl" and "expandable_segments:True" in "".join(settings):
        raise UserError(f"{' or '.join(ALLOCATOR)}: with expandable_segments engines can't sleep")
    os.environ["PYTORCH_ALLOC_CONF"] = ",".join([PIN_EXACTLY, *settings])  # the last one wins
    # each rank's and server's compiling processes; torch's default is one per core
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    if config.deterministic:  # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.sp:  # starts a tensor-parallel rank's messages before the products that overlap them
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from torch import cuda

    if not cuda.is_available():
        check_usable()
        raise UserError("--device cuda: torch finds no device on this machine")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = cuda.device_count()
    if ranks > devices:
        raise UserError(
            f"--device cuda: {ranks} ranks need as many devices, and this machine has {devices}: "
            "start fewer ranks, or set --device cpu"
        )
    for check in added("device_check"):
        check(config)


def free_bytes() -> int:
    """Return the free bytes of this rank's GPU."""
    from torch import cuda

    return cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))[0]


def wait_for_room(needed: float, who: str, limit_s: float) -> None:
    """Wait until this rank's GPU has `needed` bytes free. Raises UserError if it never does in time."""
    deadline = time.monotonic() + limit_s
    while (free := free_bytes()) < needed:
        if time.monotonic() > deadline:
            raise UserError(
                f"{who} needs {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} are free: "
                "lower --mem-fraction, or raise --tp or --pp"
            )
        time.sleep(0.1)


def grow_segments(is_on: bool) -> None:
    """Let torch's segments grow (micro-batches vary in length) or not, unless PYTORCH_ALLOC_CONF decides."""
    import torch

    settings = os.environ["PYTORCH_ALLOC_CONF"]
    if "expandable_segments" not in settings:
        torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:{is_on}")


@contextmanager
def fixed_segments(tensor: Tensor) -> Iterator[None]:
    """Allocate in fixed segments inside the block, as CUDA IPC can't send from one that grows."""
    if tensor.is_cuda:
        grow_segments(False)
    try:
        yield
    finally:
        if tensor.is_cuda:
            grow_segments(True)


def fragments() -> int:
    """Return torch's peak of reserved bytes minus that of allocated ones, since the last call."""
    from torch import cuda

    stats = cuda.memory_stats()
    cuda.reset_peak_memory_stats()
    return stats["reserved_bytes.all.peak"] - stats["allocated_bytes.all.peak"]


def toolkits() -> dict[Path, tuple[int, int]]:
    """Return each nvcc's folder and version: only CUDA_HOME's, or else those of PATH, /usr/local and pip."""
    folders = [CUDA_FOLDER, *(Path(folder).parent for folder in cuda_libraries())]
    if on_path := shutil.which("nvcc"):
        folders.insert(0, Path(on_path).resolve().parents[1])
    if named := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        folders = [Path(named)]
    found = {}
    for home in folders:
        if (compiler := home / "bin" / "nvcc").is_file():
            said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
            release = re.search(r"release (\d+)\.(\d+)", said)
            found[home] = (int(release[1]), int(release[2])) if release else (0, 0)
    return found


def cuda_home() -> str:
    """Return the toolkit that engines compile with, or ""; for pip's, a folder of links (untested on GPUs).

    SGLang and flashinfer link with -L$CUDA_HOME/lib64 -lcudart and -L$CUDA_HOME/lib64/stubs -lcuda, but pip
    has lib/libcudart.so.13, and libcuda is the driver's. Engines cache kernels by path, so the links stay.
    Raises UserError if they can't be made.
    """
    new_enough = {home: found for home, found in toolkits().items() if found >= OLDEST_NVCC}
    # prefer CUDA 13: torch's libraries are built for it
    home = min(new_enough, key=lambda home: new_enough[home][0] != 13, default=None)
    if home is None or str(home / "lib") not in cuda_libraries():
        return str(home or "")
    links = home.with_name(f"{home.name}-links")
    targets = {name: home / name for name in ("bin", "include", "nvvm")}
    targets["lib64/libcudart.so"] = home / "lib" / LIBCUDART
    known = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True).stdout
    if driver := re.search(r"libcuda\.so\.1 \(libc6,.*64\) => (\S+)", known):
        targets["lib64/stubs/libcuda.so"] = Path(driver[1])
    try:
        (links / "lib64" / "stubs").mkdir(parents=True, exist_ok=True)
        for name, target in targets.items():
            with suppress(FileExistsError):  # left by an earlier run or another rank
                (links / name).symlink_to(target)
    except OSError as error:
        raise UserError(f"{links}: {error.strerror}: set CUDA_HOME to a CUDA toolkit") from None
    return str(links)


def cuda_libraries() -> list[str]:
    """Return the folders of pip's CUDA runtime, which torch finds but LD_PRELOAD's loader doesn't."""
    package = importlib.util.find_spec("nvidia")
    roots = map(Path, package.submodule_search_locations if package else ())
    return sorted({str(file.parent) for root in roots for file in root.glob(f"*/lib/{LIBCUDART}")})
