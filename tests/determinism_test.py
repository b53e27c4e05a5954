"""The same input, options and seed produce the same bytes with any number of threads."""

import unittest

from foremoe_command import BUNDLED, CommandTest


class Determinism(CommandTest):
    def assert_all_equal(self, names):
        files = self.files()
        self.assertEqual(len({files[name] for name in names}), 1)

    def test_a_plan_does_not_depend_on_threads(self):
        step = self.synthesise(layers=7, experts=32)
        for way in ([], ["--residency", "shared"], ["--in-flight", 2], ["--rehome", "free"]):
            with self.subTest(way):
                for threads in (1, 2, 7):
                    self.succeed("plan", step, *way, "--threads", threads, "--out", f"plan-{threads}")
                self.assert_all_equal(["plan-1", "plan-2", "plan-7"])

    def test_a_plan_of_recorded_routes_does_not_depend_on_threads(self):
        for threads in (1, 2, 7):
            self.succeed("plan", BUNDLED, "--guest-slots", 2, "--threads", threads, "--out", f"plan-{threads}")
        self.assert_all_equal(["plan-1", "plan-2", "plan-7"])

    def test_a_load_does_not_depend_on_threads(self):
        for threads in (1, 2, 7):
            self.succeed("collect", BUNDLED, "--ranks", 16, "--threads", threads, "--out", f"load-{threads}")
        self.assert_all_equal(["load-1", "load-2", "load-7"])

    def test_a_packing_does_not_depend_on_threads(self):
        for threads in (1, 2, 7):
            self.succeed("pack", BUNDLED, "--ranks", 8, "--tokens-per-rank", 1024, "--threads", threads, "--out", f"packed-{threads}")
        self.assert_all_equal(["packed-1", "packed-2", "packed-7"])

    def test_synthesis_depends_only_on_the_seed(self):
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            self.synthesise(name, seed=seed)
        self.assert_all_equal(["a", "b"])
        files = self.files()
        self.assertNotEqual(files["a"], files["c"])


if __name__ == "__main__":
    unittest.main()
