"""One run from config to adapter: runtime, step, loop, callbacks."""
