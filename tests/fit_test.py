"""Tests foremoe fit: its figures equal those of run, simulate and plan, and its exit code says whether a step fits."""

import json
import unittest

from foremoe_command import CommandTest

HIDDEN, INTERMEDIATE = 256, 128


class Fit(CommandTest):
    def setUp(self):
        super().setUp()
        self.step = self.synthesise(micro_steps=3, tokens_per_rank=512)
        (self.folder / "small.json").write_text(json.dumps({
            "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "intermediate_size": 128,
            "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}))  # fmt: skip
        self.modelled = (self.step, "--cluster", "h100", "--model", "small.json")

    def test_rows_and_guest_bytes_equal_those_of_an_execution(self):
        for residency in ("static", "resident", "shared"):
            with self.subTest(residency):
                planning = ("--guest-slots", 2, "--residency", residency)
                fit = self.json_of("fit", *self.modelled, *planning, "--bytes-per-parameter", 4)
                ran = self.json_of("run", self.step, "--hidden", HIDDEN, "--intermediate", INTERMEDIATE, "--policy", "vanilla,foremoe",
                                   "--no-reference", "--repeats", 1, *planning)  # fmt: skip
                for part in ("now", "planned"):
                    rows = [row for row in ran if row["policy"] == fit[part]["policy"]]
                    self.assertEqual([row["phase"] for row in rows], ["recompute", "policy_update"])
                    self.assertEqual({row["most_rows"] for row in rows}, {fit[part]["most_rows"]["rows"]})
                    update = rows[1]
                    self.assertEqual(update["guest_weight_bytes_per_rank"], fit[part]["memory"]["guest_weights"])
                    self.assertEqual(update["guest_gradient_bytes_per_rank"], fit[part]["memory"]["guest_gradients"])

    def test_exit_code_says_whether_the_plan_fits_the_budget(self):
        most = self.json_of("fit", *self.modelled)["planned"]["most_memory"]["bytes"]
        for spare, code in ((1000, 0), (-1000, 1)):
            done = self.foremoe("fit", *self.modelled, "--memory-budget", (most + spare) / 1e9, "--json")
            self.assertEqual(done.returncode, code, done.stderr)
            found = json.loads(done.stdout)
            self.assertEqual(found["fits"], code == 0)
            self.assertEqual(found["planned"]["exceeds"] is None, code == 0)

    def test_text_shows_the_limit_the_place_and_the_capacities(self):
        done = self.foremoe("fit", *self.modelled, "--memory-budget", 0.01)
        self.assertEqual(done.returncode, 1)
        for words in ("limit 0.0 GB per rank (budget)", "first too large", "recompute, rank", "no number of guest slots up to 4 fits",
                      "moe_expert_rank_capacity_factor", "non_blocking_capacity_factor", "copies pay from"):  # fmt: skip
            self.assertIn(words, done.stdout)

    def test_wrong_input_is_refused(self):
        self.refuse("fit", self.step, "--model", "small.json", saying=["--cluster"])
        self.refuse("fit", *self.modelled, "--memory-budget", "-1", saying=["--memory-budget"])
        self.refuse("fit", *self.modelled, "--most-guest-slots", "65", saying=["--most-guest-slots"])
        self.refuse("fit", *self.modelled, "--policy", "vanilla,foremoe", saying=["policy"])
        (self.folder / "cut.safetensors").write_bytes((self.folder / self.step).read_bytes()[:-8])
        self.refuse("fit", "cut.safetensors", "--cluster", "h100", saying=["cut.safetensors"])


if __name__ == "__main__":
    unittest.main()
