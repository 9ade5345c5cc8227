"""What a person asked of the simulator that it cannot do."""

from __future__ import annotations

from rungway.errors import ConfigError


class SimulationError(ConfigError):
    """A trace that cannot be read, a cost model or a fault that does not exist. One line; exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__([])
        self.args = (message,)
