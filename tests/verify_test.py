"""Tests that verify detects invalid plans: it exits with 1 and names the violation."""

import json
import re
import unittest

import safetensors_file as st
from foremoe_command import CommandTest


class Verify(CommandTest):
    def setUp(self):
        super().setUp()
        self.step = self.synthesise()
        self.succeed("plan", self.step, "--guest-slots", 2, "--out", "plan.safetensors")

    def violations(self, *arguments):
        done = self.foremoe("verify", self.step, "plan.safetensors", "--json", *arguments)
        report = json.loads(done.stdout)
        self.assertEqual(done.returncode, 0 if report["ok"] else 1)
        self.assertEqual(report["ok"], not report["violations"])
        return {v["kind"] for v in report["violations"]}

    def edit_tensor(self, name, edit):
        def change(metadata, tensors):
            dtype, shape, _ = tensors[name]
            values = st.values(tensors[name])
            edit(values, shape)
            tensors[name] = st.tensor(dtype, shape, values)

        self.change("plan.safetensors", change)

    def test_a_good_plan_has_no_violations(self):
        self.assertEqual(self.violations(), set())

    def test_a_plan_for_another_load_has_the_wrong_digest(self):
        self.step = self.synthesise("other.safetensors", seed=2)
        self.assertEqual(self.violations(), {"digest"})

    def test_a_plan_for_another_shape_has_the_wrong_shape(self):
        self.step = self.synthesise("other.safetensors", experts=32)
        self.assertIn("shape", self.violations())

    def test_detects_an_extra_token(self):
        def one_more(values, shape):
            values[0] += 1

        self.edit_tensor("slot_tokens", one_more)
        self.assertIn("quota", self.violations())

    def test_detects_swapped_home_slots(self):
        def swap(values, shape):
            values[0], values[1] = values[1], values[0]

        self.edit_tensor("slot_expert", swap)
        self.assertIn("home-slots", self.violations())

    def test_detects_a_dropped_replica(self):
        tokens = st.values(st.read(self.folder / "plan.safetensors")[1]["slot_tokens"])
        slots = 16 // 4 + 2
        guest = next(i for i, n in enumerate(tokens) if i % slots >= 4 and n > 0)

        def drop(values, shape):
            values[guest] = -1

        self.edit_tensor("slot_expert", drop)
        self.assertIn("quota", self.violations())

    def test_detects_an_exceeded_budget(self):
        def forbid_copies(metadata, tensors):
            metadata["options"] = json.dumps({**json.loads(metadata["options"]), "max-copies-per-rank": 0})

        self.change("plan.safetensors", forbid_copies)
        self.assertIn("copies-per-rank", self.violations())

    def test_names_unknown_and_missing_options(self):
        def too_many(metadata, tensors):
            metadata["options"] = json.dumps({**json.loads(metadata["options"]), "max-copies-per-rank": 2**31})

        def missing(metadata, tensors):
            metadata["options"] = "{}"

        self.change("plan.safetensors", too_many)
        done = self.foremoe("verify", self.step, "plan.safetensors")
        self.assertEqual(done.returncode, 1)
        self.assertIn("option max-copies-per-rank is recorded as 2147483648", done.stdout)
        self.change("plan.safetensors", missing)
        done = self.foremoe("verify", self.step, "plan.safetensors")
        for option in ("guest-slots", "residency", "in-flight"):
            self.assertIn(f"options: option {option} is not recorded", done.stdout)

    def test_recomputes_the_recorded_max_load(self):
        def better(values, shape):
            values[0] -= 1

        self.edit_tensor("max_load", better)
        self.assertIn("max-load", self.violations())

    def test_lists_violations_and_counts_the_rest(self):
        def one_more_everywhere(values, shape):
            for i in range(len(values)):
                values[i] += 1

        self.edit_tensor("slot_tokens", one_more_everywhere)
        done = self.foremoe("verify", self.step, "plan.safetensors", "--max-listed", 2)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertRegex(done.stdout, r"quota at event 0, layer 0.*expert \d+: ")
        more = int(re.search(r"… and (\d+) more", done.stdout)[1])
        self.assertIn(f"plan.safetensors is NOT a plan for {self.step}: {more + 2} violations", done.stdout)


if __name__ == "__main__":
    unittest.main()
