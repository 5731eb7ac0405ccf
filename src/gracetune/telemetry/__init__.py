"""Typed events, where they are written, progress, and the report at the end. Of gracetune it imports `storage` and
`redaction` only."""
