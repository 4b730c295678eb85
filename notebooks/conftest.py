"""What nbval compares: every stored output but stderr, which belongs to the machine."""

from typing import Any


def pytest_collectstart(collector: Any) -> None:
    """Leave stderr out of the comparison."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
