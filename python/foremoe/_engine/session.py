"""What the ranks of one model do together: phases, steps and evaluations, one after the other, until one of them fails.

An error of one rank ends what runs on all ranks: their exchanges end, or they learn of it in the next vote. After that
nothing runs again, since what a rank sent may still be on its way, and no rank waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from .calls import Calls
from .failures import Channel, Failures
from .shares import Shares
from .together import RankLeft, Votes

_FAILED, _CLOSED = "failed", "closed"
UNUSABLE = "do not use the gradients of this step"


class Session:
    """The state of one model's ranks, as this rank knows it: idle, busy, failed or closed.

    Attributes:
        shares: Begins plans.
        runs: What runs, as given to busy(); "" if nothing does.
    """

    def __init__(
        self,
        shares: Shares,
        failures: Failures,
        own: Sequence[Channel],
        *,
        calls: Calls | None = None,
        votes: Votes | None = None,
    ) -> None:
        """
        Args:
            own: Channels that close() closes.
            calls: Announcements of collective calls. None: calls are not announced.
            votes: Votes by which ranks learn of a failure. None: a failure closes the channels between ranks.
        """
        self.shares = shares
        self._failures = failures
        self._own = list(own)
        self._calls = calls
        self._votes = votes
        self.runs = ""
        self._over = ""  # _FAILED or _CLOSED

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows of a failure. Transfers may be in progress that no rank waits for."""
        return self._over == _FAILED

    @property
    def is_closed(self) -> bool:
        return self._over == _CLOSED

    def expect_usable(self) -> None:
        """Raises RuntimeError after a failure, and after close()."""
        if self._over == _CLOSED:
            raise RuntimeError("detached from the model")
        if self._over:
            raise RuntimeError("a rank failed: what it sent may still be on its way; begin anew with other groups")

    def expect_no_failure(self) -> None:
        """Raises RuntimeError as expect_usable() does, and if any rank has reported a failure."""
        self.expect_usable()
        if reason := self._failures.reason():
            raise RuntimeError(f"{reason}; begin anew after detach()")

    def expect_idle(self, call: str) -> None:
        """Raises RuntimeError if something runs, or if nothing can run again. call: For the message."""
        if self.runs:
            raise RuntimeError(f"{self.runs} is running: end it before {call}")
        self.expect_usable()

    def expect_ended(self) -> None:
        """Raises RuntimeError while something runs."""
        if self.runs:
            raise RuntimeError(f"{self.runs} is running: end it before detach()")

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Inside, nothing else can run. what: "a phase", "a step" or "evaluate()"."""
        self.expect_idle(f"{what} begins")
        self.runs = what
        try:
            yield
        finally:
            self.runs = ""

    def watch(self) -> None:
        """From now on, until settle() or fail(), a failure of another rank ends waits for the device."""
        self._failures.abort.enter()

    def settle(self) -> None:
        """Waits for the device. Raises RuntimeError if exchanges were ended since watch()."""
        self._failures.abort.leave(failed=False)

    @contextlib.contextmanager
    def ending_all(self, loses: str) -> Iterator[None]:
        """Inside, an error of this rank ends what runs on all ranks. loses: See fail()."""
        try:
            yield
        except BaseException as error:
            self.fail(error, loses)
            raise

    def fail(self, error: BaseException, loses: str) -> None:
        """Ends what runs on all ranks, because of this rank's error. The session has failed then.

        Raises RuntimeError, with the rank that failed before and its reason, if the error is a lost connection to it.
        loses: What the caller should do, for this message.
        """
        self._failures.abort.leave(failed=True)
        if self._over:
            return
        self._over = _FAILED
        ended_by = self._failures.end(error)
        if self._votes is not None:
            self._votes.leave()
        if ended_by:
            raise RuntimeError(f"{ended_by}; {loses}") from error

    def expect_call(self, name: str) -> None:
        """Announces a collective call of the group, and waits until all ranks have announced one.

        After a failure, does nothing, so that saving still works. Raises RuntimeError on all ranks if the calls differ
        or another rank failed.
        """
        if self._calls is not None and not self._over:
            with self.ending_all(f"{name} needs all ranks of the group"):
                self._calls.expect(name)

    def pass_call(self, name: str) -> None:
        """Announces a call whose exchanges use other groups. Does not wait."""
        if self._calls is not None:
            self._calls.passing(name)

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank that votes. Collective. Raises RuntimeError if a rank failed."""
        with self._voting() as votes:
            return votes.any(flag)

    def agree(self, values: Mapping[str, str], refused: Exception | None = None) -> None:
        """Requires equal values, by name, on all ranks that vote, and that no rank refuses. Collective.

        Raises InputError on all ranks with the rank that refuses, or with the value that differs; the rank that refuses
        raises its own error. Raises RuntimeError if a rank failed.
        """
        with self._voting() as votes:
            votes.expect_equal(values, refused)

    @contextlib.contextmanager
    def _voting(self) -> Iterator[Votes]:
        assert self._votes is not None
        self.expect_usable()
        try:
            yield self._votes
        except RankLeft as left:
            self._over = _FAILED
            raise RuntimeError(f"{self._failures.reason() or left}; {UNUSABLE}") from left

    def close(self) -> bool:
        """Ends planning and, unless it has failed, the exchanges between ranks. Returns whether exchanges of any rank
        may have been aborted. Raises RuntimeError while something runs."""
        self.expect_ended()
        self.shares.close(self.has_failed)
        while self._own and not self.has_failed:
            self._own.pop().close()
        self._over = _CLOSED
        return self._failures.abort.close()
