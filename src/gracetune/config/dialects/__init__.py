"""Readers for configuration files of other programs, one folder for each program, and the list of all dialects.

A new dialect needs a folder and an entry in `DIALECTS`.
"""

from gracetune.config import native
from gracetune.config.dialects.aitoolkit import AI_TOOLKIT
from gracetune.config.dialects.simpletuner import SIMPLETUNER
from gracetune.config.dialects.table import Dialect

DIALECTS = (Dialect("native", native.looks_like, native.read), AI_TOOLKIT, SIMPLETUNER)
"""Tried in this order; the first that recognizes a file reads it."""
