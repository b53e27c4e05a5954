"""Tests plan, verify and compare on the load tables and recorded rollouts in data/."""

import unittest

from foremoe_command import DATA, CommandTest


class BundledData(CommandTest):
    def plan_verify_compare(self, path, *options):
        figures = self.json_of("plan", path, *options, "--out", "plan.safetensors")
        self.assertTrue(self.json_of("verify", path, "plan.safetensors")["ok"])
        vanilla, planned = self.json_of("compare", path, *options, "--policy", "vanilla,foremoe")
        self.assertEqual(planned["rho"], figures["rho"])
        self.assertLess(planned["rho"]["mean"], vanilla["rho"]["mean"])

    def test_every_load_table_is_planned_and_verified(self):
        tables = sorted(DATA.glob("load-*.safetensors"))
        self.assertTrue(tables)
        for path in tables:
            with self.subTest(path.name):
                self.plan_verify_compare(path, "--layers", 1, "--micro-steps", 3)

    def test_a_rollout_with_recorded_batching(self):
        self.plan_verify_compare(DATA / "rollout-math-full.safetensors")

    def test_a_rollout_without_recorded_batching(self):
        self.refuse("plan", DATA / "rollout-mixed.safetensors", saying=["rollout-mixed", "--ranks"])
        self.plan_verify_compare(DATA / "rollout-mixed.safetensors", "--ranks", 8)


if __name__ == "__main__":
    unittest.main()
