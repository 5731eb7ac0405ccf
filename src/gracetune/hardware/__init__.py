"""Hardware detection: `probe()` describes the machine, and the doctor checks that description for problems."""

from gracetune.hardware.machine import Gpu, Host, Machine
from gracetune.hardware.probe import probe

__all__ = ["Gpu", "Host", "Machine", "probe"]
