"""Checks of a planned step: waits, overlap, speed, bandwidth of rows and experts, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foremoe._balance import planned_rows

from .hardware import SHARED, Hardware
from .layers import TOKEN, Net, Sizes, draw_inputs, draw_routes
from .ranks import FAILED, GROUP_TIMEOUT, PASSED, CannotRun, Check, Failure, Outcome, RankReport

RUNS = 3
DEPTHS = (1, 2, 4)
LEAST_HIDDEN = 0.3
"""Share of the wait at depth 1 that depth 2 must hide."""
LEAST_WAIT = 0.01
"""Share of a step that must wait for copies at depth 1; a shorter wait is mostly noise."""
OVERLAP_SIZES = {
    "cpu": Sizes(top_k=4, hidden=64, intermediate=128, tokens=256),
    "cuda": Sizes(top_k=4, hidden=2048, intermediate=1024, tokens=4096, dtype="bfloat16"),
}
BYTES = {"cpu": 2**23, "cuda": 2**27}
"""Bytes that a rank sends, or copies, to measure a bandwidth."""
TRANSFERS = {"cpu": 1, "cuda": 8}
"""Transfers between two barriers: several, since a barrier of NCCL takes long beside one. A CPU would find the next
one's bytes in its caches."""
FAILURE_LIMIT = GROUP_TIMEOUT + 25.0
"""Seconds within which the other ranks must end: the group's timeout, and the time that torch's watchdog takes."""
ABORT_LIMIT = 10.0
"""The same if our own thread aborts their groups."""
WAITED_FOR = "raises while their devices wait"


def checks(hardware: Hardware, sizes: Sizes) -> list[Check]:
    """Returns the checks in the order of the table. sizes: Sizes of the layers for speed checks."""
    shared = SHARED if hardware.shares_gpu else ""
    no_cuda = "" if hardware.device == "cuda" else "only CUDA reports where the host waits for the device"
    no_nccl = "" if hardware.backend == "nccl" else "gloo ends exchanges itself; only NCCL groups must be aborted"
    failures = [
        Check(
            f"others end when a rank {how}", functools.partial(_fail, how), refusal,
            judge=functools.partial(judge_failure, how), limit=FAILURE_LIMIT, grace=FAILURE_LIMIT, ends_ranks=True,
        )
        for how, refusal in (("raises", ""), (WAITED_FOR, no_nccl), ("is killed", ""))
    ]  # fmt: skip
    return [
        Check("no layer waits for the device", functools.partial(_waits, {}), no_cuda),
        Check("no layer waits for the device: dispatch by token", functools.partial(_waits, TOKEN), no_cuda),
        Check("copies overlap with computing", _overlap, shared),
        Check("speed of a planned step", functools.partial(_speed, sizes), shared, limit=90.0),
        Check("bandwidth: all-to-all", _all_to_all),
        Check("bandwidth: copies between ranks", _between_ranks, shared),
        Check("bandwidth: copies from host memory", _from_host),
        *failures,
    ]


# Waits for the device


@contextlib.contextmanager
def _counted_waits() -> Iterator[Counter[str]]:
    """Counts waits for the device by file and line, as CUDA reports them."""
    places: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places.update(f"{os.path.basename(w.filename)}:{w.lineno}" for w in found if "synchroniz" in str(w.message))


