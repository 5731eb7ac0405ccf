"""Parts for tests, ours and those of extensions: small models, modelled machines, resources that fail or are slow."""
