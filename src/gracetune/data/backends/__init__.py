"""Storage backends: a local folder, a URL, or either of them staged in memory."""