def _waits(options: dict[str, Any], hardware: Hardware) -> Outcome:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = hardware.device_of(rank)
    with _counted_waits() as planted:
        torch.zeros(1, device=device).item()
    if sum(planted.values()) != 1:
        raise Failure(f"a wait that was planted was counted {sum(planted.values())} times")
    net = Net(Sizes(dtype="bfloat16"), device)
    waits: Counter[str] = Counter()
    ep = net.spread(**options)
    inputs = [hidden.to(device, torch.bfloat16) for hidden in draw_inputs(net.sizes, rank)]
    with ep.plan(draw_routes(net.sizes, rank, ranks)) as phase:
        for m, hidden in enumerate(inputs):
            with phase.micro_step(m), _counted_waits() as found:
                net(hidden).square().mean().backward()
            if m > 0:  # the first micro-step also loads kernels
                waits += found
        phase.drain()
    ep.detach()
    total = torch.tensor(sum(waits.values()), device=device)
    dist.all_reduce(total)
    if int(total):
        where = ", ".join(f"{count} at {place}" for place, count in waits.most_common(5))
        raise Failure(f"{int(total)} waits on all ranks; on this one {where or 'none'}")
    passes = 2 * (len(inputs) - 1) * len(ep.layers)
    return Outcome(PASSED, f"none in {passes} passes of layers on each rank", {"waits": 0.0, "passes": float(passes)})


# Timed steps


