"""Host memory: segments shared between processes, NUMA nodes, slabs, placement hints and how much is free."""
