"""Copies of remote datasets on this machine's disk: planned, downloaded, checked and unpacked before they are read."""
