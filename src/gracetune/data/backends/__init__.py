"""Where a dataset's bytes come from: a folder, a URL, or either of them staged in memory."""
