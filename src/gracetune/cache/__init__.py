"""Caches of latents and text embeddings.

The modules by subject. Start with the first one of each line:

contents  encoder (the contract with the models), keys, required_entries
on disk   store, folders, shards, manifest, reading, writer, maintenance, audit, errors
filling   session, encode_passes, pass_worker, refresh, created_entries, ai_toolkit_import, ai_toolkit_files
reading   batches, resident, residence, loading, collate, stats
"""
