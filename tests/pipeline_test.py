"""Tests the pipeline of the README, from a rollout to a verified plan."""

import json
import unittest

import safetensors_file as st
from foremoe_command import BUNDLED, CommandTest

PLAN_KEYS = {
    "policy", "events", "micro_steps", "layers", "ranks", "experts", "guest_slots", "residency", "in_flight", "rho",
    "rho_lower_bound", "rho_padded", "max_rank_tokens", "copies_per_layer_event", "copies_max_per_rank", "home_moves",
    "guests_per_layer", "node_link_tokens", "plan_seconds", "plan_us_per_layer_micro_step", "threads",
    "max_vio", "avg_vio",
}  # fmt: skip
PARTS = {
    "rho": {"mean", "p99", "max"},
    "rho_lower_bound": {"mean"},
    "rho_padded": {"mean", "max"},
    "node_link_tokens": {"mean", "max"},
    "node_link_rows": {"mean", "max"},
}


class Pipeline(CommandTest):
    def assert_has_all_figures(self, figures, of_trace):
        self.assertLessEqual(PLAN_KEYS | ({"node_link_rows"} if of_trace else set()), figures.keys())
        for key, parts in PARTS.items():
            if key in figures:
                self.assertLessEqual(parts, figures[key].keys(), key)

    def test_collects_plans_verifies_compares_and_inspects_a_synthetic_trace(self):
        self.synthesise("step.trace.safetensors", kind="trace")
        counted = self.json_of("collect", "step.trace.safetensors", "--out", "step.load.safetensors")
        self.assertEqual((counted["micro_steps"], counted["ranks"], counted["assignments"]), (3, 4, 3 * 2 * 4 * 64 * 2))
        for step in ("step.trace.safetensors", "step.load.safetensors"):
            figures = self.json_of("plan", step, "--guest-slots", 1, "--out", "plan.safetensors")
            self.assert_has_all_figures(figures, of_trace="trace" in step)
            self.assertEqual((figures["policy"], figures["residency"], figures["events"]), ("foremoe", "resident", 3))
            report = self.json_of("verify", step, "plan.safetensors")
            self.assertEqual((report["ok"], report["violations"]), (True, []))
            for row in self.json_of("compare", step, "--guest-slots", 1, "--policy", "vanilla,foremoe"):
                self.assert_has_all_figures(row, of_trace="trace" in step)
                self.assertTrue(row["ok"])
        for file, kind in (("step.trace.safetensors", "trace"), ("step.load.safetensors", "load"), ("plan.safetensors", "plan")):
            self.assertEqual(self.json_of("inspect", file)["kind"], kind)

    def test_a_trace_and_its_load_have_the_same_plan(self):
        self.succeed("collect", BUNDLED, "--out", "math.load.safetensors")
        self.succeed("plan", BUNDLED, "--out", "a.safetensors")
        self.succeed("plan", "math.load.safetensors", "--out", "b.safetensors")
        self.assertEqual(self.files()["a.safetensors"], self.files()["b.safetensors"])
        self.succeed("verify", BUNDLED, "b.safetensors")

    def test_planning_balances_the_bundled_rollout(self):
        vanilla, planned = self.json_of("compare", BUNDLED, "--guest-slots", 2, "--policy", "vanilla,foremoe")
        self.assertEqual((vanilla["policy"], vanilla["copies"], vanilla["guests_per_layer"]), ("vanilla", 0, 0))
        self.assertGreater(vanilla["rho"]["mean"], 1.2)
        self.assertLess(planned["rho"]["mean"], 1.02)
        self.assertGreaterEqual(planned["rho"]["mean"], planned["rho_lower_bound"]["mean"])

    def test_all_commands_report_the_same_figures(self):
        alone = self.json_of("plan", BUNDLED, "--policy", "vanilla")
        (beside,) = self.json_of("compare", BUNDLED, "--policy", "vanilla")
        timings = ("plan_seconds", "plan_us_per_layer_micro_step", "ok")
        self.assertEqual({k: v for k, v in alone.items() if k not in timings},
                         {k: v for k, v in beside.items() if k not in timings})

    def test_plans_with_all_options_verify(self):
        step = self.synthesise()
        ways = [["--residency", r] for r in ("static", "resident", "shared", "free")]
        ways += [["--in-flight", k] for k in (2, 4, 100)]
        ways += [["--stages", s] for s in ("none", "B", "PT", "BLPT")]
        ways += [["--rehome", n] for n in (1, "free")]
        ways += [["--prefer", "links", "--ranks-per-node", 2], ["--tolerance", 0], ["--guest-slots", 0], ["--guest-slots", 14],
                 ["--max-copies-per-rank", 0], ["--max-copies-per-source", 1], ["--min-tokens-per-guest", 20],
                 ["--ranks", 2, "--fold"], ["--ranks", 1, "--fold"], ["--layers", 1, "--micro-steps", 2]]  # fmt: skip
        for way in ways:
            with self.subTest(way):
                self.succeed("plan", step, *way, "--out", "plan.safetensors")
                self.succeed("verify", step, "plan.safetensors")

    def test_the_plan_records_the_options_by_their_long_names(self):
        step = self.synthesise()
        self.succeed("plan", step, "-G", 2, "--rehome", "free", "--stages", "PT", "--max-copies-per-rank", 1, "--out", "p")
        options = self.json_of("inspect", "p")["options"]
        self.assertEqual(
            {k: options[k] for k in ("guest-slots", "rehome", "stages", "max-copies-per-rank")},
            {"guest-slots": 2, "rehome": "free", "stages": "PT", "max-copies-per-rank": 1})

    def test_homes_and_a_warm_start_come_from_a_plan(self):
        step = self.synthesise()
        self.succeed("plan", step, "--rehome", "free", "--out", "first.safetensors")
        self.succeed("plan", step, "--homes", "first.safetensors", "--previous", "first.safetensors", "--out", "second.safetensors")
        homes = [st.read(self.folder / f"{name}.safetensors")[1]["home"] for name in ("first", "second")]
        self.assertEqual(*homes)
        self.succeed("verify", step, "second.safetensors", "--homes", "first.safetensors")
        self.assertEqual(self.foremoe("verify", step, "second.safetensors", "--homes", "contiguous").returncode, 1)

    def test_reports_why_a_policy_cannot_plan_an_input(self):
        step = self.synthesise()
        rows = self.json_of("compare", step, "--policy", "all", "--in-flight", 2)
        self.assertIn("skipped", {key for row in rows for key in row})
        for row in rows:
            if "skipped" in row:
                self.assertEqual(row.keys(), {"policy", "skipped"})
                self.assertTrue(row["skipped"])
                self.refuse("plan", step, "--policy", row["policy"], "--in-flight", 2, "--out", "new", saying=[row["skipped"]])
            else:
                self.assert_has_all_figures(row, of_trace=False)

    def test_plans_of_every_policy_verify(self):
        step = self.synthesise()
        slots = ("--guest-slots", 4)  # the number of home slots, which some policies require
        rows = self.json_of("compare", step, "--policy", "all", *slots)
        self.assertLessEqual({"vanilla", "eplb", "static", "finemoe", "foremoe"}, {row["policy"] for row in rows})
        for row in rows:
            with self.subTest(row["policy"]):
                self.assertNotIn("skipped", row)
                self.assertEqual(self.json_of("plan", step, "--policy", row["policy"], *slots, "--out", "plan")["rho"], row["rho"])
                self.succeed("verify", step, "plan")

    def test_a_policy_can_predict_from_the_previous_step(self):
        step, former = self.synthesise(), self.synthesise("former", seed=2)
        (knows,) = self.json_of("compare", step, "--policy", "eplb")
        (predicts,) = self.json_of("compare", step, "--policy", "eplb", "--previous-load", former)
        self.assertTrue(predicts["ok"])
        self.assertNotEqual(predicts["rho"], knows["rho"])

    def test_a_step_without_load_is_reported_as_no_load(self):
        def emptied(metadata, tensors):
            dtype, shape, data = tensors["load"]
            tensors["load"] = (dtype, shape, bytes(len(data)))

        step = self.synthesise()
        self.change(step, emptied)
        for arguments in (["plan", step, "--out", "plan"], ["compare", step], ["inspect", step], ["inspect", "plan"],
                          ["verify", step, "plan"]):  # fmt: skip
            with self.subTest(arguments):
                text = self.succeed(*arguments)
                self.assertIn("no load", text)
                self.assertNotIn("perfect", text)
                self.assertNotIn("ρ mean 0", text)

    def test_the_table_of_compare_explains_its_columns(self):
        text = self.succeed("compare", BUNDLED, "--policy", "vanilla,foremoe")
        for word in ("vanilla", "foremoe", "ρ mean", "copies", "1 is perfect", "residency resident", "1 micro-step in flight"):
            self.assertIn(word, text)

    def test_uses_recorded_batching_for_the_same_ranks_and_notes_rebatching(self):
        asked = self.foremoe("plan", BUNDLED, "--ranks", 8, "--json")
        self.assertEqual((asked.returncode, asked.stderr), (0, ""))
        other = self.foremoe("plan", BUNDLED, "--ranks", 16, "--json")
        self.assertEqual(other.returncode, 0)
        self.assertIn("batched again", other.stderr)
        more = "A smaller --tokens-per-rank gives more micro-steps"
        collect = ("collect", self.synthesise("step.trace.safetensors", kind="trace"), "--ranks", 2, "--out", "load.safetensors")
        self.assertIn(more, self.foremoe(*collect).stderr)
        self.assertNotIn(more, self.foremoe(*collect, "--tokens-per-rank", 300).stderr)

    def test_says_that_one_policy_is_expected_which_values_are_missing_and_which_guest_slots_are_useless(self):
        step = self.synthesise()
        self.refuse("plan", step, "--policy", "vanilla,eplb", saying=["--policy: 'vanilla,eplb', expected one policy; foremoe compare"])
        self.refuse("compare", step, "--plot", saying=["--plot requires a value: FILE"])
        useless = "--guest-slots 13: a rank can use 12"
        self.assertIn(useless, self.foremoe("plan", step, "--guest-slots", 13).stderr)
        self.assertEqual(self.foremoe("plan", step, "--guest-slots", 12).stderr, "")

    def test_notes_folding_and_the_verifier_folds_equally(self):
        step = self.synthesise()
        done = self.foremoe("plan", step, "--ranks", 2, "--fold", "--out", "plan.safetensors")
        self.assertEqual(done.returncode, 0)
        self.assertIn("folded to 2", done.stderr)
        self.assertTrue(self.json_of("inspect", "plan.safetensors")["options"]["fold"])
        self.succeed("verify", step, "plan.safetensors")

    def test_plans_of_folded_loads_that_do_not_record_it_verify(self):
        step = self.synthesise()
        self.succeed("plan", step, "--ranks", 2, "--fold", "--out", "plan.safetensors")

        def forgotten(metadata, tensors):
            options = json.loads(metadata["options"])
            del options["fold"]
            metadata["options"] = json.dumps(options)

        self.change("plan.safetensors", forgotten)
        self.succeed("verify", step, "plan.safetensors")

    def test_fewer_ranks_than_those_of_a_load_need_a_decision(self):
        step = self.synthesise()
        for command in ("plan", "compare", "inspect", "run"):
            with self.subTest(command):
                self.refuse(command, step, "--ranks", 2, saying=[step, "--ranks: 2", "4 ranks", "--ep 2", "--fold"])
                self.refuse(command, step, "--ranks", 8, saying=[f"--ranks: 8, but {step} is a load of 4 ranks"])

    def test_the_verifier_uses_the_batching_of_the_plan(self):
        self.succeed("plan", BUNDLED, "--ranks", 4, "--tokens-per-rank", 3000, "--out", "plan.safetensors")
        self.succeed("verify", BUNDLED, "plan.safetensors")


