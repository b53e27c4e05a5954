"""Tests foremoe maps. Each file passes the checks of its engine, written here again from the engine's sources."""

import collections
import json
import math
import re
import unittest

import safetensors_file as st
from foremoe_command import CommandTest

RANKS, EXPERTS, LAYERS = 4, 16, 2


def read_by_sglang(path, hidden_layers, ep_size, redundant):
    """srt/eplb/expert_location.py: one row per hidden layer, all replicas known; returns the replicas of each expert."""
    rows = json.loads(path.read_text())["physical_to_logical_map"]
    physical = EXPERTS + redundant
    assert physical % ep_size == 0
    assert len(rows) == hidden_layers
    replicas = [[[i for i, of in enumerate(row) if of == e] for e in range(EXPERTS)] for row in rows]
    assert all(sum(map(len, of)) == len(row) == physical for of, row in zip(replicas, rows, strict=True))
    assert all(map(all, replicas))
    return rows


def read_by_tensorrt_llm(path, layer_ids, ep_size):
    """llmapi/llm_args.py, MoeLoadBalancerConfig: known fields, a list of num_slots experts for each MoE layer."""
    fields, assignments = {}, {}
    for line in path.read_text().splitlines():
        if of_layer := re.fullmatch(r"  (\d+): \[([\d, ]+)\]", line):
            assignments[int(of_layer[1])] = [int(e) for e in of_layer[2].split(", ")]
        else:
            name, _, value = line.partition(": ")
            fields[name.rstrip(":")] = value
    assert fields == {"initial_global_assignments": "", "layer_updates_per_iter": "0", "num_slots": fields["num_slots"]}
    slots = int(fields["num_slots"])
    assert slots % ep_size == 0
    assert sorted(assignments) == layer_ids
    assert all(len(of) == slots and set(of) == set(range(EXPERTS)) for of in assignments.values())
    return [assignments[layer] for layer in layer_ids]


def read_by_vllm_ascend(path, moe_layers, ep_size):
    """eplb/core/eplb_utils.py: devices have equally many experts, all different, since a map gives each its slot."""
    data = json.loads(path.read_text())
    assert data["moe_layer_count"] == len(data["layer_list"]) == moe_layers
    rows = []
    for number, layer in enumerate(data["layer_list"]):
        devices = [device["device_expert"] for device in layer["device_list"]]
        assert (layer["layer_id"], layer["device_count"], len(devices)) == (number, ep_size, ep_size)
        assert [device["device_id"] for device in layer["device_list"]] == list(range(ep_size))
        assert len({len(device) for device in devices}) == 1
        assert all(len({*device}) == len(device) for device in devices)
        assert {e for device in devices for e in device} == set(range(EXPERTS))
        rows.append([e for device in devices for e in device])
    return rows


