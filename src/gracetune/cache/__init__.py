"""Caches of latents and embeddings. Where to begin reading:

what      encoder (the contract with the models), keys, wanted, visits, places
on disk   store (begin here), folder, shards, manifest, reading, writer, upkeep, checking, audit, errors
filling   session (begin here), passes, pass_work, claims, refresh, tiling, takeover, imports
reading   batches (begin here), resident, residence, loading, collate, stats
"""
