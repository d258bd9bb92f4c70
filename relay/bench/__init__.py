"""`relay bench`: what the relay costs, as ratios against raw loops of the same path in the same run.

Nothing here is a test with a time limit: machines are noisy, so every figure stands beside its floor, in
interleaved rounds, with the load of the machine. docs/performance.md says how to read them.
"""
