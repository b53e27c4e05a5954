"""Tests foremoe simulate: modelled times per policy, and the keys of its JSON."""

import json
import unittest

from foremoe_command import CommandTest

FIXED = {"step_seconds", "speedup_over_vanilla", "ideal_step_seconds", "exposed_copy_seconds", "peak_tokens_per_rank",
         "memory_bytes_per_rank", "rl_step_speedup"}  # fmt: skip
PARTS = {"arena_refresh", "dense", "planning", "dispatch", "experts", "combine", "exposed_copies", "exposed_gradients", "optimizer",
         "data_parallel"}  # fmt: skip


class Simulate(CommandTest):
    def setUp(self):
        super().setUp()
        self.step = self.synthesise(micro_steps=3, tokens_per_rank=512)
        (self.folder / "small.json").write_text(json.dumps({
            "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128,
            "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}))  # fmt: skip

    def simulate(self, *arguments):
        """Without a choice of the plan, unless the arguments name a residency."""
        fixed = () if "--residency" in arguments else ("--residency", "resident")
        return self.json_of("simulate", self.step, "--cluster", "h100", "--model", "small.json", "--guest-slots", 1, *fixed, *arguments)

    def test_json_has_one_object_per_policy_with_the_keys_of_compare(self):
        rows = self.simulate("--policy", "foremoe,eplb,vanilla")
        compared = self.json_of("compare", self.step, "--guest-slots", 1, "--policy", "foremoe,eplb,vanilla")
        self.assertEqual([row["policy"] for row in rows], ["foremoe", "eplb", "vanilla"])
        for row, other in zip(rows, compared):
            self.assertLessEqual(FIXED | other.keys() - {"ok"}, row.keys())
            for phase in row["phases"]:
                self.assertEqual(phase["parts"].keys(), PARTS)
                self.assertAlmostEqual(sum(phase["parts"].values()), phase["seconds"], places=9)
            self.assertAlmostEqual(row["step_seconds"], row["home_move_seconds"] + sum(s["seconds"] for s in row["phases"]))
            self.assertLessEqual(row["ideal_step_seconds"], row["step_seconds"])
        vanilla = rows[2]
        self.assertEqual(vanilla["speedup_over_vanilla"], 1)
        self.assertEqual(vanilla["exposed_copy_seconds"], 0)
        for row in rows:
            self.assertAlmostEqual(row["speedup_over_vanilla"], vanilla["step_seconds"] / row["step_seconds"])

    def test_a_load_matches_its_trace_exactly_by_row_and_approximately_by_token(self):
        self.succeed("synth", "--kind", "trace", "--out", "two.trace.safetensors", "--layers", 2, "--experts", 16, "--top-k", 2, "--ranks", 4,
                     "--micro-steps", 3, "--tokens-per-rank", 512, "--group-spread", 1)  # fmt: skip
        self.succeed("collect", "two.trace.safetensors", "--out", "two.load.safetensors")

        def simulated(kind, dispatch):
            rows = self.json_of("simulate", f"two.{kind}.safetensors", "--cluster", "h100", "--model", "small.json", "--guest-slots", 1,
                                "--ranks-per-node", 2, "--policy", "vanilla,foremoe", "--dispatch", dispatch, "--sequence-tokens", 512)  # fmt: skip
            for row in rows:
                self.assertEqual(row["dispatch"], dispatch)
                self.assertEqual(row["dispatch_estimated"], (kind, dispatch) == ("load", "token"))
            return [(row["step_seconds"], row["pairs"]) for row in rows]

        self.assertEqual(simulated("trace", "row"), simulated("load", "row"))
        for counted, expected, by_row in zip(simulated("trace", "token"), simulated("load", "token"), simulated("trace", "row")):
            self.assertLess(counted[1], by_row[1], "rows between nodes")
            self.assertAlmostEqual(expected[0] / counted[0], 1, delta=0.03)

    def test_attention_uses_the_lengths_in_a_trace_unless_a_length_is_given(self):
        self.succeed("synth", "--kind", "trace", "--out", "two.trace.safetensors", "--layers", 2, "--experts", 16, "--top-k", 2, "--ranks", 4,
                     "--micro-steps", 3, "--tokens-per-rank", 512, "--sequences-per-rank", 2)  # fmt: skip
        self.succeed("collect", "two.trace.safetensors", "--out", "two.load.safetensors")
        model = ("--cluster", "h100", "--model", "small.json", "--policy", "vanilla", "--dispatch", "row")

        def vanilla(kind, *arguments):
            (row,) = self.json_of("simulate", f"two.{kind}.safetensors", *model, *arguments)
            return row["attention"], row["step_seconds"]

        self.assertEqual(vanilla("trace", "--sequence-tokens", 4096), vanilla("load"))
        self.assertEqual(vanilla("load")[0], "mean")
        for part in ((), ("--micro-steps", 2), ("--layers", 1)):
            of_trace, of_load = vanilla("trace", *part), vanilla("load", *part)
            self.assertEqual(of_trace[0], "sequences")
            self.assertLess(of_trace[1], of_load[1], "its sequences have fewer than 4096 tokens")
        for arguments, words in (
            (("two.trace.safetensors",), "attention sequences: each sequence by its length in the trace\n"),
            (("two.trace.safetensors", "--sequence-tokens", 99),
             "attention mean: all sequences have 99 tokens, as given, instead of their lengths in the trace\n"),
            (("two.load.safetensors",), "attention mean: all sequences have 4096 tokens\n"),
        ):  # fmt: skip
            self.assertIn(words, self.succeed("simulate", *arguments, *model))

    def test_the_table_names_the_modelled_dispatch(self):
        self.assertIn("dispatch token: sends a token once to each node, and from there once to each rank; estimated", self.on_small()[0])
        self.assertIn("dispatch row: sends every token–expert assignment directly to its rank\n", self.on_small("--dispatch", "row")[0])
        self.refuse("simulate", self.step, "--cluster", "h100", "--model", "small.json", "--dispatch", "packet",
                    saying=("--dispatch", "packet", "token", "row"))  # fmt: skip

    def test_vanilla_is_always_simulated_for_the_speedup(self):
        (alone,) = self.simulate("--policy", "foremoe")
        beside = self.simulate("--policy", "vanilla,foremoe")[1]
        self.assertEqual(alone["speedup_over_vanilla"], beside["speedup_over_vanilla"])

    def test_rollout_time_reduces_the_speedup(self):
        (row,) = self.simulate("--policy", "foremoe", "--rollout-seconds", 5)
        step = row["step_seconds"]
        self.assertAlmostEqual(row["rl_step_speedup"], (step * row["speedup_over_vanilla"] + 5) / (step + 5))

    def test_placement_is_added_to_the_step_unless_the_rollouts_tail_hides_it(self):
        for tail in (0, 1e6):
            vanilla, ours = self.simulate("--policy", "vanilla,foremoe", "--rollout-tail-seconds", tail)
            placement = ours["placement"]
            self.assertGreater(placement["seconds"], 0)
            self.assertEqual(placement["exposed_seconds"], 0 if tail else placement["seconds"])
            self.assertAlmostEqual(placement["step_seconds"], ours["step_seconds"] + placement["exposed_seconds"])
            self.assertAlmostEqual(placement["speedup_over_vanilla"], vanilla["step_seconds"] / placement["step_seconds"])
            self.assertEqual(vanilla["placement"]["seconds"], 0)

    def test_a_budget_reports_the_largest_micro_batch_and_bounds_residency_auto(self):
        tail = ("--rollout-tail-seconds", 10)
        (row,) = self.simulate("--policy", "foremoe", "--memory-budget", 80, "--residency", "auto", *tail)
        self.assertGreater(row["largest_micro_batch_tokens"], 0)
        quickest = min(self.simulate("--policy", "foremoe", "--residency", r)[0]["step_seconds"] for r in ("static", "resident", "shared"))
        self.assertLessEqual(row["step_seconds"], quickest)

    def test_without_residency_or_prefer_a_step_in_which_no_plan_pays_has_none(self):
        given = ("simulate", self.step, "--cluster", "h100", "--model", "small.json", "--policy", "vanilla,foremoe")
        vanilla, ours = self.json_of(*given)
        self.assertEqual((ours["policy"], ours["choice"]["plan"], ours["copies"]), ("foremoe", "no plan", 0))
        self.assertEqual(ours["step_seconds"], vanilla["step_seconds"])
        self.assertIn("foremoe: no plan: no plan ", self.succeed(*given))
        fixed = self.json_of(*given, "--prefer", "time")[1]
        self.assertNotIn("choice", fixed)
        self.assertGreater(fixed["placement"]["step_seconds"], vanilla["step_seconds"])
        self.assertIn("foremoe: with planning slower than no plan", self.succeed(*given, "--prefer", "time"))
        hidden = self.json_of(*given, "--rollout-tail-seconds", 10)[1]
        self.assertEqual(hidden["choice"]["plan"], "static, time")
        self.assertLess(hidden["step_seconds"], vanilla["step_seconds"])

    def test_residency_auto_chooses_the_fastest_within_the_budget(self):
        given = ("--rollout-tail-seconds", 10, "--policy", "foremoe", "--prefer", "balance", "--dispatch", "row", "--residency")  # with dispatch token, the residency with the least memory is the fastest here
        rows = [self.simulate(*given, r)[0] for r in ("static", "resident", "shared")]
        quickest = min(rows, key=lambda row: row["step_seconds"])
        leanest = min(rows, key=lambda row: row["memory_bytes_per_rank"])
        self.assertLess(leanest["memory_bytes_per_rank"], quickest["memory_bytes_per_rank"])
        budget = (leanest["memory_bytes_per_rank"] + quickest["memory_bytes_per_rank"]) / 2
        (unbounded,) = self.simulate(*given, "auto")
        self.assertEqual(unbounded["residency"], quickest["residency"])
        (row,) = self.simulate(*given, "auto", "--memory-budget", budget / 1e9)
        self.assertLessEqual(row["memory_bytes_per_rank"], budget)
        fitting = [other for other in rows if other["memory_bytes_per_rank"] <= budget]
        self.assertEqual(row["residency"], min(fitting, key=lambda other: other["step_seconds"])["residency"])
        self.assertNotEqual(row["residency"], quickest["residency"])

    def test_the_timeline_contains_every_rank(self):
        self.simulate("--policy", "foremoe", "--timeline", "step.json")
        events = json.loads((self.folder / "step.json").read_text())["traceEvents"]
        self.assertEqual({e["pid"] for e in events}, {0, 1, 2, 3})

    def on_small(self, *arguments):
        """Returns stdout and stderr of a run that prints a table."""
        done = self.foremoe("simulate", self.step, "--cluster", "h100", "--model", "small.json", "--guest-slots", 1, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout, done.stderr

    def test_the_timeline_shows_the_last_policy_that_is_not_skipped(self):
        self.simulate("--policy", "foremoe,eplb", "--in-flight", 2, "--timeline", "skipped.json")
        self.simulate("--policy", "foremoe", "--in-flight", 2, "--timeline", "alone.json")
        self.assertEqual(*((self.folder / name).read_text() for name in ("skipped.json", "alone.json")))
        self.refuse("simulate", self.step, "--cluster", "h100", "--model", "small.json", "--policy", "eplb", "--in-flight", 2,
                    "--timeline", "none.json", saying=("--timeline", "eplb"))  # fmt: skip

    def test_notes_a_step_that_exceeds_device_memory(self):
        self.assertNotIn("80 GB", self.on_small("--policy", "vanilla,foremoe")[0])
        self.succeed("synth", "--out", "large.safetensors", "--layers", 1, "--experts", 128, "--top-k", 8, "--micro-steps", 1,
                     "--ranks", 2, "--tokens-per-rank", 64)  # fmt: skip
        given = ("simulate", "large.safetensors", "--cluster", "h100", "--model", "Qwen3-235B-A22B", "--policy", "vanilla")
        (row,) = self.json_of(*given)
        least = f"nothing fits the 80 GB of a rank of H100; the least is {row['memory_bytes_per_rank'] / 1e9:.1f} GB, vanilla"
        self.assertIn(least.lower(), self.succeed(*given).lower())
        self.assertIn(least.lower(), self.foremoe(*given, "--json").stderr.lower())
        experts = 3 * 4096 * 1536 * 94 * 128 // 2 * 12  # bytes of a rank: 12 per parameter of 64 experts in 94 layers
        sharding = f"not sharded (--optimizer-shards 1): {experts / 1e9:.1f} GB per rank; with 8 data-parallel ranks that"
        self.assertIn(sharding, self.succeed(*given))
        self.assertIn(f"share it, {experts / 8e9:.1f} GB", self.succeed(*given))
        self.assertNotIn("not sharded", self.succeed(*given, "--optimizer-shards", 2))
        self.assertIn("the routes are synthetic", self.succeed(*given))

    def test_notes_policies_that_exceed_the_memory_budget(self):
        auto = ("--policy", "foremoe", "--residency", "auto", "--memory-budget")
        self.assertIn("nothing fits the budget of 0.001 GB; the least is", self.on_small(*auto, 0.001)[0])
        self.assertNotIn("the budget of", self.on_small(*auto, 80)[0])
        plan = ("plan", self.step, "--cluster", "h100", "--model", "small.json", "--residency", "auto", "--memory-budget")
        self.assertIn("nothing fits the budget of 0.001 GB; the least is", self.foremoe(*plan, 0.001).stderr)
        self.assertNotIn("budget", self.foremoe(*plan, 80).stderr)
        rows = self.simulate("--policy", "vanilla,foremoe")
        needs = {row["memory_bytes_per_rank"]: row["policy"] for row in rows}
        said = self.on_small("--policy", "vanilla,foremoe", "--residency", "resident", "--memory-budget", sum(needs) / 2e9)[0]
        self.assertRegex(said, rf"more than the budget of \S+ GB: {needs[max(needs)]}; the most is")

    def test_the_table_explains_its_columns_and_the_choice_of_residency_auto(self):
        said = self.on_small("--policy", "foremoe", "--residency", "resident")[0]
        self.assertIn("Columns:\n  step s ", said)
        for word in ("  plan ", "  RL ", "  largest  "):
            self.assertNotIn(word, said)
        (row,) = self.simulate("--policy", "foremoe", "--residency", "auto", "--memory-budget", 80, "--rollout-seconds", 5)
        said = self.on_small("--policy", "foremoe", "--residency", "auto", "--memory-budget", 80, "--rollout-seconds", 5)[0]
        (line,) = [line for line in said.splitlines() if line.startswith("  foremoe ")]
        self.assertIn(f" {row['choice']['plan']} ", line)
        for word in ("  plan  ", "  RL ", "  largest  "):
            self.assertIn("\n" + word, said)

    def test_simulates_several_micro_steps_in_flight(self):
        rows = self.simulate("--policy", "vanilla,foremoe", "--in-flight", 2)
        self.assertTrue(all(row["step_seconds"] > 0 for row in rows))

    def test_a_policy_that_is_not_defined_is_skipped_with_the_reason(self):
        rows = self.simulate("--policy", "vanilla,eplb", "--in-flight", 2)
        self.assertIn("skipped", rows[1])

    def test_without_a_model_a_known_model_must_fit(self):
        self.refuse("simulate", self.step, "--cluster", "h100", saying=("--model", "Mixtral-16x2B", "all fit"))
        of_24 = self.synthesise("other.safetensors", experts=24)
        self.refuse("simulate", of_24, "--cluster", "h100", saying=("--model", "24 experts"))
        self.refuse("simulate", self.step, "--cluster", "h1000", "--model", "small.json", saying=("h1000", "h100"))


if __name__ == "__main__":
    unittest.main()
