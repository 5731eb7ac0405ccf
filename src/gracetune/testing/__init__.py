"""Parts for tests, also for those of other packages: tiny models and a slow dataset backend."""