class _Timed:
    """Steps of one rank, with clocks around and between exchanges of rows."""

    def __init__(self, hardware: Hardware, sizes: Sizes, **options: Any) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.device = hardware.device_of(rank)
        self.net = Net(sizes, self.device)
        self.ep = self.net.spread(**options)
        self.routes = draw_routes(sizes, rank, ranks)
        self.inputs = [hidden.to(self.net.moe[0].gate_up) for hidden in draw_inputs(sizes, rank)]
        # Ranks on a CPU may share processors. Processor time is a rank's time on a processor of its own.
        self._clock = time.thread_time if self.device.type == "cpu" else self.now
        self._since = 0.0
        self._stretches: list[float] = []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def step(self, policy: str = "foremoe") -> dict[str, float]:
        """Runs a step. Returns its figures: the maximum over ranks, equal on all ranks."""
        self.net.zero_grad()
        self.ep.arguments = dataclasses.replace(self.ep.arguments, policy=policy)
        self._stretches = []
        with self.ep.plan(self.routes) as phase:
            phase.wait_for_plan()
            dist.barrier()
            begin = self.now()
            with self._count_stretches():
                for m, hidden in enumerate(self.inputs):
                    with phase.micro_step(m):
                        self.net(hidden).square().mean().backward()
            phase.drain()
            dist.barrier()
            wall = self.now() - begin
        of = phase.figures()
        worst = torch.tensor([wall, of["exposed_seconds"], *self._stretches], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        rows = float(planned_rows(phase.plan).max(-1).sum())
        found = {"wall": float(worst[0]), "exposed": float(worst[1]), "critical": float(worst[2:].sum())}
        return {**found, "busiest_rows": rows, "rho": of["rho_planned"]["mean"]}

    def median(self, figure: str, **options: Any) -> float:
        """Returns the median of a figure over steps, after a warm-up step."""
        return statistics.median([self.step(**options)[figure] for _ in range(RUNS + 1)][1:])

    @contextlib.contextmanager
    def _count_stretches(self) -> Iterator[None]:
        """Appends the seconds between exchanges of rows."""
        exchange = dist.all_to_all_single

        def end() -> None:
            self._stretches.append(self._clock() - self._since)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            if keywords.get("group") is not self.ep.ranks.rows.group:
                return exchange(*arguments, **keywords)
            end()
            try:
                return exchange(*arguments, **keywords)
            finally:
                self._since = self._clock()

        self._since = self._clock()
        dist.all_to_all_single = counted
        try:
            yield
        finally:
            dist.all_to_all_single = exchange
            end()


@contextlib.contextmanager
def delayed_copies(seconds: float) -> Iterator[None]:
    """Delays the arrival of each copy of an expert by at least this time, until exit."""
    start = dist.batch_isend_irecv

    class Delayed:
        def __init__(self, work: Any) -> None:
            self.work, self.arrives = work, time.perf_counter() + seconds

        def wait(self) -> None:
            self.work.wait()
            time.sleep(max(0.0, self.arrives - time.perf_counter()))

    dist.batch_isend_irecv = lambda operations: [Delayed(work) for work in start(operations)]  # type: ignore
    try:
        yield
    finally:
        dist.batch_isend_irecv = start


def _overlap(hardware: Hardware) -> Outcome:
    """Compares depths. At depth 1 copies start in the turn that reads them. On CPU, copies are delayed by a turn."""
    sizes = OVERLAP_SIZES[hardware.device]
    waited: dict[int, float] = {}
    delay = whole = 0.0
    for depth in DEPTHS:
        timed = _Timed(hardware, sizes, residency="shared", depth=depth)  # shared: copies in every turn
        if depth == DEPTHS[0]:
            whole = timed.step("vanilla")["wall"]
            delay = whole / (2 * sizes.layers * sizes.micro_steps) if hardware.device == "cpu" else 0.0
        with delayed_copies(delay) if delay else contextlib.nullcontext():
            waited[depth] = timed.median("exposed")
        timed.ep.detach()
    if waited[1] < LEAST_WAIT * whole:
        raise CannotRun(f"a step of {1e3 * whole:.0f} ms waits {1e3 * waited[1]:.2f} ms at depth 1: nothing to hide")
    share = 1 - waited[2] / waited[1]
    seen = ", ".join(f"{1e3 * seconds:.1f} ms at depth {depth}" for depth, seconds in waited.items())
    link = f"; each copy is delayed by {1e3 * delay:.1f} ms" if delay else ""
    if not share >= LEAST_HIDDEN:
        raise Failure(f"depth 2 hides {share:.0%} of the wait at depth 1: a step waits {seen}{link}")
    figures = {f"depth_{depth}": seconds for depth, seconds in waited.items()}
    return Outcome(PASSED, f"depth 2 hides {share:.0%}: a step waits {seen}{link}", {"hidden": share, **figures})


def _speed(sizes: Sizes, hardware: Hardware) -> Outcome:
    """Runs planned and unplanned steps of the same executor alternately.

    Critical path: seconds of computing on the slowest rank, summed over the intervals between exchanges of rows. On
    CPU it is processor time; on CUDA it is wall time and includes the exchanges. Predicted: the ratio of the busiest
    rank's rows, summed over layers and micro-steps.
    """
    timed = _Timed(hardware, sizes, guest_slots=1)
    found: dict[str, list[dict[str, float]]] = {"vanilla": [], "foremoe": []}
    for _ in range(RUNS + 1):
        for policy, steps in found.items():
            steps.append(timed.step(policy))
    timed.ep.detach()
    before, after = (
        {name: statistics.median(step[name] for step in steps[1:]) for name in steps[0]} for steps in found.values()
    )
    ratios = {
        "critical_path_speedup": before["critical"] / after["critical"],
        "predicted_speedup": before["busiest_rows"] / after["busiest_rows"],
        "wall_speedup": before["wall"] / after["wall"],
    }
    exposed = after["exposed"] / after["wall"]
    figures = {**ratios, "exposed_share": exposed, "rho_before": before["rho"], "rho": after["rho"]}
    return Outcome(
        PASSED,
        f"critical path {ratios['critical_path_speedup']:.3f}×, predicted {ratios['predicted_speedup']:.3f}×; ρ"
        f" {before['rho']:.3f} to {after['rho']:.3f}; step {ratios['wall_speedup']:.3f}×, {exposed:.1%} of it waits"
        f" for copies",
        {**figures, "step_seconds": after["wall"], "step_seconds_before": before["wall"]},
    )


# Bandwidth. The received data are checked, so that only working links yield figures.


def _bandwidth(name: str, sent: int, expected: Tensor, to: Tensor, run: Callable[[], object]) -> Outcome:
    """Measures run(), one transfer. Collective. sent: Bytes that a rank sends. expected: Contents of `to` after it."""
    seconds = []
    times = TRANSFERS[to.device.type]
    for _ in range(RUNS + 1):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        if to.is_cuda:
            torch.cuda.synchronize(to.device)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    differs = torch.tensor(int(not torch.equal(to, expected)), device=to.device)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if int(differs):
        raise Failure("the bytes that arrived are not those that were sent")
    rate = times * sent / min(seconds[1:]) / 1e9
    return Outcome(PASSED, f"{rate:.3g} GB/s per rank, {sent / 1e6:.0f} MB {name}", {"gigabytes_per_second": rate})


def _filled(count: int, value: int, device: torch.device) -> Tensor:
    return torch.full((count,), value, dtype=torch.uint8, device=device)


def _all_to_all(hardware: Hardware) -> Outcome:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, part = hardware.device_of(rank), BYTES[hardware.device] // ranks
    rows, to = _filled(part * ranks, rank, device), _filled(part * ranks, 255, device)
    expected = torch.arange(ranks, dtype=torch.uint8, device=device).repeat_interleave(part, output_size=part * ranks)
    sent = part * (ranks - 1)  # a rank keeps its own part
    return _bandwidth("to all others", sent, expected, to, lambda: dist.all_to_all_single(to, rows))


def _between_ranks(hardware: Hardware) -> Outcome:
    """Sends from each rank to the next around a ring, all at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, count = hardware.device_of(rank), BYTES[hardware.device]
    expert, to = _filled(count, rank, device), _filled(count, 255, device)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks

    def run() -> None:
        send, receive = dist.P2POp(dist.isend, expert, group_peer=after), dist.P2POp(dist.irecv, to, group_peer=before)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return _bandwidth("around the ring of ranks", count, _filled(count, before, device), to, run)


def _from_host(hardware: Hardware) -> Outcome:
    """Copies from pinned memory to the device; on a CPU, from shared memory. All ranks at once."""
    rank = dist.get_rank()
    device, count = hardware.device_of(rank), BYTES[hardware.device]
    host, to = _filled(count, rank + 1, torch.device("cpu")), _filled(count, 255, device)
    host = host.pin_memory() if device.type == "cuda" else host.share_memory_()  # type: ignore[no-untyped-call]
    name = "from pinned memory" if device.type == "cuda" else "from shared memory"
    return _bandwidth(name, count, host.to(device), to, lambda: to.copy_(host, non_blocking=True))


# Failures. The last rank is killed, or raises an error that its trainer catches, so that its process continues.


class PlantedError(RuntimeError):
    """Error raised on purpose by the failing rank."""


def _fail(how: str, hardware: Hardware) -> Outcome:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = Net(Sizes(), hardware.device_of(rank))
    ep = net.spread()
    with ep.plan(draw_routes(net.sizes, rank, ranks)) as phase:
        for m, hidden in enumerate(draw_inputs(net.sizes, rank)):
            with phase.micro_step(m):
                out = net(hidden.to(ep.expert_parameters()[0]))
                if m == 1 and rank == hardware.ranks - 1:
                    if how == "is killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise PlantedError("planted by the doctor")
                out.square().mean().backward()
                if how == WAITED_FOR:
                    torch.cuda.synchronize(hardware.device_of(rank))
        phase.drain()
    return Outcome(PASSED, "")


def judge_failure(how: str, reports: Sequence[RankReport]) -> Outcome:
    """Passed if the last rank failed as planned, and every other rank ended with an error, in time."""
    *others, last = reports
    expected = last.ended == "died" if how == "is killed" else last.ended == "raised" and "Planted" in last.text
    if not expected:
        return Outcome(FAILED, f"rank {last.rank} was to fail, but {last.text or 'ended without an error'}")
    wrong = [f"rank {r.rank} {r.text or 'ended without an error'}" for r in others if r.ended not in ("raised", "died")]
    if wrong:
        return Outcome(FAILED, "; ".join(wrong))
    seconds = max(0.0, max(report.seconds for report in others) - last.seconds)
    first = f"rank {others[0].rank}: {others[0].text.split('. ')[0]}"
    in_time = how != WAITED_FOR or seconds <= ABORT_LIMIT
    return Outcome(PASSED if in_time else FAILED, f"after {seconds:.1f} s; {first}", {"seconds": seconds})
