"""The files people already have, read into our own config: one folder for each program that writes them.

A dialect more is one more folder and one more line here.
"""

from gracetune.config import native
from gracetune.config.dialects.aitoolkit import AI_TOOLKIT
from gracetune.config.dialects.simpletuner import SIMPLETUNER
from gracetune.config.dialects.table import Dialect

DIALECTS = (Dialect("native", native.looks_like, native.read), AI_TOOLKIT, SIMPLETUNER)
"""Asked in this order; the first that recognises a file reads it."""
