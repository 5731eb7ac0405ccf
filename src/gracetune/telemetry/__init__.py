"""Typed events, where they are written, progress, and the report at the end. Imports storage alone of gracetune."""
