"""One run from config to adapter, in four verbs (`run.train`): preflight, load, fit, finish."""
