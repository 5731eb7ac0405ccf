"""The supported upstreams, by their names on the command line."""

from __future__ import annotations

from gracetune.integrations import ai_toolkit_points, simpletuner_points
from gracetune.integrations.points import Upstream

SIMPLETUNER = Upstream(
    name="simpletuner",
    title="SimpleTuner",
    distribution="simpletuner",
    inside=("", "src"),
    marks=("simpletuner/helpers",),
    surveyed=("simpletuner",),
    version_in=(("simpletuner/__init__.py", "__version__"),),
    how_to_get="or install it (Python 3.12 or later): pip install simpletuner",
    points=simpletuner_points.POINTS,
)
AI_TOOLKIT = Upstream(
    name="ai-toolkit",
    title="ai-toolkit",
    distribution="ostris-ai-toolkit",
    inside=("", "ostris_ai_toolkit"),
    marks=("toolkit", "jobs"),
    surveyed=("toolkit", "jobs", "extensions_built_in", "extensions"),
    version_in=(("version.py", "VERSION"),),
    how_to_get="it is used from a checkout, which is what --source names",
    points=ai_toolkit_points.POINTS,
)
UPSTREAMS = {one.name: one for one in (SIMPLETUNER, AI_TOOLKIT)}
