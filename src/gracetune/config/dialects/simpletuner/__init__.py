"""The SimpleTuner dialect: reads SimpleTuner's configuration files into a `RunConfig`."""

from gracetune.config.dialects.peer_file import settle_samples
from gracetune.config.dialects.simpletuner.adapter import settle_program
from gracetune.config.dialects.simpletuner.reader import TABLES, looks_like, read
from gracetune.config.dialects.table import Dialect

SIMPLETUNER = Dialect(
    "simpletuner",
    recognizes=looks_like,
    read=read,
    tables=TABLES,
    settle=(settle_samples, settle_program),
    finds_beside=True,
)
