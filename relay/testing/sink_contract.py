"""The contract suite of sinks: subclass `SinkContract`, give it a `harness` fixture, run pytest.

    class TestMySink(SinkContract):
        @pytest.fixture
        def harness(self, my_broker) -> Harness:
            return MyHarness(my_broker)

Each test is one sentence of the contract in `relay.sink`; docs/sinks/contract.md tells the rest.
"""

from __future__ import annotations

from relay.testing.delivery import DeliveryContract
from relay.testing.faults import FaultContract
from relay.testing.harness import Harness, Received

__all__ = ["Harness", "Received", "SinkContract"]


class SinkContract(DeliveryContract, FaultContract):
    """Every test that a sink must pass."""
