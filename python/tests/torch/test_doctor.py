"""python -m foremoe.torch.doctor: its checks pass on this machine, and errors on a rank are reported as failures."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import foremoe
from foremoe.torch.doctor import __main__ as command
from foremoe.torch.doctor import equality
from foremoe.torch.doctor.checks import WAITED_FOR, delayed_copies, judge_failure
from foremoe.torch.doctor.hardware import Hardware, find_hardware
from foremoe.torch.doctor.ranks import (
    CANNOT_RUN,
    FAILED,
    PASSED,
    CannotRun,
    Check,
    Failure,
    Outcome,
    RankReport,
    examine,
)
from foremoe.torch.doctor.report import advice_of, cluster_file_of, scrub

CPU = Hardware("cpu", 0, 2, "gloo")


def pass_quietly(hardware: Hardware) -> Outcome:
    return Outcome(PASSED, f"on {hardware.ranks} ranks", {"figure": 1.0})


def on_rank_1(act: Any, hardware: Hardware) -> Outcome:
    """Let rank 0 wait in a barrier while rank 1 runs `act` first."""
    if dist.get_rank() == 1:
        act()
    dist.barrier()
    return Outcome(PASSED, "")


def hang() -> None:
    time.sleep(3600)


def die() -> None:
    os._exit(3)


def fail() -> None:
    raise Failure("something is wrong")


def raise_cannot_run(hardware: Hardware) -> Outcome:
    raise CannotRun("this machine lacks it")


def send_wrong_experts() -> None:
    """Make all weights and gradients that this rank sends from now on 1 % too large."""
    start = dist.batch_isend_irecv

    def start_wrong(operations: list[Any]) -> list[Any]:
        for operation in operations:
            if operation.op is dist.isend:
                operation.tensor = operation.tensor * 1.01
        return start(operations)

    dist.batch_isend_irecv = start_wrong


def outcomes(*checks: Check, **options: Any) -> list[Outcome]:
    return [outcome for _, outcome, _ in examine(CPU, checks, **options)]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path_factory.mktemp("doctor") / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "foremoe.torch.doctor", "--device", "cpu", "--limit", "600", "--json", file],
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    return done, json.loads(file.read_text())


def figures_of(document: dict[str, Any], check: str) -> dict[str, float]:
    (figures,) = (row["figures"] for row in document["checks"] if row["check"] == check)
    return figures


def test_every_check_that_can_run_on_a_cpu_passes(whole_run: Any) -> None:
    done, document = whole_run
    by_status: dict[str, list[str]] = {PASSED: [], FAILED: [], CANNOT_RUN: []}
    for row in document["checks"]:
        by_status[row["outcome"]].append(row["check"])
    of_clocks = {"copies overlap with computing"}  # can fail when other programs use the processors
    assert set(by_status[FAILED]) <= of_clocks, document
    assert len(by_status[CANNOT_RUN]) == 3
    assert all(name.startswith("no layer waits for the device") or WAITED_FOR in name for name in by_status[CANNOT_RUN])
    assert [row["check"] for row in document["checks"]] == [c.name for c in command.all_checks(CPU, command.SPEED)]
    num_failed = len(by_status[FAILED])
    assert done.returncode == num_failed, done.stderr
    assert f"{len(by_status[PASSED])} passed, {num_failed} failed, 3 cannot run here" in done.stdout


def test_the_json_document_has_versions_and_results_but_no_host_or_path(whole_run: Any) -> None:
    _, document = whole_run
    assert document["format"] == 2
    assert document["versions"]["foremoe"] == foremoe.__version__
    assert document["versions"]["torch"] == torch.__version__
    assert (document["ranks"], document["device"], document["backend"]) == (2, "cpu", "gloo")
    assert document["passed"] + document["failed"] + document["cannot_run_here"] == len(document["checks"])
    for row in document["checks"]:
        assert set(row) == {"check", "outcome", "detail", "figures", "seconds"}
        assert row["detail"]
        assert all(isinstance(value, float) for value in row["figures"].values())
    text = json.dumps(document)
    for private in (socket.gethostname(), str(pathlib.Path.home()), os.getcwd(), "127.0.0.1"):
        assert private not in text


def test_every_residency_path_and_type_is_compared(whole_run: Any) -> None:
    _, document = whole_run
    compared = {tuple(r["check"].removeprefix("equal to one process: ").split(", ")) for r in document["checks"][:18]}
    assert compared == {(p, r, d) for p in equality.PATHS for r in equality.RESIDENCIES for d in equality.DTYPES}
    for row in document["checks"][:18]:
        assert row["figures"]["copies"] > 0
        assert row["figures"]["gradient_error"] > 0  # rounded differently, so computed independently


def test_the_predicted_speedup_follows_the_rows_of_the_busiest_rank(whole_run: Any) -> None:
    figures = figures_of(whole_run[1], "speed of a planned step")
    assert figures["predicted_speedup"] > 1 and figures["rho_before"] > figures["rho"] >= 1
    # Layers and micro-steps have about equal numbers of rows, so both ratios are nearly equal.
    assert abs(figures["predicted_speedup"] / (figures["rho_before"] / figures["rho"]) - 1) < 0.01
    assert figures["critical_path_speedup"] > 0 and figures["wall_speedup"] > 0
    assert 0 <= figures["exposed_share"] <= 1


def test_the_last_line_recommends_the_best_depth_and_path(whole_run: Any) -> None:
    done, document = whole_run
    assert done.stdout.splitlines()[-1] == f"Advice: {document['advice']}"
    overlap = {"depth_1": 0.08, "depth_2": 0.01, "depth_4": 0.0095}
    rate = {"peer": {"gigabytes_per_second": 3.0}, "host": {"gigabytes_per_second": 8.0}}
    names = {
        "copies overlap with computing": overlap,
        "bandwidth: copies between ranks": rate["peer"],
        "bandwidth: copies from host memory": rate["host"],
    }
    outcomes = {name: Outcome(PASSED, "", figures) for name, figures in names.items()}
    assert advice_of(outcomes) == (
        "depth=2: a step waits 10.0 ms for copies; path='host': ranks send 3 GB/s, host memory 8 GB/s"
    )
    assert advice_of({}).startswith("none: ")
    assert advice_of({**outcomes, "x": Outcome(FAILED, "")}).startswith("do not train here")


def test_a_cluster_file_has_the_measured_links_and_the_other_values_of_its_base(
    whole_run: Any, tmp_path: pathlib.Path
) -> None:
    document = whole_run[1]
    file = tmp_path / "ours.toml"
    file.write_text(cluster_file_of(document, "h200"))
    assert foremoe._core._ranks_per_node(str(file)) == foremoe._core._ranks_per_node("h200")
    found = tomllib.loads(file.read_text())
    rows, peers, host = (
        1e9 * figures_of(document, f"bandwidth: {of}")["gigabytes_per_second"]
        for of in ("all-to-all", "copies between ranks", "copies from host memory")
    )
    assert found["peers"]["bytes_per_second"] == pytest.approx(peers, rel=1e-3)
    assert found["exchange"]["row_efficiency"] == pytest.approx(min(1.0, rows / peers), rel=1e-2)
    assert found["host"]["bytes_per_second"] == pytest.approx(host, rel=1e-3)


def test_a_cluster_file_needs_all_bandwidths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    own = command.all_checks(CPU, command.SPEED)
    all_to_all, between, host = (check for check in own if check.name.startswith("bandwidth"))
    given = ["--device", "cpu", "--base", "h100", "--cluster", str(tmp_path / "ours.toml")]
    for checks, exit_code, said in (
        ([all_to_all, between, host], 0, ""),
        ([all_to_all, Check(between.name, pass_quietly, "ranks share a GPU"), host], 1,
         "--cluster: bandwidth: copies between ranks: was not measured: ranks share a GPU\n"),
        ([all_to_all, between], 1, "--cluster: bandwidth: copies from host memory: was not measured: not among the"),
    ):  # fmt: skip
        monkeypatch.setattr(command, "all_checks", lambda *_, checks=checks: checks)
        assert command.main(given) == exit_code
        assert said in capsys.readouterr().err
    foremoe.evaluate(
        foremoe.synthesize_load(shape="qwen3-30b-a3b"), cluster=str(tmp_path / "ours.toml"), model="qwen3-30b-a3b"
    )


def test_delayed_copies_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Work:
        def wait(self) -> None:
            waited.append(self)

    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [Work() for _ in operations])
    with delayed_copies(0.05):
        begin = time.perf_counter()
        for work in dist.batch_isend_irecv([None, None]):  # type: ignore[list-item]
            work.wait()
    assert time.perf_counter() - begin >= 0.05 and len(waited) == 2


@pytest.mark.parametrize("path", equality.PATHS)
def test_an_executor_that_sends_wrong_experts_is_reported_as_failed(path: str) -> None:
    checks = [check for check in equality.checks() if f"{path}, shared, float32" in check.name]
    (outcome,) = outcomes(*checks, prepare=send_wrong_experts)
    assert outcome.status == FAILED
    assert "gradients are" in outcome.detail or "outputs are" in outcome.detail


def test_a_hung_rank_is_killed_and_the_next_check_gets_new_ranks() -> None:
    begin = time.monotonic()
    hangs = Check("hangs", functools.partial(on_rank_1, hang), limit=3.0)
    hung, after = outcomes(hangs, Check("passes", pass_quietly))
    assert hung.status == FAILED
    assert re.search(r"rank 0: had not ended after 3 s, in .*\bbarrier < .*test_doctor\.py:\d+ on_rank_1", hung.detail)
    assert re.search(r"rank 1: had not ended after [34] s, in test_doctor\.py:\d+ hang < test_doctor", hung.detail)
    assert after == Outcome(PASSED, "on 2 ranks", {"figure": 1.0})
    assert time.monotonic() - begin < 120


def test_a_rank_that_dies_is_named_and_the_remaining_checks_run() -> None:
    died, raised, after = outcomes(
        Check("dies", functools.partial(on_rank_1, die)),
        Check("fails", functools.partial(on_rank_1, fail), grace=1.0),
        Check("passes", pass_quietly),
    )
    assert (died.status, raised.status, after.status) == (FAILED, FAILED, PASSED)
    assert "rank 1: exited: 3" in died.detail
    assert raised.detail.startswith("rank 1: something is wrong; rank 0: ")


def test_ranks_that_do_not_start_fail_their_check() -> None:
    (outcome,) = outcomes(Check("passes", pass_quietly), prepare=fail)
    assert outcome == Outcome(FAILED, "ranks did not start: all ranks: something is wrong")


def test_a_check_that_does_not_run_never_passes() -> None:
    refused = Check("refused", pass_quietly, "there is no such device")
    assert outcomes(refused, Check("late", pass_quietly), limit=-1.0) == [
        Outcome(CANNOT_RUN, "there is no such device"),
        Outcome(CANNOT_RUN, "not run: the limit of -1 s was over"),
    ]
    assert outcomes(Check("lacks", raise_cannot_run)) == [Outcome(CANNOT_RUN, "this machine lacks it")]


@pytest.mark.parametrize(("how", "ended", "text"), [
    ("is killed", "died", f"was killed by {signal.SIGKILL.name}"), ("raises", "raised", "PlantedError: planted"),
])  # fmt: skip
def test_a_failure_check_fails_if_a_rank_returns_or_hangs(how: str, ended: str, text: str) -> None:
    last = RankReport(1, ended, 1.0, text=text)

    def judge(*reports: RankReport) -> str:
        return judge_failure(how, reports).status

    assert judge(RankReport(0, "raised", 2.0, text="an error"), last) == PASSED
    assert judge(RankReport(0, "returned", 2.0), last) == FAILED
    assert judge(RankReport(0, "hung", 35.0, text="had not ended"), last) == FAILED
    assert judge(RankReport(0, "raised", 2.0, text="an error"), RankReport(1, "returned", 1.0)) == FAILED
    late = [RankReport(0, "died", 30.0, text="killed"), RankReport(1, "raised", 1.0, text="PlantedError")]
    assert judge_failure("raises", late).status == PASSED
    assert judge_failure(WAITED_FOR, late).status == FAILED


def test_the_exit_code_is_1_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    failing = Check("fails", functools.partial(on_rank_1, fail), grace=1.0)
    monkeypatch.setattr(command, "all_checks", lambda *_: [failing, Check("passes", pass_quietly)])
    assert command.main(["--device", "cpu", "--json", str(tmp_path / "found.json")]) == 1
    assert "1 passed, 1 failed, 0 cannot run here" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["failed"] == 1


@pytest.mark.parametrize(("arguments", "words"), [
    (["--ranks", "9"], "ranks: 9, expected 2, 3, 4, 6 or 8"),
    (["--experts", "9"], "--experts: 9, must be a multiple of 2 ranks"),
    (["--layers", "0"], "--layers: 0, must be at least 1"),
    (["--check", "no such"], "no check's name contains 'no such'"),
    (["--limit", "0"], "--limit: 0.0, must be above 0"),
    (["--json", "/no/such/folder/found.json"], "--json: "),
    (["--device", "tpu"], "invalid choice"),
    (["--cluster", "/no/such/folder/ours.toml", "--base", "h100"], "--cluster: "),
    (["--cluster", "ours.toml", "--device", "cpu"], "--base: no preset has the name of this device"),
    (["--cluster", "ours.toml", "--base", "h10"], "invalid choice"),
])  # fmt: skip
def test_invalid_arguments_exit_with_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "given", "expected"), [
    (0, {}, Hardware("cpu", 0, 2, "gloo")),
    (1, {}, Hardware("cuda", 1, 2, "nccl")),
    (1, {"ranks": 4}, Hardware("cuda", 1, 4, "nccl")),
    (2, {}, Hardware("cuda", 2, 2, "nccl")),
    (3, {"ranks": 3}, Hardware("cuda", 3, 3, "nccl")),
    (7, {}, Hardware("cuda", 6, 6, "nccl")),
    (8, {}, Hardware("cuda", 8, 8, "nccl")),
    (8, {"device": "cpu", "ranks": 3}, Hardware("cpu", 0, 3, "gloo")),
])  # fmt: skip
def test_ranks_and_backend_follow_the_available_gpus(
    gpus: int, given: dict[str, Any], expected: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert find_hardware(**given) == expected


def test_scrub_removes_folders_hosts_and_addresses_but_keeps_units() -> None:
    text = f"/a/b/x.py:3 on {socket.gethostname()} [../gloo/pair.cc:5] 10.0.0.1:44 at 2 GB/s, ~/y"
    assert scrub(text) == "x.py:3 on HOST [pair.cc:5] ADDRESS:44 at 2 GB/s, y"
