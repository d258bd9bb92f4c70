"""The raw loops: each path with nothing around it. No routing, no retries, no dead letters, no ownership."""
