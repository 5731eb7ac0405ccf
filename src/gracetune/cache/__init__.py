"""Caches of latents and text embeddings.

The modules by subject. Start with the first one of each line:

contents  encoder (the contract with the models), keys, wanted, missing, places
on disk   store, folder, shards, manifest, reading, writer, upkeep, checking, audit, errors
filling   session, passes, pass_work, claims, refresh, repair, made, tiling, takeover, imports
reading   batches, resident, residence, loading, collate, stats
"""
