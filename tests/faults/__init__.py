"""Real failures of file operations, for tests of whole commands."""
