"""Integration with upstreams: the names our overlays use in SimpleTuner and ai-toolkit, a check that they exist, a
launcher."""
