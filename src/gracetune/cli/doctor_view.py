"""The doctor's report as text: a block of facts, one line per check, and the verdict last.

It is plain ASCII and readable at 80 columns, because it is read over slow connections and in logs.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from gracetune.cli.console import print_wrapped
from gracetune.errors import visible
from gracetune.hardware.checks import Check
from gracetune.hardware.doctor import Diagnosis
from gracetune.hardware.machine import Gpu, Host, Machine, NumaNode
from gracetune.units import KIB, format_bytes

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL"}
_LABEL_WIDTH = 10
_MARK_WIDTH = 6
_NAME_WIDTH = 16


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    for label, value in _fact_lines(diagnosis.machine):
        print_wrapped(console, Text(f"{label:<{_LABEL_WIDTH}}", style="bold"), visible(value))
    console.print()
    for check in diagnosis.checks:
        print_check(console, check)
    console.print()
    console.print(verdict(diagnosis))


def verdict(diagnosis: Diagnosis) -> Text:
    counts = {status: sum(check.status == status for check in diagnosis.checks) for status in _MARKS}
    tally = f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"
    if counts["fail"]:
        return Text(f"NOT READY: {tally}", style=_STYLES["fail"])
    if not diagnosis.machine.gpus:
        return Text(f"READY, WITHOUT A GPU: {tally}", style=_STYLES["warn"])
    return Text(f"READY: {tally}", style=_STYLES["ok"])


def print_check(console: Console, check: Check) -> None:
    mark = Text(f"{_MARKS[check.status]:<{_MARK_WIDTH}}", style=_STYLES[check.status])
    print_wrapped(
        console, mark.append(f"{check.name:<{_NAME_WIDTH}}", style="default not bold"), visible(check.finding)
    )
    if check.remedy and check.status != "ok":
        print_wrapped(
            console, Text(f"{'do  ':>{_MARK_WIDTH + _NAME_WIDTH}}", style="cyan"), visible(check.remedy), "cyan"
        )


def _fact_lines(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "profile", f"{machine.profile.value}: {machine.profile.reason}"
    for gpu in machine.gpus:
        yield f"gpu {gpu.index}", _gpu_line(gpu)
    yield "cpu", _cpu_line(machine.host)
    yield "memory", _memory_line(machine.host)
    nodes = [node for node in machine.host.numa_nodes if node.memory_total]
    if len(nodes) > 1:
        yield "numa", "; ".join(map(_node, nodes)) + _empty_nodes(machine.host)
    yield "software", _software_line(machine)


def _gpu_line(gpu: Gpu) -> str:
    memory = _amount(gpu.memory_total)
    free = f" ({format_bytes(gpu.memory_free)} free)" if gpu.memory_free is not None else ""
    parts = [
        gpu.name or "unnamed",
        memory + free,
        f"compute {gpu.compute_capability}" if gpu.compute_capability else None,
        f"{gpu.multiprocessors} SMs" if gpu.multiprocessors else None,
        _link(gpu),
    ]
    return ", ".join(part for part in parts if part)


def _link(gpu: Gpu) -> str:
    if gpu.attributes.integrated:
        return "shares main memory"
    if gpu.coherent_link:
        return "coherent link"
    if gpu.pcie and gpu.pcie.width:
        speed = f" {gpu.pcie.speed_gts:g} GT/s" if gpu.pcie.speed_gts else ""
        return f"PCIe x{gpu.pcie.width}{speed}"
    return "link unknown"


def _cpu_line(host: Host) -> str:
    count = f"{host.cpu_count} CPUs" if host.cpu_count else "CPU count unknown"
    page = f"{host.page_size // KIB} KiB pages" if host.page_size else "page size unknown"
    parts = [count, host.cpu_model, host.architecture, page, f"kernel {host.kernel}" if host.kernel else None]
    return ", ".join(part for part in parts if part)


def _memory_line(host: Host) -> str:
    text = f"{_amount(host.cpu_mem_total)}, {_amount(host.cpu_mem_available)} available"
    if host.cgroup and host.cgroup.limit is not None:
        text += f", cgroup limit {format_bytes(host.cgroup.limit)} ({_amount(host.cgroup.available)} left)"
    if host.swap_total:
        text += f", swap {format_bytes(host.swap_total)}"
    return f"{text}, in a {host.container} container" if host.container else text


def _node(node: NumaNode) -> str:
    kind = "GPU memory" if node.is_gpu_memory else f"CPUs {node.cpus}" if node.cpu_count else "no CPUs"
    return f"node {node.id} {_amount(node.memory_total)} ({kind})"


def _empty_nodes(host: Host) -> str:
    empty = sum(not node.memory_total for node in host.numa_nodes)
    return f"; {empty} empty" if empty else ""


def _software_line(machine: Machine) -> str:
    software = machine.software
    torch = f"torch {software.torch}" if software.torch else "no torch"
    is_installed = machine.driver.status == "ok"
    version = machine.host.nvidia_kernel_driver or ("unknown" if is_installed else None)
    driver = f"driver {version}" if version else "no NVIDIA driver"
    cuda = f"CUDA {machine.driver.cuda_version}" if machine.driver.cuda_version else None
    return ", ".join(part for part in (f"Python {software.python}", torch, driver, cuda) if part)


def _amount(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)
