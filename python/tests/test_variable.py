"""FOREMOE_ATTACH: arguments of foremoe.megatron.attach() as a text, checked when an adapter is loaded."""

from __future__ import annotations

import pathlib
import re

import pytest

import foremoe
from foremoe._variable import VARIABLE, arguments_from, given_arguments


def test_values_are_numbers_strings_and_null() -> None:
    given = arguments_from("cluster=null, residency=static,guest_slots=2,tolerance=.5,model=true,policy=None")
    assert given == {
        "mode": "shadow", "cluster": None, "residency": "static", "guest_slots": 2, "tolerance": 0.5, "model": True,
        "policy": "None",
    }  # fmt: skip
    assert type(given["guest_slots"]) is int


def test_usable_arguments_are_returned(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert given_arguments() == {"mode": "shadow"}
    file = tmp_path / "ours.toml"
    file.write_text((pathlib.Path(__file__).parents[2] / "data" / "clusters" / "h100.toml").read_text())
    text = f"mode=active,cluster={file},model=qwen3-30b-a3b,residency=auto,depth=3,on_mismatch=home,prefer=null"
    monkeypatch.setenv(VARIABLE, text)
    assert given_arguments()["cluster"] == str(file)


@pytest.mark.parametrize(("text", "said"), [
    ("cluster=h10", "cluster: 'h10' is neither a file nor one of a100, gb200, h100, h20, h200; did you mean h100?"),
    ("cluster=h100,model=Qwen3-30B", "model: 'Qwen3-30B' is neither a file nor one of"),
    (f"cluster={__file__}", f"cluster: {__file__} line 1: is not TOML"),
    ("clustr=h100", "clustr: is no argument of attach(); did you mean cluster?"),
    ("model_chunks=1", "model_chunks: is no argument of attach(); expected one of mode,"),
    ("mode=actve", "mode: 'actve', expected active, static or shadow"),
    ("mode=active,guest_slots=1,mode=shadow", "mode: is given twice, with 'active' and 'shadow'"),
    ("policy=forem", "policy: 'forem', expected one of"),
    ("residency=free", "residency: 'free', expected static, resident, shared or auto"),
    ("on_mismatch=drop", "on_mismatch: 'drop', expected refuse or home"),
    ("depth=0", "depth: 0, expected an integer from 1 on"),
    ("threads=two", "threads: 'two', expected an integer from 0 on"),
    ("mode=static,residency=shared", "residency: 'shared', but mode='static' stands for residency='static'"),
    ("ranks_per_node=false", "ranks_per_node: False, expected an integer from 1 on"),
    ("guest_slots=null", "guest_slots: None, expected an integer from 0 on"),
    ("mode=active,prefer=tim", "prefer: 'tim', expected balance, links or time"),
    ("guest_slots=-1", "guest_slots: -1, expected an integer from 0 on"),
])  # fmt: skip
def test_others_are_refused_with_their_name(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(foremoe.InputError, match=re.escape(f"FOREMOE_ATTACH: {said}")):
        given_arguments()
