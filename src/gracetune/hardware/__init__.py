"""What this machine is and what is wrong with it: `probe()` asks once, and the doctor judges the answer."""

from gracetune.hardware.machine import Gpu, Host, Machine
from gracetune.hardware.probe import probe

__all__ = ["Gpu", "Host", "Machine", "probe"]
