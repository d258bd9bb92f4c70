"""From a source's messages to settled rows: router, workers, parking and settlement."""

from relay.pipeline.pipeline import Pipeline, Stores

__all__ = ["Pipeline", "Stores"]