class Maps(CommandTest):
    def setUp(self):
        super().setUp()
        self.step = self.synthesise(ranks=RANKS, experts=EXPERTS, layers=LAYERS, tokens_per_rank=256, step_spread=1)

    def map(self, source, engine, *options):
        out = f"{engine}.{'yaml' if engine == 'tensorrt-llm' else 'json'}"
        report = self.json_of("maps", source, "--to", engine, "--out", out, *options)
        self.assertEqual((report["out"], report["layers"], report["experts"]), (out, LAYERS, EXPERTS))
        self.assertIn(out, report["settings"])
        return self.folder / out, report

    def test_each_engine_reads_the_same_placement_of_a_load(self):
        path, report = self.map(self.step, "sglang", "--dense-layers", 3)
        self.assertIn("--ep-size 4 --ep-num-redundant-experts 4", report["settings"])
        sglang = read_by_sglang(path, LAYERS + 3, RANKS, 4)
        self.assertEqual(sglang[:3], [[*range(EXPERTS), *range(4)]] * 3)
        path, _ = self.map(self.step, "tensorrt-llm", "--dense-layers", 3)
        self.assertEqual(read_by_tensorrt_llm(path, [3, 4], RANKS), sglang[3:])

    def test_devices_of_vllm_ascend_have_different_experts(self):
        for slots in range(5):
            path, report = self.map(self.step, "vllm-ascend", "-G", slots)
            self.assertEqual(len(read_by_vllm_ascend(path, LAYERS, RANKS)[0]), report["replicas"])
            self.assertEqual(report["replicas"], EXPERTS + RANKS * slots)

    def test_the_engine_may_have_other_ranks_than_the_trainer(self):
        path, _ = self.map(self.step, "sglang", "--ranks", 8, "-G", 2)
        read_by_sglang(path, LAYERS, 8, 16)

    def test_experts_with_more_tokens_have_more_replicas(self):
        path, _ = self.map(self.step, "sglang", "-G", 4)
        tensor = st.values(st.read(self.folder / self.step)[1]["load"])
        for layer, row in enumerate(read_by_sglang(path, LAYERS, RANKS, 16)):
            tokens = [sum(tensor[i] for i in range(len(tensor)) if i % EXPERTS == e and i // EXPERTS // RANKS % LAYERS == layer)
                      for e in range(EXPERTS)]  # fmt: skip
            replicas = collections.Counter(row)
            self.assertGreater(replicas[tokens.index(max(tokens))], replicas[tokens.index(min(tokens))])

    def test_groups_of_experts_stay_on_their_node(self):
        step = self.synthesise(ranks=RANKS, experts=EXPERTS, layers=LAYERS, ranks_per_node=2)
        path, _ = self.map(step, "sglang", "--expert-groups", 4)
        for row in read_by_sglang(path, LAYERS, RANKS, 4):
            for group in range(4):
                self.assertEqual(len({i // 10 for i, e in enumerate(row) if e // 4 == group}), 1)

    def test_a_plan_s_placement_is_taken_and_its_empty_slots_are_filled(self):
        self.succeed("plan", self.step, "-G", 3, "--residency", "static", "--out", "plan.safetensors")
        path, report = self.map("plan.safetensors", "vllm-ascend")
        self.assertEqual(report["replicas"], EXPERTS + 3 * RANKS)
        rows = read_by_vllm_ascend(path, LAYERS, RANKS)
        tensors = st.read(self.folder / "plan.safetensors")[1]
        events, *shape = tensors["slot_expert"][1]
        planned, tokens = st.values(tensors["slot_expert"]), st.values(tensors["slot_tokens"])
        self.assertEqual(shape, [LAYERS, RANKS, EXPERTS // RANKS + 3])
        in_layer = RANKS * shape[-1]
        self.assertIn(-1, planned)
        for layer, row in enumerate(rows):
            slots = planned[layer * in_layer : (layer + 1) * in_layer]
            served = collections.Counter()
            for event in range(events):
                at = (event * LAYERS + layer) * in_layer
                for e, n in zip(planned[at : at + in_layer], tokens[at : at + in_layer], strict=True):
                    served[e] += n
            replicas = collections.Counter(e for e in slots if e >= 0)
            for slot, (taken, e) in enumerate(zip(slots, row, strict=True)):
                if taken >= 0:
                    self.assertEqual(e, taken)
                    continue
                rank = slot // shape[-1] * shape[-1]
                here = {*row[rank:slot], *(of for of in slots[rank : rank + shape[-1]] if of >= 0)}
                best = max((of for of in range(EXPERTS) if of not in here), key=lambda of: (served[of] / replicas[of], -of))
                self.assertEqual(e, best)
                replicas[e] += 1

    def test_refuses_what_the_engine_would_not_read(self):
        out = ("--out", "map.json")
        self.refuse("maps", self.step, "--to", "vllm", *out, saying=["--to: vLLM reads no file", "foremoe.eplb.vllm_policy()"])
        self.refuse("maps", self.step, "--to", "sglang", "--out", "map.pt", saying=["--out: map.pt must end in .json"])
        self.refuse("maps", self.step, "--to", "tensorrt-llm", *out, saying=["must end in .yaml"])
        self.refuse("maps", self.step, "--to", "vllm-ascend", "--dense-layers", 1, *out, saying=["--dense-layers: must be 0"])
        self.refuse("maps", self.step, "--to", "sglang", "-G", 13, *out, saying=["--guest-slots: 13, expected at most 12"])
        self.refuse("maps", self.step, "--to", "sglang", "--ranks", 3, *out, saying=["--ranks: 19 replicas cannot be spread"])
        metadata, tensors = st.read(self.folder / self.step)
        dtype, shape, _ = tensors["load"]
        tensors["load"] = st.tensor(dtype, shape, [0] * math.prod(shape))
        st.write(self.folder / "zero.safetensors", metadata, tensors)
        self.refuse("maps", "zero.safetensors", "--to", "sglang", *out, saying=["zero.safetensors: has no tokens"])
        self.refuse("maps", self.step, "--to", "sglang", "--ranks", 3, *out, saying=["19 replicas", "3 ranks"])
        self.refuse("maps", self.step, "--to", "sglan", *out, saying=["sglang"])

    def test_refuses_an_expert_twice_on_a_device_of_vllm_ascend(self):
        """A node has a group of two experts, so that three slots of its only rank repeat one."""
        step = self.synthesise(ranks=2, experts=4, layers=1, ranks_per_node=1)
        maps = ("maps", step, "--out", "map.json", "-G", 1, "--expert-groups")
        self.refuse(*maps, 2, "--to", "vllm-ascend", saying=["layer 0, rank 0: expert", "is placed twice", "fewer guest slots"])
        self.succeed(*maps, 1, "--to", "vllm-ascend")
        self.succeed(*maps, 2, "--to", "sglang")

    def test_a_device_of_vllm_ascend_has_an_expert_once_even_if_some_have_no_tokens(self):
        step = self.synthesise(ranks=2, experts=4, layers=1, micro_steps=1, top_k=1)
        metadata, tensors = st.read(self.folder / step)
        dtype, shape, _ = tensors["load"]
        tensors["load"] = st.tensor(dtype, shape, [0, 1, 1, 2] * 2)
        st.write(self.folder / "hot.safetensors", metadata, tensors)
        self.succeed("maps", "hot.safetensors", "--to", "vllm-ascend", "-G", 2, "--out", "map.json")
        layer = json.loads((self.folder / "map.json").read_text())["layer_list"][0]
        self.assertEqual([sorted(device["device_expert"]) for device in layer["device_list"]], [[0, 1, 2, 3]] * 2)

    def test_refuses_traces_and_plans_that_change(self):
        out = ("--to", "sglang", "--out", "map.json")
        self.succeed("synth", "--kind", "trace", "--ranks", 4, "--experts", 16, "--layers", 1, "--micro-steps", 2,
                     "--tokens-per-rank", 16, "--out", "trace.safetensors")  # fmt: skip
        self.refuse("maps", "trace.safetensors", *out, saying=["trace.safetensors: is a trace, expected a load or a plan. Count it with: foremoe collect trace.safetensors"])
        self.succeed("plan", self.step, "-G", 1, "--policy", "moonep", "--out", "plan.safetensors")
        self.refuse("maps", "plan.safetensors", *out, saying=["plan.safetensors: slot_expert[1, 0, ", "--residency static"])
        self.refuse("maps", "plan.safetensors", *out, "-G", 2, saying=["--guest-slots: cannot be combined with a plan"])


if __name__ == "__main__":
    unittest.main()
