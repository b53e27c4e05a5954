"""What ExpertParallel is given beside its layers and groups."""

from __future__ import annotations

import dataclasses
import numbers

import foremoe
from foremoe._engine import arguments
from foremoe.files import expect


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(arguments.Arguments):
    """As ExpertParallel takes them."""

    path: str
    host_timeout: float

    def expect_executable(self) -> None:
        """Raises InputError for an argument of another type, and for what cannot be executed."""
        expect(numbers.Integral, depth=self.depth)
        if self.ranks_per_node is not None:
            expect(numbers.Integral, ranks_per_node=self.ranks_per_node)
        expect(numbers.Real, host_timeout=self.host_timeout)
        self.expect_known()
        if not self.host_timeout > 0:
            raise foremoe.InputError(f"host_timeout: {self.host_timeout}, must be above 0", field="host_timeout")