class Tables(CommandTest):
    def table_of(self, text):
        lines = text.splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith("  policy"))
        end = next(i for i, line in enumerate(lines) if line.startswith("Columns"))
        return [line for line in lines[begin:end] if line.strip()]

    def test_a_table_fits_a_narrow_terminal_without_losing_columns(self):
        step = self.synthesise()
        arguments = ["compare", step, "--policy", "vanilla,foremoe"]
        wide = self.table_of(self.succeed(*arguments))
        narrow = self.table_of(self.on_a_terminal(arguments, columns=60))
        self.assertGreater(max(map(len, wide)), 60)
        self.assertLessEqual(max(map(len, narrow)), 60)
        heads = lambda rows: [word for row in rows if row.startswith("  policy") for word in row.split() if word != "policy"]
        self.assertEqual(heads(narrow), heads(wide))

    def test_policies_can_be_a_list_or_repeated_options(self):
        step = self.synthesise()
        listed = self.succeed("compare", step, "--policy", "vanilla,static")
        names = lambda text: [row.split()[0] for row in self.table_of(text)]
        self.assertEqual(names(listed), names(self.succeed("compare", step, "--policy", "vanilla", "--policy", "static")))

    def test_compare_shows_residency_and_marks_plans_that_cannot_train(self):
        rows = self.table_of(self.succeed("compare", self.synthesise(), "--policy", "vanilla,eplb,static,foremoe"))
        self.assertEqual([row.split()[:2] for row in rows],
                         [["policy", "residency"], ["vanilla", "static"], ["eplb", "free*"], ["static", "static"],
                          ["foremoe", "resident"]])  # fmt: skip


if __name__ == "__main__":
    unittest.main()
