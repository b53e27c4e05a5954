"""State of the ranks of one model, which run phases, steps and evaluations one at a time.

An error on one rank ends the run on all ranks: their exchanges end, or they learn of it in the next vote. Nothing runs
after that, because transfers of a rank may still be in progress, and no rank waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from .calls import Calls
from .failures import Channel, Failures
from .shares import Shares
from .votes import RankLeft, Votes

PHASE, STEP, EVALUATION = "a phase", "a step", "evaluate()"  # what runs
UNUSABLE = "do not use the gradients of this step"


class Session:
    """The state of one model's ranks, as this rank knows it: idle, busy, failed or closed.

    Attributes:
        shares: Begins plans.
        runs: What runs, as given to busy(); "" if nothing does.
        has_failed: Whether this rank knows of a failure. Transfers may be in progress that no rank waits for.
        is_closed: Whether close() was called.
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
        self.has_failed = False
        self.is_closed = False

    def expect_usable(self) -> None:
        """Raises RuntimeError after a failure, and after close()."""
        if self.is_closed:
            raise RuntimeError("detached from the model")
        if self.has_failed:
            raise RuntimeError("a rank failed: its transfers may still be in progress; begin anew with other groups")

    def expect_no_failure(self) -> None:
        """Raises RuntimeError as expect_usable() does, and if any rank has reported a failure."""
        self.expect_usable()
        if reason := self._failures.reason():
            raise RuntimeError(f"{reason}; begin anew after detach()")

    def expect_idle(self, call: str) -> None:
        """Raises RuntimeError if something runs, or if nothing can run again. call: For the message."""
        self.expect_ended(call)
        self.expect_usable()

    def expect_ended(self, call: str = "detach()") -> None:
        """Raises RuntimeError while something runs. call: For the message."""
        if self.runs:
            raise RuntimeError(f"{self.runs} is running: end it before {call}")

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Inside, nothing else can run. what: PHASE, STEP or EVALUATION."""
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
    def ending_all(self, so: str) -> Iterator[None]:
        """Inside, an error of this rank ends what runs on all ranks. so: See fail().

        Raises RuntimeError as expect_usable() does.
        """
        self.expect_usable()
        try:
            yield
        except BaseException as error:
            self.fail(error, so)
            raise

    def fail(self, error: BaseException, so: str) -> None:
        """Ends what runs on all ranks, because of this rank's error. The session has failed then.

        Raises RuntimeError, with the rank that failed before and its reason, if the error is a lost connection to it.
        so: End of this message: what follows for the caller.
        """
        self._failures.abort.leave(failed=True)
        if self.has_failed or self.is_closed:
            return
        self.has_failed = True
        ended_by = self._failures.end(error)
        if self._votes is not None:
            self._votes.leave()
        if ended_by:
            raise RuntimeError(f"{ended_by}; {so}") from error

    def expect_call(self, name: str) -> None:
        """Announces a collective call of the group, and waits until all ranks have announced one.

        After a failure, does nothing, so that saving still works. Raises RuntimeError on all ranks if the calls differ
        or another rank failed, and after close().
        """
        if self._calls is not None and not self.has_failed:
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
            self.has_failed = True
            raise RuntimeError(f"{self._failures.reason() or left}; {UNUSABLE}") from left

    def close(self) -> bool:
        """Ends planning and exchanges between ranks. Returns whether ranks may have aborted exchanges, after a failure
        on NCCL. Raises RuntimeError while something runs."""
        self.expect_ended()
        self.shares.close(self.has_failed)
        for channel in self._own if not self.has_failed else ():  # else messages may still be on their way
            channel.close()
        self.is_closed = True
        return self._failures.abort.close()
