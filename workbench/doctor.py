"""Show what this machine has: devices, compilers, libraries, and the kernel that would run on each device and why.

    twell doctor

Cost: importing torch, and asking two compilers for their version.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from twell.kernels.build import BuildError, find_compiler
from twell.kernels.dispatch import Choice, choose
from twell.workbench.options import DoctorOptions

LIBRARIES = ("twell-workbench", "torch", "transformers", "tokenizers", "safetensors", "pyarrow")
DASHBOARD = ("streamlit", "plotly", "duckdb")
VECTOR_UNITS = ("sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
SHAPE = (2048, 5632, 8192)  # d_model, d_ff and rows for which a kernel is chosen


def doctor(options: DoctorOptions) -> None:
    """Print one short table."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in machine_facts():
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def machine_facts() -> list[tuple[str, str]]:
    """Return the rows of the table: a name and a value each."""
    units = ", ".join(vector_units()) or "vector units unknown"
    rows = [("CPU", f"{processor()}, {units}")]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        rows.append((f"GPU {index}", f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {memory:.0f} GiB"))
    if not torch.cuda.is_available():
        rows.append(("GPU", "none that PyTorch sees"))
    rows += [("C++ compiler", compiler(cuda=False)), ("CUDA compiler", compiler(cuda=True))]
    rows.append(("Python", platform.python_version()))
    rows += [*versions().items(), ("dashboard", dashboard())]
    d_model, d_ff, n = SHAPE
    for device, dtype in [("cuda", torch.bfloat16)] * torch.cuda.is_available() + [("cpu", torch.float32)]:
        rows.append((f"kernel on {device}", why(choose(device, dtype, d_model, d_ff, n))))
    return rows


def why(choice: Choice, requested: str = "auto") -> str:
    """Return the kernel that was chosen, and why each kernel before it was not.

    requested: the value of --kernel; kernels for another device are left out unless they were requested by name
    """
    name, *others = choice.reason.split("; ")
    reasons = [other for other in others if "expected device" not in other or other.startswith(f"{requested}:")]
    return f"{choice.kernel}: {'; '.join([name, *reasons])}"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a capture depends on."""
    installed = {}
    for name in LIBRARIES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed | {"torch": torch.__version__}  # with its build: +cpu, +cu130


def dashboard() -> str:
    """Return the versions of the libraries that the dashboard needs, or how to install them."""
    try:
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in DASHBOARD)
    except importlib.metadata.PackageNotFoundError as missing:
        return f"{missing.name} is not installed: pip install 'twell-workbench[dashboard]'"


def device_name(device: torch.device) -> str:
    """Return the device's name, as the manifest has it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def driver(device: torch.device) -> str:
    """Return the GPU's driver and CUDA version; for a CPU the operating system."""
    if device.type != "cuda":
        return f"{platform.system()} {platform.machine()}"
    version = Path("/sys/module/nvidia/version")  # the kernel module's own version
    return f"NVIDIA {version.read_text().strip() if version.exists() else 'driver'}, CUDA {torch.version.cuda}"


def processor() -> str:
    """Return the processor's name, and how many threads torch uses."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' * (threads != 1)}"


def vector_units() -> list[str]:
    """Return the vector instructions of the processor that kernels could use."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [unit for unit in VECTOR_UNITS if unit in flags]


def compiler(cuda: bool) -> str:
    """Return the version of the compiler that kernels are built with, or the sentence that none was found."""
    try:
        path = find_compiler(cuda)
    except BuildError as error:
        return str(error) + (", which only GPU kernels need" if cuda else "")
    lines = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return next((line for line in lines if "release" in line), lines[0] if lines else path).strip()


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == field), "")
