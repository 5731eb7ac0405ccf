"""Whole runs of every dialect, killed, stopped and given failing disks at moments that a seed chooses."""
