"""python -m foremoe.supported FILE reads launch files without running them, and names what it cannot resolve."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from foremoe.supported import check
from foremoe.supported.launch_file import Launch, read

SHELL = """#!/bin/bash
touch ran  # must not run
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/sizes.sh"
EP=${EP:-8}
if [ "$EP" -lt 4 ]; then EP=2; fi
if [ "$MODE" = "wide" ]; then CP=4; else CP=1; fi
if [ -z "$UNKNOWN" ]; then PP=2; fi
[ "$EP" -gt 4 ] && ETP=1 || ETP=2
ACTOR=(
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP}  # a comment
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_lunar_phase=1
    actor_rollout_ref.actor.megatron.router_replay.mode="R3"
    actor_rollout_ref.rollout.enable_rollout_routing_replay=$RECORDED
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=$ETP
)
ACTOR+=(actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP)
python3 -m verl.trainer.main_ppo model_engine=megatron \\
    "${ACTOR[@]}" "${SIZES[@]}" actor_rollout_ref.actor.megatron.context_parallel_size=$CP \\
    actor_rollout_ref.model.path="$(date)" "$@" 2>&1 | tee log
"""


def written(folder: pathlib.Path, name: str, text: str) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def command(*arguments: str) -> Any:
    return subprocess.run([sys.executable, "-m", "foremoe.supported", *arguments], capture_output=True, text=True)


def shell(folder: pathlib.Path, RECORDED: str = "True", **given: str) -> Launch:
    pytest.importorskip("tree_sitter_bash")
    written(folder, "models/sizes.sh", "SIZES=(actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2)\n")
    return read(written(folder, "run.sh", SHELL), {"RECORDED": RECORDED} | given)


def test_a_shell_script_is_followed_but_not_run(tmp_path: pathlib.Path) -> None:
    launch = shell(tmp_path, MODE="wide")
    assert launch.mapping["framework"] == "verl" and launch.mapping["engine"] == "megatron"
    assert launch.mapping["replay"] == "R3"
    sizes = {"tensor_model": "2", "context": "4", "expert_model": "8", "expert_tensor": "1"}
    expected = {f"{of}_parallel_size": size for of, size in sizes.items()} | {"moe_lunar_phase": "1"}
    assert launch.mapping["settings"] == expected
    assert not (tmp_path / "ran").exists()
    assert shell(tmp_path, RECORDED="False").mapping["replay"] == "disabled"


def test_values_that_a_script_leaves_open_are_named_and_not_guessed(tmp_path: pathlib.Path) -> None:
    launch = shell(tmp_path)
    assert launch.unresolved == {
        "context_parallel_size": "$CP", "pipeline_model_parallel_size": "$PP",
    }  # fmt: skip
    said = command(str(tmp_path / "run.sh"))
    assert "depends on context_parallel_size, pipeline_model_parallel_size\n" in said.stdout, said


def test_flags_of_megatron_are_read(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tree_sitter_bash")
    text = (
        "ray job submit -- python3 train.py --rollout-batch-size 8 --expert-model-parallel-size 4 --colocate ${A[@]} "
    )
    launch = read(written(tmp_path, "run.sh", text + "--use-rollout-routing-replay --fp8-format=e4m3\n"), {})
    assert launch.mapping["framework"] == "slime" and launch.mapping["flags"] == ["offload_train"]
    assert [of.field for of in check(launch.mapping).active] == ["fp8"]
    assert check(launch.mapping).shadow == ()


SLIME = "python3 train.py --rollout-batch-size 8 --expert-model-parallel-size 4 --use-rollout-routing-replay"


@pytest.mark.parametrize("text", [
    f"export FOREMOE_ATTACH=mode=active,cluster=h10\n{SLIME}",
    f"NAME=h10\nFOREMOE_ATTACH=mode=active,cluster=$NAME EMPTY= {SLIME}",
    f"env FOREMOE_ATTACH=mode=active,cluster=h10 {SLIME}",
    f"""{SLIME} --train-env-vars '{{"A": "b", "FOREMOE_ATTACH": "mode=active,cluster=h10"}}'""",
    f"""ray job submit --runtime-env-json "{{\\"FOREMOE_ATTACH\\": \\"mode=active,cluster=h10\\"}}" -- {SLIME}""",
    "python3 -m verl.trainer.main_ppo model_engine=megatron actor_rollout_ref.actor.megatron.context_parallel_size=1 "
    """"+ray_kwargs.ray_init.runtime_env.env_vars.FOREMOE_ATTACH='mode=active,cluster=h10'" """,
])  # fmt: skip
def test_arguments_of_foremoe_are_found_and_checked_wherever_a_trainer_takes_them(
    tmp_path: pathlib.Path, text: str
) -> None:
    pytest.importorskip("tree_sitter_bash")
    launch = read(written(tmp_path, "run.sh", text), {})
    assert launch.mapping["FOREMOE_ATTACH"] == "mode=active,cluster=h10"
    for reasons in (check(launch.mapping).active, check(launch.mapping).shadow):
        (said,) = (str(of) for of in reasons if of.field == "FOREMOE_ATTACH")
        assert "cluster: 'h10' is neither a file nor one of a100, gb200, h100, h20, h200; did you mean h100?" in said


def test_arguments_of_foremoe_that_a_script_leaves_open_are_named(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tree_sitter_bash")
    file = written(tmp_path, "run.sh", f"export FOREMOE_ATTACH=mode=active,cluster=$CLUSTER\n{SLIME}\n")
    said = command(file).stdout
    assert "not resolved: FOREMOE_ATTACH = mode=active,cluster=$CLUSTER\n" in said, said
    assert "active mode: runs; depends on FOREMOE_ATTACH\n" in said
    assert "active mode: refused" in command(file, "CLUSTER=h10").stdout


def test_yaml_is_merged_onto_its_defaults_and_interpolated(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("yaml")
    base = (
        "policy: {ep: 4, router_replay: {enabled: true}, megatron_cfg: {enabled: false, tensor_model_parallel_size: 2}}"
        "\nenvironment: {FOREMOE_ATTACH: 'mode=active,guest_slots=2'}"
    )
    written(tmp_path, "base.yaml", base)
    text = "defaults: base.yaml\npolicy: {megatron_cfg: {enabled: true, expert_model_parallel_size: '${policy.ep}'}}\n"
    launch = read(written(tmp_path, "run.yaml", text), {})
    assert launch.mapping["settings"] == {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2}
    assert launch.mapping["FOREMOE_ATTACH"] == "mode=active,guest_slots=2"
    assert check(launch.mapping).active == ()


def test_toml_and_json_are_read(tmp_path: pathlib.Path) -> None:
    launch = read(written(tmp_path, "run.toml", "[trainer.model]\nep = 8\n"), {})
    assert (launch.mapping["framework"], launch.mapping["engine"]) == ("prime-rl", "torch (FSDP2+EP)")
    assert read(written(tmp_path, "run.json", '{"framework": "verl"}'), {}).mapping == {"framework": "verl"}


@pytest.mark.parametrize(("name", "text", "said"), [
    ("run.toml", "a = [", "file: Invalid value"),
    ("run.json", "[]", "file: is no JSON object"),
    ("run.toml", "a = 1", "file: has no settings of verl"),
    ("run.py", "x = 1", "not one that only starts Python"),
    ("run.sh", "\udcff", "file: is no text"),
    ("", "", "file: Is a directory"),
])  # fmt: skip
def test_other_files_give_one_line_and_exit_status_2(tmp_path: pathlib.Path, name: str, text: str, said: str) -> None:
    if name:
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    done = command(str(tmp_path / name))
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1 and name in done.stderr
