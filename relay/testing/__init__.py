"""For the tests of other people's sinks: the contract suite that every sink of ours passes.

`relay.testing.sink_contract.SinkContract` is the suite, `relay.testing.harness.Harness` what a sink's
tests have to supply, docs/sinks/contract.md the guide. Needs pytest and pytest-asyncio, which the relay
itself does not install.
"""

import pytest

# Before the modules are imported, or a failed contract would say "AssertionError" and nothing else.
pytest.register_assert_rewrite("relay.testing.delivery", "relay.testing.faults", "relay.testing.harness")
