"""Host memory: shared segments, slabs, NUMA binding, placement hints and sensors of free memory."""
