"""Tests compare --policy all: all systems in a fixed order, each with figures or the reason why it was skipped."""

import unittest

from foremoe_command import CommandTest

SYSTEMS = (
    "vanilla, static, eplb, eplb-ema, ema, eplb-oracle, finemoe-random, finemoe-symmetric, finemoe, feplb, "
    "foremoe-review, ultraep, relibra, fastermoe, flexmoe, lplb, laer, smartmoe, symi, llep, moonep, echo, foremoe"
).split(", ")


class CompareAll(CommandTest):
    def test_prints_every_system_in_a_fixed_order_with_the_keys_of_plan_or_a_reason(self):
        load = self.synthesise()
        keys = set(self.json_of("plan", load, "--guest-slots", 1, "--out", "plan.safetensors"))
        compared = self.json_of("compare", load, "--guest-slots", 1, "--policy", "all")
        self.assertEqual([system["policy"] for system in compared], SYSTEMS)
        for system in compared:
            with self.subTest(system["policy"]):
                if "skipped" in system:
                    self.assertTrue(system["skipped"])
                else:
                    self.assertLessEqual(keys, set(system))
        planned = {system["policy"] for system in compared if "skipped" not in system}
        self.assertLessEqual({"vanilla", "eplb", "laer", "llep", "moonep", "echo", "foremoe"}, planned)

    def test_options_of_a_policy_do_not_affect_other_policies(self):
        load = self.synthesise()
        arguments = ("compare", load, "--guest-slots", 1, "--policy", "eplb,eplb-ema")
        plain = self.json_of(*arguments)
        chosen = self.json_of(*arguments, "--policy-option", "period=1", "--policy-option", "alpha=1")
        self.assertEqual(plain[0]["rho"], chosen[0]["rho"])
        self.assertNotEqual(plain[1]["rho"], chosen[1]["rho"])


if __name__ == "__main__":
    unittest.main()
