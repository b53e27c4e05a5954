"""python -m foremoe.torch.measure, in the small: what it tells is of what it ran."""

import json
import subprocess
import sys
import time

import pytest

SMALL = {
    "ranks": 2,
    "runs": 1,
    "layers": 2,
    "micro-steps": 2,
    "hidden": 16,
    "intermediate": 16,
    "tokens": 64,
    "experts": 8,
}


@pytest.fixture(scope="module")
def found() -> dict:
    options = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "foremoe.torch.measure", "--json", "--native", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_prediction_is_the_ratio_of_the_busiest_ranks_rows(found):
    vanilla, planned = found["medians"]["vanilla"], found["medians"]["foremoe"]
    assert found["predicted_speedup"] == vanilla["busiest_rows"] / planned["busiest_rows"] > 1
    assert vanilla["rho"] > planned["rho"] >= 1
    rows = SMALL["tokens"] * 4 * SMALL["layers"] * SMALL["micro-steps"]  # of all ranks ÷ ranks
    assert planned["busiest_rows"] >= rows


def test_experts_are_copied_where_it_is_planned_alone(found):
    assert found["medians"]["vanilla"]["copies"] == 0 < found["medians"]["foremoe"]["copies"]
    assert found["expert_bytes"] == 4 * 3 * SMALL["hidden"] * SMALL["intermediate"]


def test_delayed_copies_are_waited_for(found: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    from foremoe.torch import _measured as measured

    waited = []

    class Work:
        def wait(self) -> None:
            waited.append(self)

    monkeypatch.setattr(measured.dist, "batch_isend_irecv", lambda operations: [Work() for _ in operations])
    with measured.delayed_copies(0.05):
        begin = time.perf_counter()
        for work in measured.dist.batch_isend_irecv([None, None]):
            work.wait()
        assert time.perf_counter() - begin >= 0.05 and len(waited) == 2
    assert 0 <= found["exposed_share"] <= 1 and 0 <= found["exposed_share_delayed"] <= 1


def test_the_critical_path_is_a_part_of_what_was_computed(found):
    assert all(of["critical"] > 0 for of in found["medians"].values())
    assert found["native_seconds"] > 0
    assert found["synchronisations_per_step"] is None  # counted on CUDA alone
