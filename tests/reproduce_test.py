"""foremoe reproduce: experiments listed, one done from end to end, and the page that tells their results."""

import os
import pathlib
import subprocess
import sys
import unittest

from foremoe_command import FOREMOE, ROOT, CommandTest

SMALL = """
title = "A hot rank"
source = "nowhere"
about = "About."
reading = "Reading."
columns = ["rho_mean", "straggler", "plan_us"]

[[input]]
label = "w2"
routing = "w2"
ranks = 4
experts = 16
top_k = 2
layers = 1
micro_steps = 2
tokens_per_rank = 100

[[system]]
label = "none"
policy = "vanilla"

[[published]]
input = "w2"
system = "none"
column = "rho_mean"
value = 2.4

[[aim]]
column = "straggler"
at_most = 300
"""


MODELLED = """
title = "Two layers that stand for a model"
source = "nowhere"
about = "About."
reading = "Reading."
columns = ["step_ms"]

[[input]]
label = "grpo"
model = "Qwen3-30B-A3B"
cluster = "h100"
layers = 2
micro_steps = 4
ranks = 8
tokens_per_rank = 1024
seed = 3

[[system]]
label = "none"
policy = "vanilla"

[[system]]
label = "ours"
policy = "foremoe"
guest_slots = 2
"""


class Reproduce(CommandTest):
    def experiments(self):
        return {path.stem for path in (ROOT / "reproduce").glob("*.toml")}

    def test_simulate_and_reproduce_agree_on_seconds(self):
        (self.folder / "modelled.toml").write_text(MODELLED)
        result = self.json_of("reproduce", "modelled.toml")
        reproduced = [row["step_ms"] for row in result["rows"]]
        self.succeed("synth", "--shape", "Qwen3-30B-A3B", "--layers", 2, "--micro-steps", 4, "--ranks", 8,
                     "--tokens-per-rank", 1024, "--seed", 3, "--out", "same.load.safetensors")  # fmt: skip
        simulated = self.json_of("simulate", "same.load.safetensors", "--cluster", "h100", "--model", "Qwen3-30B-A3B",
                                 "--guest-slots", 2, "--policy", "vanilla,foremoe")  # fmt: skip
        for milliseconds, row in zip(reproduced, simulated, strict=True):
            self.assertAlmostEqual(milliseconds / 1e3 / row["step_seconds"], 1, delta=1e-12)

    def test_the_list_has_every_file_of_the_repository(self):
        listed = {e["name"] for e in self.json_of("reproduce", "--list")}
        self.assertEqual(listed, self.experiments())
        text = self.succeed("reproduce", "--list")
        for name in listed:
            self.assertIn(name, text)

    def test_an_own_file_is_carried_out_with_figures_that_its_definition_says(self):
        (self.folder / "mine.toml").write_text(SMALL)
        result = self.json_of("reproduce", "mine.toml")
        self.assertEqual(result["name"], "mine")
        self.assertEqual(result["columns"], {"rho_mean": "exact", "straggler": "exact", "plan_us": "measured here"})
        (row,) = result["rows"]
        self.assertEqual((row["input"], row["system"], row["rho_mean"], row["straggler"]), ("w2", "none", 2.5, 300))
        self.assertEqual([aim["met"] for aim in result["aims"]], [True])
        text = self.succeed("reproduce", "mine.toml", "--markdown")
        self.assertIn("| w2 | none | 2.5000 | 2.4 | 300 |", text)
        self.assertIn("2.4", self.succeed("reproduce", "mine.toml"))

    def test_an_experiment_of_the_program_needs_no_file(self):
        result = self.json_of("reproduce", "feplb-straggler")
        self.assertEqual(result["name"], "feplb-straggler")
        self.assertFalse([row for row in result["rows"] if "skipped" in row])
        self.assertTrue(any(p["system"] == "FEPLB" and p["value"] == 70 for p in result["published"]))
        exact = [{k: v for k, v in row.items() if result["columns"].get(k) != "measured here"} for row in result["rows"]]
        again = self.json_of("reproduce", "feplb-straggler", "--threads", 1)
        self.assertEqual(exact, [{k: v for k, v in r.items() if again["columns"].get(k) != "measured here"} for r in again["rows"]])

    def test_what_cannot_be_is_refused_with_its_name(self):
        self.refuse("reproduce", "no-such-experiment", saying=["'no-such-experiment'", "feplb-straggler"])
        self.refuse("reproduce", saying=["NAME"])
        self.refuse("reproduce", "missing.toml", saying=["missing.toml"])
        (self.folder / "mine.toml").write_text(SMALL.replace("policy = ", "polcy = "))
        self.refuse("reproduce", "mine.toml", saying=["mine.toml", "system[0].policy", "is missing"])

    def test_what_cannot_be_in_an_own_file_is_named_with_file_and_field(self):
        for text, saying in (
            ("", ["title", "is missing"]),
            (SMALL.replace("ranks = 4", "ranks = 7"), ["input[0].ranks", "7", "16 experts"]),
            (SMALL.replace("ranks = 4", 'ranks = 4\ncluster = "b300"\nmodel = "Mixtral-8x7B"'), ["input[0].cluster", "b300", "gb200"]),
            (SMALL.replace("ranks = 4", "ranks = 1"), ["w2", "ranks: must be at least 2"]),
        ):
            with self.subTest(saying):
                (self.folder / "mine.toml").write_text(text)
                self.refuse("reproduce", "mine.toml", saying=["mine.toml", *saying])
        (self.folder / "folder.toml").mkdir()
        done = self.foremoe("reproduce", "folder.toml")
        self.assertEqual(done.returncode, 2)
        self.assertIn("folder.toml: is a folder", done.stderr)

    def test_the_command_in_the_text_is_one_that_runs(self):
        (self.folder / "mine.toml").write_text(SMALL)
        text = self.succeed("reproduce", "mine.toml", "--markdown")
        (line,) = [line for line in text.splitlines() if line.startswith("    foremoe ")]
        self.succeed(*line.split()[1:])
        self.assertIn("    foremoe reproduce feplb-straggler\n", self.succeed("reproduce", "feplb-straggler", "--markdown"))

    def test_the_page_of_results_tells_every_experiment_and_no_other(self):
        self.assertTrue((ROOT / "docs" / "results.md").exists())
        done = subprocess.run([sys.executable, str(ROOT / "scripts" / "results"), "--check"], capture_output=True, text=True,
                              env={**os.environ, "FOREMOE": str(pathlib.Path(FOREMOE).resolve())})
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)


if __name__ == "__main__":
    unittest.main()
