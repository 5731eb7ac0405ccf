"""Servers on the loopback interface that tests talk to as to the real ones."""
